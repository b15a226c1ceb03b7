"""Loops that restore coded keys and values, compiled; `codes.groups.codec` is their reference.

Pools are float32, or bfloat16 as the bits of its numbers in uint16. Codes of a token are joined in
a row of bytes first: loops are made into vectors the better, the fewer arrays they read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Float32s, Indices, Uint8s

# As in `codes.groups.codec`, which this package may not import.
GROUP_TOKENS = 64
# Rows of bytes with 4 and with 2 bits of each token of a group.
_HALF, _QUARTER = GROUP_TOKENS // 2, GROUP_TOKENS // 4
_POOLS = ("float32[:, :, ::1]", "uint16[:, :, ::1]")


@compiled(*(f"({pool}, int64, int64, uint64, float32)" for pool in _POOLS), makes_arrays=False)
def _set(pool: Any, slot: int, head: int, element: int, number: Any) -> None:
    """Put a float32 number into a pool, rounded to nearest even."""
    if pool.itemsize == 4:
        pool[slot, head, element] = number
    else:
        bits = np.float32(number).view(np.uint32)
        odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        word = np.uint32(bits + np.uint32(0x7FFF) + odd)
        pool[slot, head, element] = np.uint16(word >> np.uint32(16))


@compiled("(uint8[::1], uint64, uint8[::1])", makes_arrays=False)
def _put_upper(group: Uint8s, begin: Any, rows: Uint8s) -> None:
    """Begin rows of a head's codes, one per token, with the upper bits from `begin` on."""
    size = np.uint64(len(rows)) >> np.uint64(1)
    for byte in range(size):
        both = group[begin + byte]
        rows[byte] = both << np.uint8(4)
        rows[size + byte] = both & np.uint8(240)


@compiled(
    *(
        f"(uint8[:, ::1], int64, int64, int64, int64, float32[:, ::1], int64, int64[::1], {pool})"
        for pool in _POOLS
    )
)
def restore_keys(
    groups: Uint8s,
    pairs: int,
    upper: int,
    columns: int,
    num_pairs: int,
    ranges: Float32s,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Fill slots int64 [n], distinct, with the keys of the tokens from `first` on.

    In each of the groups uint8 [groups, bytes] begin `pairs` [G, Dk], the numbers of pairs, `upper`
    bits [G, rows, Dk], and in `columns` the pairs [rows, num_pairs]. `ranges` [groups, n] have
    first [G, 2, Dk], low and step of each channel. The pool is [slots, G, Dk].
    """
    heads, dim = pool.shape[1:]
    rows, half = np.empty(GROUP_TOKENS * dim, np.uint8), np.empty(dim, np.float32)
    # Rows of bytes with the upper pair of each channel, then rows with the lower one.
    size = np.uint64(_QUARTER * dim)
    spread, targets = np.empty(2 * size, np.uint8), np.empty(2 * dim + 1, np.uint64)
    place = 0
    while place < len(slots):
        group, token = divmod(first + place, GROUP_TOKENS)
        count = min(GROUP_TOKENS - token, len(slots) - place)
        codes, begin = groups[group], np.uint64(columns)
        for head in range(heads):
            filled = np.uint64(0)
            for channel in range(np.uint64(dim)):
                kept = codes[pairs + head * dim + channel]
                # Without a branch, which would be unpredictable.
                targets[filled] = channel
                filled += np.uint64(kept > 0)
                targets[filled] = size + channel
                filled += np.uint64(kept > 1)
                # From the lowest value of a cell to its middle.
                half[channel] = np.float32(7.5 if kept == 0 else 1.5 if kept == 1 else 0.0)
            spread[:] = 0
            for line in range(np.uint64(_QUARTER)):
                source, target = begin + line * np.uint64(num_pairs), line * np.uint64(dim)
                for pair in range(filled):
                    spread[target + targets[pair]] = codes[source + pair]
            begin += filled
            _put_upper(codes, np.uint64(upper + head * _HALF * dim), rows)
            for part in range(np.uint64(4)):
                shift, to = np.uint8(np.uint64(2) * part), part * size
                for byte in range(size):
                    both = (spread[byte] >> shift & np.uint8(3)) << np.uint8(2)
                    rows[to + byte] |= both | (spread[size + byte] >> shift & np.uint8(3))
            low, step = np.uint64(head * 2 * dim), np.uint64((head * 2 + 1) * dim)
            for inner in range(count):
                slot, at = slots[place + inner], np.uint64((token + inner) * dim)
                for channel in range(np.uint64(dim)):
                    middle = np.float32(rows[at + channel]) + half[channel]
                    number = ranges[group, low + channel] + middle * ranges[group, step + channel]
                    _set(pool, slot, head, channel, number)
        place += count


@compiled(
    *(
        f"(uint8[:, ::1], int64, int64, int64, float32[:, ::1], int64, int64, int64[::1], {pool})"
        for pool in _POOLS
    )
)
def restore_values(
    groups: Uint8s,
    upper: int,
    more: int,
    more_bits: int,
    ranges: Float32s,
    first_range: int,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Fill slots int64 [n], distinct, with the values of the tokens from `first` on.

    In each of the groups uint8 [groups, bytes] begin `upper` bits [G, rows, Dv] and, in `more`,
    `more_bits` more of each value. `ranges` [groups, n] have from `first_range` on [tokens of a
    group, G, 2], low and step of each vector. The pool is [slots, G, Dv].
    """
    heads, dim = pool.shape[1:]
    rows = np.empty(GROUP_TOKENS * dim, np.uint8)
    size, mask = np.uint64(GROUP_TOKENS // 8 * more_bits * dim), np.uint8((1 << more_bits) - 1)
    left = np.uint8(4 - more_bits)
    half = np.float32((1 << (4 - more_bits)) - 1) / np.float32(2)
    place = 0
    while place < len(slots):
        group, token = divmod(first + place, GROUP_TOKENS)
        count = min(GROUP_TOKENS - token, len(slots) - place)
        codes = groups[group]
        for head in range(heads):
            _put_upper(codes, np.uint64(upper + head * _HALF * dim), rows)
            begin = np.uint64(more) + np.uint64(head) * size
            for part in range(np.uint64(8 // more_bits)):
                shift, to = np.uint8(part * np.uint64(more_bits)), part * size
                for byte in range(size):
                    rows[to + byte] |= (codes[begin + byte] >> shift & mask) << left
            for inner in range(count):
                slot, at = slots[place + inner], np.uint64((token + inner) * dim)
                own_range = first_range + ((token + inner) * heads + head) * 2
                low, step = ranges[group, own_range], ranges[group, own_range + 1]
                for element in range(np.uint64(dim)):
                    middle = np.float32(rows[at + element]) + half
                    _set(pool, slot, head, element, low + middle * step)
        place += count
