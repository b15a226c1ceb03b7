"""Scores of chunks: how often they were accessed, times the share of their rows that was wanted.

A score is frequency x share x 2**doublings, which outgrows every float. As a priority it is an
int64: its exponent, and below that as many bits of its fraction as fit. So priorities have the
order of the scores, as far as these differ by more than a relative 2**-32.
"""

from __future__ import annotations

import math

import numpy as np

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Floats, Indices, Int32s, Uint16s

_FRACTION_BITS = 32
# Larger than the magnitude of any negative exponent of a float.
_BIAS = 1100


@compiled("int64(float64, int64)")
def score_of(score: float, doublings: int) -> int:
    """The priority of a score x 2**doublings; 0 for a score of 0."""
    if score <= 0.0:
        return 0
    fraction, exponent = math.frexp(score)
    below = int((2.0 * fraction - 1.0) * 2.0**_FRACTION_BITS)
    return ((exponent + doublings + _BIAS) << _FRACTION_BITS) + below


@compiled("int64[::1](int64[::1], float64[::1], float64[::1], int32[::1])")
def scores_of(ids: Indices, averages: Floats, frequencies: Floats, doublings: Int32s) -> Indices:
    """Priorities of chunks, int64 [n]; see `record_scores`."""
    found = np.empty(len(ids), np.int64)
    for place in range(len(ids)):
        chunk = ids[place]
        found[place] = score_of(frequencies[chunk] * averages[chunk], int(doublings[chunk]))
    return found


@compiled(
    "int64[::1](int64[::1], float64[::1], uint16[::1], float64[::1], float64[::1], int32[::1], "
    "int64, float64, int64)"
)
def record_scores(
    ids: Indices,
    shares: Floats,
    accesses: Uint16s,
    averages: Floats,
    frequencies: Floats,
    doublings: Int32s,
    now: int,
    least_weight: float,
    most_accesses: int,
) -> Indices:
    """Count an access to distinct chunks; returns their priorities, int64 [n].

    Args:
        ids: int64 [n].
        shares: float64 [n], share of each chunk's rows that is wanted.
        accesses: uint16, by id, changed in place.
        averages: float64, moving averages of the shares, by id, changed in place.
        frequencies: float64, by id, changed in place, each in units of 2**(its doublings).
        doublings: int32, by id, changed in place: the doublings when a chunk was last accessed.
        now: doublings until now; an access adds 2**now.
        least_weight: the least weight of a share in its average; the first shares count alike.
        most_accesses: the count at which counting stops.
    """
    found = np.empty(len(ids), np.int64)
    # A division takes longer than everything else.
    always_least = 2.0 / least_weight
    for place in range(len(ids)):
        chunk = np.uint64(ids[place])
        if accesses[chunk] < most_accesses:
            accesses[chunk] += np.uint16(1)
        weight = least_weight
        if accesses[chunk] < always_least:
            weight = max(1.0 / accesses[chunk], least_weight)
        old = averages[chunk]
        average = old + weight * (shares[place] - old)
        averages[chunk] = average
        if doublings[chunk] != now:
            frequencies[chunk] = math.ldexp(frequencies[chunk], int(doublings[chunk]) - now)
            doublings[chunk] = now
        frequencies[chunk] += 1.0
        found[place] = score_of(frequencies[chunk] * average, now)
    return found


@compiled("(int64[::1], int64[::1], int64[::1], int64)", makes_arrays=False)
def update_scores(ids: Indices, found: Indices, priorities: Indices, kept: int) -> None:
    """Put priorities, int64 [n], into the table by id, except where that has `kept` or more."""
    for place in range(len(ids)):
        if priorities[ids[place]] < kept:
            priorities[ids[place]] = found[place]
