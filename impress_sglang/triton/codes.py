"""Decodes keys and values from codes anywhere in memory into slots of a pool, and adds planes.

Stage: load. Planes are addresses, of memory on the device or of pinned CPU memory; see `gather`.
Within groups and units, bytes are laid out by `impress_sglang.precision.layout.CodeLayout`; units
may be anywhere. `impress_sglang.precision.slots` does the same on the CPU.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from impress_sglang.triton.sizes import power_of_two

# Tokens of one head that one program handles.
TILE_TOKENS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class CodedGroups:
    """The groups of a layer, and the tokens [start, start + len(slots)) of them.

    Attributes:
        groups: uint8 [groups, n] on the device: the ranges of each group, and behind them its base
            if that is restored; the first stride is even, the last is 1.
        range_bytes: bytes of the ranges of a group.
        slots: int64 [n] on the device, where each token goes.
        start: the first token, counted from the first token of the first group.
        group_tokens: tokens per group.
    """

    groups: Tensor
    range_bytes: int
    slots: Tensor
    start: int
    group_tokens: int

    def __post_init__(self) -> None:
        assert self.slots.dtype == torch.int64 and self.slots.is_contiguous()
        assert self.groups.dtype == torch.uint8 and self.groups.stride(1) == 1
        assert not self.groups.stride(0) % 2 and not self.groups.data_ptr() % 2
        assert self.start + len(self.slots) <= len(self.groups) * self.group_tokens


def restore_base(groups: CodedGroups, keys: Tensor, values: Tensor) -> None:
    """Fill slots with what the base says, in one launch that is not waited for.

    The memory at the addresses must not change until the device is done.

    Args:
        groups: the groups of a layer.
        keys: pool [slots, G, Dk]; the last stride is 1.
        values: pool [slots, G, Dv] of the same dtype.
    """
    count = len(groups.slots)
    if not count:
        return
    _check_pools(keys, values)
    _restore_kernel[(-(-count // TILE_TOKENS), keys.shape[1], 2)](
        groups.groups,
        groups.groups.stride(0),
        groups.slots,
        groups.start,
        count,
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        RANGE_BYTES=groups.range_bytes,
        **_constants(groups, keys, values),
    )


def raise_units(
    groups: CodedGroups, units: Tensor, unit_tokens: int, keys: Tensor, values: Tensor
) -> None:
    """Add planes to what is in slots, in one launch that is not waited for.

    Args:
        groups: the groups of a layer; of their bytes only ranges are read.
        units: int64 [n, 4] on the device, one row for each unit that is raised: its head, its first
            token, counted like `groups.start`, and the addresses of its first and of its second
            plane, 0 for one that is not added. Everything below an added plane must be in the slots
            or be added with it.
        unit_tokens: tokens per unit, a multiple of `TILE_TOKENS`; those without slots are skipped.
        keys: pool [slots, G, Dk]; the last stride is 1.
        values: pool [slots, G, Dv] of the same dtype.
    """
    assert units.dtype == torch.int64 and units.is_contiguous() and units.shape[1] == 4
    assert not unit_tokens % TILE_TOKENS
    if not len(units):
        return
    _check_pools(keys, values)
    _raise_kernel[(len(units), unit_tokens // TILE_TOKENS, 2)](
        groups.groups,
        groups.groups.stride(0),
        groups.slots,
        groups.start,
        len(groups.slots),
        units,
        keys,
        values,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        UNIT_TOKENS=unit_tokens,
        **_constants(groups, keys, values),
    )


def _check_pools(keys: Tensor, values: Tensor) -> None:
    assert keys.stride(2) == values.stride(2) == 1 and keys.dtype == values.dtype
    assert keys.shape[:2] == values.shape[:2]


def _constants(groups: CodedGroups, keys: Tensor, values: Tensor) -> dict[str, int]:
    key_dim, value_dim = keys.shape[2], values.shape[2]
    return {
        "GROUP_TOKENS": groups.group_tokens,
        "HEADS": keys.shape[1],
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_PADDED": power_of_two(key_dim),
        "VALUE_PADDED": power_of_two(value_dim),
        "TILE_TOKENS": TILE_TOKENS,
        "num_warps": 4,
    }


# Numbers of tokens, and where a span's groups and slots begin in memory, differ between launches.
_UNSPECIALISED: dict[str, list[str]] = {
    "do_not_specialize": ["start", "count"],
    "do_not_specialize_on_alignment": ["groups", "slots"],
}


@triton.jit(**_UNSPECIALISED)
def _restore_kernel(
    groups: tl.tensor,
    group_stride: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    RANGE_BYTES: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
) -> None:
    """One program per tile of tokens and head; for keys where program id 2 is 0, else values."""
    head = tl.program_id(1)
    places = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    inside = places < count
    slot = tl.load(slots + places, mask=inside, other=0)
    group, token = (start + places) // GROUP_TOKENS, (start + places) % GROUP_TOKENS
    ranges = groups + group.to(tl.int64) * group_stride
    codes = ranges + RANGE_BYTES
    bounds = ranges.to(tl.pointer_type(tl.float16))
    row = token * HEADS + head
    if tl.program_id(2) == 0:
        target = keys + slot * key_stride + head * key_head_stride
        own = codes + row * (KEY_DIM // 2)
        own_bounds = bounds + head * 2 * KEY_DIM
        _restore(target, own, own_bounds, inside, True, KEY_DIM, KEY_PADDED)
    else:
        target = values + slot * value_stride + head * value_head_stride
        own = codes + GROUP_TOKENS * HEADS * (KEY_DIM // 2) + row * (VALUE_DIM // 2)
        own_bounds = bounds + HEADS * 2 * KEY_DIM + row * 2
        _restore(target, own, own_bounds, inside, False, VALUE_DIM, VALUE_PADDED)


@triton.jit(**_UNSPECIALISED)
def _raise_kernel(
    groups: tl.tensor,
    group_stride: tl.tensor,
    slots: tl.tensor,
    start: tl.tensor,
    count: tl.tensor,
    units: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    UNIT_TOKENS: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
) -> None:
    """One program per unit and tile of its tokens; for keys if program id 2 is 0, else values."""
    unit = units + tl.program_id(0) * 4
    head, first_token = tl.load(unit), tl.load(unit + 1)
    upper = tl.load(unit + 2).to(tl.pointer_type(tl.uint8))
    lower = tl.load(unit + 3).to(tl.pointer_type(tl.uint8))
    has_upper, has_lower = tl.load(unit + 2) != 0, tl.load(unit + 3) != 0
    inner = tl.program_id(1) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    tokens = first_token + inner
    inside = (tokens >= start) & (tokens < start + count)
    slot = tl.load(slots + tokens - start, mask=inside, other=0)
    group, row = tokens // GROUP_TOKENS, (tokens % GROUP_TOKENS) * HEADS + head
    bounds = (groups + group.to(tl.int64) * group_stride).to(tl.pointer_type(tl.float16))
    if tl.program_id(2) == 0:
        target = keys + slot * key_stride + head * key_head_stride
        first = inner * (KEY_DIM // 4)
        own_bounds = bounds + head * 2 * KEY_DIM
        _raise(
            target,
            upper + first,
            has_upper,
            lower + first,
            has_lower,
            own_bounds,
            inside,
            True,
            KEY_DIM,
            KEY_PADDED,
        )
    else:
        target = values + slot * value_stride + head * value_head_stride
        first = UNIT_TOKENS * (KEY_DIM // 4) + inner * (VALUE_DIM // 4)
        own_bounds = bounds + HEADS * 2 * KEY_DIM + row * 2
        _raise(
            target,
            upper + first,
            has_upper,
            lower + first,
            has_lower,
            own_bounds,
            inside,
            False,
            VALUE_DIM,
            VALUE_PADDED,
        )


@triton.jit
def _restore(
    target: tl.tensor,
    codes: tl.tensor,
    bounds: tl.tensor,
    inside: tl.tensor,
    PER_CHANNEL: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Restore rows from codes, by the ranges of channels (keys) or each row's range (values)."""
    columns = tl.arange(0, PADDED)
    mask = inside[:, None] & (columns < DIM)[None, :]
    low = _bound(bounds, 0, columns, inside, PER_CHANNEL, DIM)
    step = _bound(bounds, 1, columns, inside, PER_CHANNEL, DIM)
    restored = low + _middles(codes, columns, mask, DIM) * step
    tl.store(target[:, None] + columns, restored.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _raise(
    target: tl.tensor,
    upper: tl.tensor,
    has_upper: tl.tensor,
    lower: tl.tensor,
    has_lower: tl.tensor,
    bounds: tl.tensor,
    inside: tl.tensor,
    PER_CHANNEL: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Raise rows by their planes, by the steps of channels (keys) or each row's step (values)."""
    columns = tl.arange(0, PADDED)
    mask = inside[:, None] & (columns < DIM)[None, :]
    step = _bound(bounds, 1, columns, inside, PER_CHANNEL, DIM)
    gained = _gained(upper, has_upper, lower, has_lower, columns, mask, DIM)
    _add(target[:, None] + columns, gained * step, mask)


@triton.jit
def _bound(
    bounds: tl.tensor,
    NUMBER: tl.constexpr,
    columns: tl.tensor,
    inside: tl.tensor,
    PER_CHANNEL: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """The low end (NUMBER 0) or the step (1) of ranges: one per channel, or one per row."""
    if PER_CHANNEL:
        mask = inside[:, None] & (columns < DIM)[None, :]
        found = tl.load(bounds[:, None] + NUMBER * DIM + columns, mask=mask, other=0.0)
    else:
        found = tl.load(bounds + NUMBER, mask=inside, other=0.0)[:, None]
    return found.to(tl.float32)


@triton.jit
def _middles(rows: tl.tensor, columns: tl.tensor, mask: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """The values that the 4 high bits of 8-bit codes stand for, two elements in a byte."""
    packed = tl.load(rows[:, None] + (columns % (DIM // 2))[None, :], mask=mask, other=0)
    code = (packed >> ((columns // (DIM // 2)) * 4).to(tl.uint8)[None, :]) & 15
    return code.to(tl.float32) * 16 + 7.5


@triton.jit
def _gained(
    upper: tl.tensor,
    has_upper: tl.tensor,
    lower: tl.tensor,
    has_lower: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    """What planes add, in steps: each is 2 bits of an 8-bit code, below 4 or 6 known bits."""
    shift = ((columns // (DIM // 4)) * 2).to(tl.uint8)[None, :]
    byte = (columns % (DIM // 4))[None, :]
    first = tl.load(upper[:, None] + byte, mask=mask & has_upper, other=0)
    second = tl.load(lower[:, None] + byte, mask=mask & has_lower, other=0)
    high = (((first >> shift) & 3).to(tl.float32) - 1.5) * 4
    low = ((second >> shift) & 3).to(tl.float32) - 1.5
    return tl.where(has_upper, high, 0.0) + tl.where(has_lower, low, 0.0)


@triton.jit
def _add(target: tl.tensor, gained: tl.tensor, mask: tl.tensor) -> None:
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (before + gained).to(target.dtype.element_ty), mask=mask)
