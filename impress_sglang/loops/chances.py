"""Moving averages of what is selected, one 8-bit code for each token or block.

As in `planning.py`, results that are arrays are new, except where a function says that it changes
its arguments.
"""

from __future__ import annotations

import numpy as np

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.planning import between
from impress_sglang.loops.types import Flags, Indices, Uint8s


@compiled("(uint8[::1], boolean[::1], uint8[::1], uint8[::1])")
def move_codes(codes: Uint8s, wanted: Flags, kept: Uint8s, raised: Uint8s) -> None:
    """Update the chance of every block, in place.

    Args:
        codes: uint8 [blocks].
        wanted: bool [blocks].
        kept: uint8 [256], the new code for each code whose block was not wanted.
        raised: uint8 [256], likewise for each code whose block was wanted.
    """
    for block in range(len(codes)):
        codes[block] = raised[codes[block]] if wanted[block] else kept[codes[block]]


@compiled("(uint8[:, ::1], int64[:, ::1], int64, int64, int64, uint8[::1], uint8[::1])")
def move_averages(
    averages: Uint8s,
    tokens: Indices,
    first: int,
    stop: int,
    start: int,
    kept: Uint8s,
    raised: Uint8s,
) -> None:
    """Update the average of every token of a span, in place.

    Args:
        averages: uint8 [head groups, tokens of the segment].
        tokens: int64 [head groups, k], the selected ones, distinct in a head group; see
            `locate_rows`.
        first: see `locate_rows`.
        stop: see `locate_rows`.
        start: see `locate_rows`.
        kept: uint8 [256], the new average for each one whose token was not selected.
        raised: uint8 [256], likewise for each one whose token was selected.
    """
    num_head_groups, k = tokens.shape
    before = np.empty(k, np.uint8)
    for head_group in range(num_head_groups):
        own = averages[head_group, start : start + stop - first]
        selected = tokens[head_group]
        low, high = between(selected, first, stop)
        if high - low == len(own):
            for token in range(len(own)):
                own[token] = raised[own[token]]
            continue
        for j in range(low, high):
            before[j] = own[np.uint64(selected[j] - first)]
        for token in range(len(own)):
            own[token] = kept[own[token]]
        for j in range(low, high):
            own[np.uint64(selected[j] - first)] = raised[before[j]]


@compiled("(uint8[::1], boolean[::1])")
def weigh_codes(codes: Uint8s, candidates: Flags) -> Indices:
    """How many of the candidates have each code, int64 [256]; both arguments are flat."""
    counts = np.zeros(256, np.int64)
    for block in range(len(codes)):
        counts[codes[block]] += candidates[block]
    return counts


@compiled("(uint8[::1], boolean[::1], int64)")
def likely_flags(codes: Uint8s, candidates: Flags, threshold: int) -> Flags:
    """The candidates whose code is at least `threshold`; both arrays are flat."""
    likely = np.empty(len(codes), np.bool_)
    for block in range(len(codes)):
        likely[block] = candidates[block] and codes[block] >= threshold
    return likely
