"""Loops over coded keys and values, compiled; `precision.codec` is their reference.

Bytes are laid out as in `precision.layout.CodeLayout`: 4 bits of each element in the base and 2 in
each plane. An element is restored as the middle of the values that share its known bits. Pools are
float32, or bfloat16 as the bits of its numbers in uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, overload

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Float32s, Indices, Uint8s

_POOLS = ("float32[:, :, ::1]", "uint16[:, :, ::1]")
# As in `precision.codec`, which this package may not import.
GROUP_TOKENS = 64


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


def _get(row: Any, element: int) -> Any:
    """A number of a pool's row, float32."""
    raise NotImplementedError


def _set(row: Any, element: int, number: Any) -> None:
    """Put a float32 number into a pool's row, rounded to nearest even."""
    raise NotImplementedError


@overload(_get, inline="always")
def _get_compiled(row: Any, element: Any) -> Any:
    def same(row: Any, element: Any) -> Any:
        return row[element]

    def widened(row: Any, element: Any) -> Any:
        return _number_of(np.uint32(np.uint32(row[element]) << np.uint32(16)))

    return same if row.dtype == types.float32 else widened


@overload(_set, inline="always")
def _set_compiled(row: Any, element: Any, number: Any) -> Any:
    def same(row: Any, element: Any, number: Any) -> None:
        row[element] = number

    def rounded(row: Any, element: Any, number: Any) -> None:
        bits = _bits_of(np.float32(number))
        odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        row[element] = np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return same if row.dtype == types.float32 else rounded


@compiled(
    *(f"(uint8[:, ::1], int64, float32[:, :, :, ::1], int64, int64[::1], {p})" for p in _POOLS)
)
def restore_keys(
    groups: Uint8s, begin: int, ranges: Float32s, first: int, slots: Indices, pool: Any
) -> None:
    """Fill slots with the keys of the tokens from `first` on.

    Args:
        groups: [groups, bytes of a group]; from `begin` on codes [tokens of a group, G, Dk / 2].
        begin: see there.
        ranges: [groups, G, 2, Dk], low and step of each channel.
        first: counted from the first token of the groups.
        slots: [n], distinct.
        pool: [slots, G, Dk].
    """
    heads, dim = pool.shape[1:]
    width, codes = dim // 2, np.empty(dim, np.float32)
    for place in range(len(slots)):
        group, token = divmod(first + place, GROUP_TOKENS)
        for head in range(heads):
            at = begin + (token * heads + head) * width
            both = groups[group, at : at + width]
            for byte in range(width):
                codes[byte] = np.float32(both[byte] & 15)
                codes[width + byte] = np.float32(both[byte] >> 4)
            row = pool[slots[place], head]
            low, step = ranges[group, head, 0], ranges[group, head, 1]
            for element in range(dim):
                middle = codes[element] * np.float32(16) + np.float32(7.5)
                _set(row, element, low[element] + middle * step[element])


@compiled(
    *(f"(uint8[:, ::1], int64, float32[:, :, :, ::1], int64, int64[::1], {p})" for p in _POOLS)
)
def restore_values(
    groups: Uint8s, begin: int, ranges: Float32s, first: int, slots: Indices, pool: Any
) -> None:
    """Fill slots with the values of the tokens from `first` on.

    Args:
        groups: [groups, bytes of a group]; from `begin` on codes [tokens of a group, G, Dv / 2].
        begin: see there.
        ranges: [groups, tokens of a group, G, 2], low and step of each vector.
        first: counted from the first token of the groups.
        slots: [n], distinct.
        pool: [slots, G, Dv].
    """
    heads, dim = pool.shape[1:]
    width, codes = dim // 2, np.empty(dim, np.float32)
    for place in range(len(slots)):
        group, token = divmod(first + place, GROUP_TOKENS)
        for head in range(heads):
            at = begin + (token * heads + head) * width
            both = groups[group, at : at + width]
            for byte in range(width):
                codes[byte] = np.float32(both[byte] & 15)
                codes[width + byte] = np.float32(both[byte] >> 4)
            row = pool[slots[place], head]
            low, step = ranges[group, token, head, 0], ranges[group, token, head, 1]
            for element in range(dim):
                middle = codes[element] * np.float32(16) + np.float32(7.5)
                _set(row, element, low + middle * step)


@compiled(
    *(
        "(uint8[:, ::1], int64, int64, int64[:, ::1], float32[:, :, :, ::1], int64, int64[::1], "
        f"{pool})"
        for pool in _POOLS
    )
)
def raise_units(
    planes: Uint8s,
    begin: int,
    unit_tokens: int,
    units: Indices,
    steps: Float32s,
    first: int,
    slots: Indices,
    pool: Any,
) -> None:
    """Add planes to what slots hold.

    Args:
        planes: [n, bytes], each a plane of a unit; from `begin` on two bits for each element.
        begin: see there.
        unit_tokens: number of tokens of a unit.
        units: [k, 4]: head, first token (counted from that of the first slot, may be below 0), and
            which of `planes` are its first and its second plane, -1 for one that is not added.
        steps: of the ranges, [groups, 1 or tokens of a group, G, D or 1].
        first: place of the first slot's token in the first group.
        slots: [n], distinct.
        pool: [slots, G, D].
    """
    dim, each_token, each_channel = pool.shape[2], steps.shape[1] > 1, steps.shape[3] > 1
    # What the codes of a token add: a separate row, which is filled with vector instructions.
    width, gained = dim // 4, np.empty(dim, np.float32)
    half, middle = np.float32(1.5), np.float32(7.5)
    for number in range(len(units)):
        head, start, upper, lower = units[number]
        for inner in range(max(0, -start), min(unit_tokens, len(slots) - start)):
            group, token = divmod(first + start + inner, GROUP_TOKENS)
            at = begin + inner * width
            if upper >= 0 and lower >= 0:
                first_codes = planes[upper, at : at + width]
                second_codes = planes[lower, at : at + width]
                for byte in range(width):
                    one, two = first_codes[byte], second_codes[byte]
                    gained[byte] = np.float32((one & 3) << 2 | two & 3) - middle
                    gained[width + byte] = np.float32(one & 12 | two >> 2 & 3) - middle
                    gained[2 * width + byte] = np.float32(one >> 2 & 12 | two >> 4 & 3) - middle
                    gained[3 * width + byte] = np.float32(one >> 4 & 12 | two >> 6) - middle
            else:
                codes = planes[upper if upper >= 0 else lower, at : at + width]
                factor = np.float32(4 if upper >= 0 else 1)
                for byte in range(width):
                    four = codes[byte]
                    gained[byte] = factor * (np.float32(four & 3) - half)
                    gained[width + byte] = factor * (np.float32(four >> 2 & 3) - half)
                    gained[2 * width + byte] = factor * (np.float32(four >> 4 & 3) - half)
                    gained[3 * width + byte] = factor * (np.float32(four >> 6) - half)
            row = pool[slots[start + inner], head]
            step = steps[group, token if each_token else 0, head]
            if each_channel:
                for element in range(dim):
                    _set(row, element, _get(row, element) + gained[element] * step[element])
            else:
                alike = step[0]
                for element in range(dim):
                    _set(row, element, _get(row, element) + gained[element] * alike)
