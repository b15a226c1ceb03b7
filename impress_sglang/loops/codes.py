"""Loops over coded keys and values, compiled; `precision.codec` is their reference.

Bytes stand as `precision.layout.CodeLayout` says: 4 bits of each element in the base and 2 in each
plane. What is restored is the middle of the values that the known bits share. Pools are float32, or
bfloat16 as the bits of its numbers in uint16.
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
# Of `precision.codec`, which knows these loops.
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


@compiled(*(f"(uint8[:, :, :, :], float32[:, :, :, ::1], int64, int64[::1], {p})" for p in _POOLS))
def restore_keys(base: Uint8s, ranges: Float32s, first: int, slots: Indices, pool: Any) -> None:
    """Fill slots with the keys of the tokens from `first` on.

    Args:
        base: [groups, tokens of a group, G, Dk / 2].
        ranges: [groups, G, 2, Dk], low and step of each channel.
        first: counted from the first token of the base.
        slots: [n], distinct.
        pool: [slots, G, Dk].
    """
    group_tokens = base.shape[1]
    for place in range(len(slots)):
        group, token = divmod(first + place, group_tokens)
        for head in range(pool.shape[1]):
            codes, row = base[group, token, head], pool[slots[place], head]
            low, step = ranges[group, head, 0], ranges[group, head, 1]
            width = len(codes)
            for byte in range(width):
                middle = np.float32(codes[byte] & 15) * np.float32(16) + np.float32(7.5)
                _set(row, byte, low[byte] + middle * step[byte])
            for byte in range(width):
                middle = np.float32(codes[byte] >> 4) * np.float32(16) + np.float32(7.5)
                other = width + byte
                _set(row, other, low[other] + middle * step[other])


@compiled(*(f"(uint8[:, :, :, :], float32[:, :, :, ::1], int64, int64[::1], {p})" for p in _POOLS))
def restore_values(base: Uint8s, ranges: Float32s, first: int, slots: Indices, pool: Any) -> None:
    """Fill slots with the values of the tokens from `first` on.

    Args:
        base: [groups, tokens of a group, G, Dv / 2].
        ranges: [groups, tokens of a group, G, 2], low and step of each vector.
        first: counted from the first token of the base.
        slots: [n], distinct.
        pool: [slots, G, Dv].
    """
    group_tokens = base.shape[1]
    for place in range(len(slots)):
        group, token = divmod(first + place, group_tokens)
        for head in range(pool.shape[1]):
            codes, row = base[group, token, head], pool[slots[place], head]
            low, step = ranges[group, token, head, 0], ranges[group, token, head, 1]
            width = len(codes)
            for byte in range(width):
                middle = np.float32(codes[byte] & 15) * np.float32(16) + np.float32(7.5)
                _set(row, byte, low + middle * step)
            for byte in range(width):
                middle = np.float32(codes[byte] >> 4) * np.float32(16) + np.float32(7.5)
                _set(row, width + byte, low + middle * step)


@compiled(
    *(
        f"(uint8[:, :], int64, int64, int64[:, ::1], float32[:, :, :, ::1], int64, int64[::1], {p})"
        for p in _POOLS
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
        unit_tokens: of a unit.
        units: [k, 4]: head, first token (counted from that of the first slot, may be below 0), and
            which of `planes` are its first and its second plane, -1 for one that is not added.
        steps: of the ranges, [groups, 1 or tokens of a group, G, D or 1].
        first: place of the first slot's token in the first group.
        slots: [n], distinct.
        pool: [slots, G, D].
    """
    width, group_tokens = pool.shape[2] // 4, GROUP_TOKENS
    each_token, each_channel = steps.shape[1] > 1, steps.shape[3] > 1
    for number in range(len(units)):
        head, start, upper, lower = units[number]
        # A plane that is not there counts nothing, whatever stands for it.
        high = np.float32(4.0 if upper >= 0 else 0.0)
        low = np.float32(1.0 if lower >= 0 else 0.0)
        middle = np.float32(1.5) * (high + low)
        for inner in range(max(0, -start), min(unit_tokens, len(slots) - start)):
            group, token = divmod(first + start + inner, group_tokens)
            step = steps[group, token if each_token else 0, head]
            row, at = pool[slots[start + inner], head], begin + inner * width
            first_codes = planes[max(upper, 0), at : at + width]
            second_codes = planes[max(lower, 0), at : at + width]
            for part in range(4):
                shift, place = np.uint8(2 * part), part * width
                own, own_step = row[place : place + width], step[0]
                for byte in range(width):
                    one = np.float32((first_codes[byte] >> shift) & np.uint8(3))
                    two = np.float32((second_codes[byte] >> shift) & np.uint8(3))
                    gained = one * high + two * low - middle
                    if each_channel:
                        own_step = step[place + byte]
                    _set(own, byte, _get(own, byte) + gained * own_step)
