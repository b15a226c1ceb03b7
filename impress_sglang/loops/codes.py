"""Loops over coded keys and values, compiled; `codes.planes.codec` is their reference.

Bytes are laid out as in `codes.planes.layout.CodeLayout`: 4 bits of each element, and sections of
one bit of each value, or of pairs of bits of some channels of keys. An element is restored as the
middle of the values that share its known bits. Pools are float32, or bfloat16 as the bits of its
numbers in uint16.

Whole groups are prepared before they are put into slots: a row that was written in words cannot be
read in vectors at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.packed import (
    GROUP_TOKENS,
    NUM_SECTIONS,
    WORD,
    add_bits,
    add_upper,
    find_pairs,
    five_bits,
    join_pairs,
    to_columns,
    to_rows,
)
from impress_sglang.loops.types import Float32s, Indices, Uint8s

_POOLS = ("float32[:, :, ::1]", "uint16[:, :, ::1]")
_BYTES = "uint8[::1]"


@intrinsic
def _bits_of(typing_context: Any, number: Any) -> Any:
    """The bits of a float32 number, uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _number_of(typing_context: Any, bits: Any) -> Any:
    """The float32 number that has these bits, uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _get(pool: Any, slot: int, head: int, element: int) -> Any:
    """A number of a pool, float32."""
    raise NotImplementedError


def _set(pool: Any, slot: int, head: int, element: int, number: Any) -> None:
    """Put a float32 number into a pool, rounded to nearest even."""
    raise NotImplementedError


@overload(_get, inline="always")
def _get_compiled(pool: Any, slot: Any, head: Any, element: Any) -> Any:
    def same(pool: Any, slot: Any, head: Any, element: Any) -> Any:
        return pool[slot, head, element]

    def widened(pool: Any, slot: Any, head: Any, element: Any) -> Any:
        return _number_of(np.uint32(np.uint32(pool[slot, head, element]) << np.uint32(16)))

    return same if pool.dtype == types.float32 else widened


@overload(_set, inline="always")
def _set_compiled(pool: Any, slot: Any, head: Any, element: Any, number: Any) -> Any:
    def same(pool: Any, slot: Any, head: Any, element: Any, number: Any) -> None:
        pool[slot, head, element] = number

    def rounded(pool: Any, slot: Any, head: Any, element: Any, number: Any) -> None:
        bits = _bits_of(np.float32(number))
        odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        word = np.uint32(bits + np.uint32(0x7FFF) + odd)
        pool[slot, head, element] = np.uint16(word >> np.uint32(16))

    return same if pool.dtype == types.float32 else rounded


@compiled(
    *(
        f"({_BYTES}, int64, int64, int64, int64, float32[:, ::1], int64, int64[::1], {pool})"
        for pool in _POOLS
    )
)
def restore_keys(
    groups: Uint8s,
    group_bytes: int,
    sections: int,
    upper: int,
    pairs: int,
    ranges: Float32s,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Fill slots with the keys of the tokens from `first` on.

    Args:
        groups: groups of `group_bytes` bytes.
        group_bytes: see there.
        sections: where in a group those of pairs begin, [G, Dk]; see `codes.planes.codec.Codes`.
        upper: where upper bits begin, [tokens of a group, G, Dk / 2].
        pairs: where the first section begins, [tokens of a group, G, Dk / 8].
        ranges: [groups, n], of each group [G, 2, Dk] first, low and step of each channel.
        first: counted from the first token of the groups.
        slots: [n], distinct.
        pool: [slots, G, Dk].
    """
    heads, dim = pool.shape[1:]
    width, narrow = dim // 2, dim // 8
    columns = np.zeros((NUM_SECTIONS * narrow + 1) * GROUP_TOKENS, np.uint8)
    joined = np.empty(dim * GROUP_TOKENS, np.uint8)
    rows = np.empty(dim * GROUP_TOKENS, np.uint8)
    places, shifts = np.empty(2 * dim, np.int64), np.empty(2 * dim, np.int64)
    means, halves = np.empty(dim, np.float32), np.empty(dim, np.float32)
    place = 0
    while place < len(slots):
        group, token = divmod(first + place, GROUP_TOKENS)
        count = min(GROUP_TOKENS - token, len(slots) - place)
        skipped = token % WORD
        whole = (skipped + count + WORD - 1) // WORD * WORD
        begin = group * group_bytes
        for head in range(heads):
            at = begin + pairs + ((token - skipped) * heads + head) * narrow
            to_columns(groups, at, heads * narrow, narrow, whole, columns, 0)
            find_pairs(groups, begin + sections + head * dim, dim, 1, places, shifts, means)
            join_pairs(columns, places, shifts, dim, joined)
            to_rows(joined, whole, dim, rows)
            for channel in range(dim):
                # From the lowest value of a cell to its middle; what is known is no longer in it.
                halves[channel] = np.float32(7.5) - means[channel]
            for inner in range(count):
                at = begin + upper + ((token + inner) * heads + head) * width
                if width % 64:
                    add_upper(groups, at, width, rows, (skipped + inner) * dim)
                    continue
                # Slices, because LLVM makes vectors of 64 bytes of these and of nothing else.
                both = groups[at : at + width]
                own = rows[(skipped + inner) * dim : (skipped + inner + 1) * dim]
                for byte in range(width):
                    own[byte] |= (both[byte] & 15) << 4
                    own[width + byte] |= both[byte] & 240
            low, step = head * 2 * dim, (head * 2 + 1) * dim
            for inner in range(count):
                slot, own = slots[place + inner], (skipped + inner) * dim
                for element in range(dim):
                    middle = np.float32(rows[own + element]) + halves[element]
                    number = ranges[group, low + element] + middle * ranges[group, step + element]
                    _set(pool, slot, head, element, number)
        place += count


@compiled(
    *(
        f"({_BYTES}, int64, int64, int64, float32[:, ::1], int64, int64, int64[::1], {pool})"
        for pool in _POOLS
    )
)
def restore_values(
    groups: Uint8s,
    group_bytes: int,
    upper: int,
    bits: int,
    ranges: Float32s,
    first_range: int,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Fill slots with the values of the tokens from `first` on.

    Args:
        groups: groups of `group_bytes` bytes.
        group_bytes: see there.
        upper: where in a group upper bits begin, [tokens of a group, G, Dv / 2].
        bits: where the first section begins, [tokens of a group, G, Dv / 8].
        ranges: [groups, n], of each group from `first_range` on [tokens of a group, G, 2], low and
            step of each vector.
        first_range: see there.
        first: counted from the first token of the groups.
        slots: [n], distinct.
        pool: [slots, G, Dv].
    """
    heads, dim = pool.shape[1:]
    width, narrow = dim // 2, dim // 8
    rows = np.empty(dim * GROUP_TOKENS, np.uint8)
    place = 0
    while place < len(slots):
        group, token = divmod(first + place, GROUP_TOKENS)
        count = min(GROUP_TOKENS - token, len(slots) - place)
        for head in range(heads):
            for inner in range(count):
                vector = (token + inner) * heads + head
                at = group * group_bytes + upper + vector * width
                fifth = group * group_bytes + bits + vector * narrow
                five_bits(groups, at, fifth, narrow, rows, inner * dim)
            for inner in range(count):
                slot, own = slots[place + inner], inner * dim
                own_range = first_range + ((token + inner) * heads + head) * 2
                low, step = ranges[group, own_range], ranges[group, own_range + 1]
                for element in range(dim):
                    middle = np.float32(rows[own + element]) + np.float32(3.5)
                    _set(pool, slot, head, element, low + middle * step)
        place += count


@compiled(
    *(
        f"({_BYTES}, int64, int64, int64[:, ::1], {_BYTES}, int64, int64, float32[:, ::1], int64, "
        f"int64[::1], {pool})"
        for pool in _POOLS
    )
)
def raise_keys(
    planes: Uint8s,
    plane_bytes: int,
    unit_tokens: int,
    units: Indices,
    groups: Uint8s,
    group_bytes: int,
    sections: int,
    ranges: Float32s,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Add planes to the keys that slots hold.

    Args:
        planes: planes of units, each of `plane_bytes` bytes, which begin with keys.
        plane_bytes: see there.
        unit_tokens: number of tokens of a unit, a multiple of `WORD`.
        units: [k, 5]: head, first token (counted from that of the first slot, may be below 0), and
            which of `planes` are its planes, -1 for one that is not added.
        groups: groups of `group_bytes` bytes.
        group_bytes: see there.
        sections: where in a group those of pairs begin, [G, Dk]; see `codes.planes.codec.Codes`.
        ranges: as of `restore_keys`.
        first: place of the first slot's token in the first group.
        slots: [n], distinct.
        pool: [slots, G, Dk].
    """
    dim = pool.shape[2]
    narrow = dim // 8
    columns = np.zeros((NUM_SECTIONS * narrow + 1) * GROUP_TOKENS, np.uint8)
    joined = np.empty(dim * GROUP_TOKENS, np.uint8)
    rows = np.empty(dim * GROUP_TOKENS, np.uint8)
    places, shifts = np.empty(2 * dim, np.int64), np.empty(2 * dim, np.int64)
    means, step = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for number in range(len(units)):
        head, start = units[number, 0], units[number, 1]
        inner, stop = max(0, -start), min(unit_tokens, len(slots) - start)
        while inner < stop:
            group, token = divmod(first + start + inner, GROUP_TOKENS)
            count = min(GROUP_TOKENS - token, stop - inner)
            skipped = token % WORD
            whole = (skipped + count + WORD - 1) // WORD * WORD
            wanted = 0
            for section in range(1, NUM_SECTIONS):
                plane = units[number, 1 + section]
                if plane >= 0:
                    wanted |= 1 << section
                    at = plane * plane_bytes + (inner - skipped) * narrow
                    to = section * narrow * GROUP_TOKENS
                    to_columns(planes, at, narrow, narrow, whole, columns, to)
            at = group * group_bytes + sections + head * dim
            find_pairs(groups, at, dim, wanted, places, shifts, means)
            join_pairs(columns, places, shifts, dim, joined)
            to_rows(joined, whole, dim, rows)
            for channel in range(dim):
                # A copy: Numba counts an index from the end where it may be negative.
                step[channel] = ranges[group, (head * 2 + 1) * dim + channel]
            for more in range(count):
                slot, own = slots[start + inner + more], (skipped + more) * dim
                for element in range(dim):
                    gained = np.float32(rows[own + element]) - means[element]
                    old = _get(pool, slot, head, element)
                    better = old + gained * step[element]
                    _set(pool, slot, head, element, better)
            inner += count


@compiled(
    *(
        f"({_BYTES}, int64, int64, int64, int64[:, ::1], float32[:, ::1], int64, int64, "
        f"int64[::1], {pool})"
        for pool in _POOLS
    )
)
def raise_values(
    planes: Uint8s,
    plane_bytes: int,
    begin: int,
    unit_tokens: int,
    units: Indices,
    ranges: Float32s,
    first_range: int,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Add planes to the values that slots hold.

    Args:
        planes: planes of units, each of `plane_bytes` bytes, of which values begin at `begin`.
        plane_bytes: see there.
        begin: see there.
        unit_tokens: number of tokens of a unit.
        units: as of `raise_keys`.
        ranges: as of `restore_values`.
        first_range: see there.
        first: place of the first slot's token in the first group.
        slots: [n], distinct.
        pool: [slots, G, Dv].
    """
    heads, dim = pool.shape[1:]
    narrow, rows = dim // 8, np.empty(dim * GROUP_TOKENS, np.uint8)
    for number in range(len(units)):
        head, start = units[number, 0], units[number, 1]
        inner, stop = max(0, -start), min(unit_tokens, len(slots) - start)
        while inner < stop:
            group, token = divmod(first + start + inner, GROUP_TOKENS)
            count = min(GROUP_TOKENS - token, stop - inner)
            rows[: count * dim] = 0
            middle = np.float32(0)
            for section in range(1, NUM_SECTIONS):
                plane = units[number, 1 + section]
                if plane >= 0:
                    shift = NUM_SECTIONS - 1 - section
                    middle += np.float32(1 << shift) / np.float32(2)
                    at = plane * plane_bytes + begin + inner * narrow
                    for more in range(count):
                        add_bits(planes, at + more * narrow, narrow, rows, more * dim, shift)
            for more in range(count):
                slot, own = slots[start + inner + more], more * dim
                step = ranges[group, first_range + ((token + more) * heads + head) * 2 + 1]
                for element in range(dim):
                    gained = np.float32(rows[own + element]) - middle
                    better = _get(pool, slot, head, element) + gained * step
                    _set(pool, slot, head, element, better)
            inner += count
