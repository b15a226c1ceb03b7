"""Decodes keys and values from codes anywhere in memory into slots of a pool, and adds planes.

Stage: load. Planes are addresses, of memory on the device or of pinned CPU memory; see `gather`.
Within groups and units, bytes are laid out by `codes.planes.layout.CodeLayout`; units may be
anywhere. `codes.planes.slots` does the same on the CPU.
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
# As in `codes.planes.codec`, which this package may not import.
_NUM_PLANES = tl.constexpr(3)


@dataclasses.dataclass(frozen=True, slots=True)
class CodedGroups:
    """The groups of a layer, and the tokens [start, start + len(slots)) of them.

    Attributes:
        groups: uint8 [groups, n] on the device: the ranges of each group with the sections of its
            keys' pairs, and behind them its base if that is restored; the first stride is even, the
            last is 1.
        range_bytes: bytes of the ranges of a group, with sections.
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
        assert not self.group_tokens % TILE_TOKENS
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
    # Tiles begin where those of groups do, so that each is in one group.
    tiles = -(-(groups.start % TILE_TOKENS + count) // TILE_TOKENS)
    _restore_kernel[(tiles, keys.shape[1], 2)](
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
        **_constants(groups, keys, values),
    )


def raise_units(
    groups: CodedGroups, units: Tensor, unit_tokens: int, keys: Tensor, values: Tensor
) -> None:
    """Add planes to what is in slots, in one launch that is not waited for.

    Args:
        groups: the groups of a layer; of their bytes only ranges are read.
        units: int64 [n, 5] on the device, one row for each unit that is raised: its head, its first
            token, counted like `groups.start`, a multiple of `TILE_TOKENS`, and the addresses of
            its planes, 0 for one that is not added. Everything below an added plane must be in the
            slots or be added with it.
        unit_tokens: tokens per unit, a multiple of `TILE_TOKENS`; those without slots are skipped.
        keys: pool [slots, G, Dk]; the last stride is 1.
        values: pool [slots, G, Dv] of the same dtype.
    """
    assert units.dtype == torch.int64 and units.is_contiguous() and units.shape[1] == 5
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
        "RANGE_BYTES": groups.range_bytes,
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
    tile = (start // TILE_TOKENS + tl.program_id(0)) * TILE_TOKENS
    tokens = tile + tl.arange(0, TILE_TOKENS)
    inside = (tokens >= start) & (tokens < start + count)
    slot = tl.load(slots + tokens - start, mask=inside, other=0)
    ranges = groups + (tile // GROUP_TOKENS).to(tl.int64) * group_stride
    codes = ranges + RANGE_BYTES
    bounds = ranges.to(tl.pointer_type(tl.float16))
    row = (tokens % GROUP_TOKENS) * HEADS + head
    if tl.program_id(2) == 0:
        target = keys + slot * key_stride + head * key_head_stride
        upper_bits = codes + row * (KEY_DIM // 2)
        section = codes + GROUP_TOKENS * HEADS * (KEY_DIM // 2) + row * (KEY_DIM // 8)
        own_bounds = bounds + head * 2 * KEY_DIM
        sections = ranges + (RANGE_BYTES - HEADS * KEY_DIM) + head * KEY_DIM
        _restore_keys(
            target, upper_bits, section, own_bounds, sections, inside, KEY_DIM, KEY_PADDED
        )
    else:
        target = values + slot * value_stride + head * value_head_stride
        begin = codes + GROUP_TOKENS * HEADS * (KEY_DIM // 2 + KEY_DIM // 8)
        upper_bits = begin + row * (VALUE_DIM // 2)
        section = begin + GROUP_TOKENS * HEADS * (VALUE_DIM // 2) + row * (VALUE_DIM // 8)
        bounds_of_rows = bounds + HEADS * 2 * KEY_DIM + row * 2
        _restore_values(
            target, upper_bits, section, bounds_of_rows, inside, VALUE_DIM, VALUE_PADDED
        )


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
    RANGE_BYTES: tl.constexpr,
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
    unit = units + tl.program_id(0) * 5
    head, first_token = tl.load(unit), tl.load(unit + 1)
    inner = tl.program_id(1) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    tile = first_token + tl.program_id(1) * TILE_TOKENS
    tokens = first_token + inner
    inside = (tokens >= start) & (tokens < start + count)
    slot = tl.load(slots + tokens - start, mask=inside, other=0)
    # Tiles without slots may be beyond all groups.
    present = (tile + TILE_TOKENS > start) & (tile < start + count)
    group = tl.where(present, tile // GROUP_TOKENS, 0)
    ranges = groups + group.to(tl.int64) * group_stride
    bounds = ranges.to(tl.pointer_type(tl.float16))
    if tl.program_id(2) == 0:
        target = keys + slot * key_stride + head * key_head_stride
        steps = bounds + head * 2 * KEY_DIM + KEY_DIM
        sections = ranges + (RANGE_BYTES - HEADS * KEY_DIM) + head * KEY_DIM
        own = inner * (KEY_DIM // 8)
        _raise_keys(target, unit + 2, own, steps, sections, inside, KEY_DIM, KEY_PADDED)
    else:
        target = values + slot * value_stride + head * value_head_stride
        row = (tokens % GROUP_TOKENS) * HEADS + head
        steps_of_rows = bounds + HEADS * 2 * KEY_DIM + row * 2 + 1
        own = UNIT_TOKENS * (KEY_DIM // 8) + inner * (VALUE_DIM // 8)
        _raise_values(target, unit + 2, own, steps_of_rows, inside, VALUE_DIM, VALUE_PADDED)


@triton.jit
def _restore_keys(
    target: tl.tensor,
    upper_bits: tl.tensor,
    section: tl.tensor,
    bounds: tl.tensor,
    sections: tl.tensor,
    inside: tl.tensor,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Restore rows from their upper bits and the pairs of the first section."""
    columns = tl.arange(0, PADDED)
    mask = inside[:, None] & (columns < DIM)[None, :]
    upper, lower = _sections(sections, columns, DIM)
    above, below = _places(upper, lower, 0)
    code = _upper_bits(upper_bits, columns, mask, DIM) * 16
    code += _pairs(section, above, mask & (upper == 0)[None, :], DIM) * 4
    code += _pairs(section, below, mask & (lower == 0)[None, :], DIM)
    # The middle of the values that share the bits that are known: 4, 6 or 8 of them.
    half = tl.where(upper == 0, tl.where(lower == 0, 0.0, 1.5), 7.5)
    low, step = _channels(bounds, columns, DIM), _channels(bounds + DIM, columns, DIM)
    restored = low[None, :] + (code.to(tl.float32) + half[None, :]) * step[None, :]
    tl.store(target[:, None] + columns, restored.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _restore_values(
    target: tl.tensor,
    upper_bits: tl.tensor,
    section: tl.tensor,
    bounds: tl.tensor,
    inside: tl.tensor,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Restore rows from their upper bits and the next one of each element."""
    columns = tl.arange(0, PADDED)
    mask = inside[:, None] & (columns < DIM)[None, :]
    code = _upper_bits(upper_bits, columns, mask, DIM) * 16
    code += _bits(section, columns, mask, DIM) * 8
    low = tl.load(bounds, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(bounds + 1, mask=inside, other=0.0).to(tl.float32)
    restored = low[:, None] + (code.to(tl.float32) + 3.5) * step[:, None]
    tl.store(target[:, None] + columns, restored.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _raise_keys(
    target: tl.tensor,
    addresses: tl.tensor,
    first: tl.tensor,
    steps: tl.tensor,
    sections: tl.tensor,
    inside: tl.tensor,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Raise rows by the pairs of their planes, which begin `first` bytes behind the addresses."""
    columns = tl.arange(0, PADDED)
    mask = inside[:, None] & (columns < DIM)[None, :]
    upper, lower = _sections(sections, columns, DIM)
    gained = tl.zeros([first.shape[0], PADDED], tl.float32)
    for plane in tl.static_range(_NUM_PLANES):
        address = tl.load(addresses + plane)
        rows = address.to(tl.pointer_type(tl.uint8)) + first
        above, below = _places(upper, lower, plane + 1)
        own = mask & (address != 0) & (upper == plane + 1)[None, :]
        gained += tl.where(own, (_pairs(rows, above, own, DIM).to(tl.float32) - 1.5) * 4, 0.0)
        own = mask & (address != 0) & (lower == plane + 1)[None, :]
        gained += tl.where(own, _pairs(rows, below, own, DIM).to(tl.float32) - 1.5, 0.0)
    step = _channels(steps, columns, DIM)
    _add(target[:, None] + columns, gained * step[None, :], mask)


@triton.jit
def _raise_values(
    target: tl.tensor,
    addresses: tl.tensor,
    first: tl.tensor,
    steps: tl.tensor,
    inside: tl.tensor,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Raise rows by the bits of their planes, which begin `first` bytes behind the addresses."""
    columns = tl.arange(0, PADDED)
    mask = inside[:, None] & (columns < DIM)[None, :]
    gained = tl.zeros([first.shape[0], PADDED], tl.float32)
    for plane in tl.static_range(_NUM_PLANES):
        address = tl.load(addresses + plane)
        rows = address.to(tl.pointer_type(tl.uint8)) + first
        own = mask & (address != 0)
        bits = _bits(rows, columns, own, DIM).to(tl.float32)
        gained += tl.where(own, (bits - 0.5) * (4 >> plane), 0.0)
    step = tl.load(steps, mask=inside, other=0.0).to(tl.float32)
    _add(target[:, None] + columns, gained * step[:, None], mask)


@triton.jit
def _sections(
    sections: tl.tensor, columns: tl.tensor, DIM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The section of the upper and of the lower pair of each channel; 15 behind the last one."""
    both = tl.load(sections + columns, mask=columns < DIM, other=255)
    return (both & 15).to(tl.int32), (both >> 4).to(tl.int32)


@triton.jit
def _places(
    upper: tl.tensor, lower: tl.tensor, SECTION: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Which pair of a section the upper and the lower pair of each channel is, if it is in it."""
    above, below = (upper == SECTION).to(tl.int32), (lower == SECTION).to(tl.int32)
    return tl.cumsum(above, 0) - above, tl.sum(above, 0) + tl.cumsum(below, 0) - below


@triton.jit
def _pairs(rows: tl.tensor, places: tl.tensor, mask: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """The pairs of bits at these places of the rows of a section, 0 outside of the mask."""
    packed = tl.load(rows[:, None] + (places % (DIM // 8))[None, :], mask=mask, other=0)
    return (packed.to(tl.int32) >> ((places // (DIM // 8)) * 2)[None, :]) & 3


@triton.jit
def _bits(rows: tl.tensor, columns: tl.tensor, mask: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """The bits of elements, eight in a byte."""
    packed = tl.load(rows[:, None] + (columns % (DIM // 8))[None, :], mask=mask, other=0)
    return (packed.to(tl.int32) >> (columns // (DIM // 8))[None, :]) & 1


@triton.jit
def _upper_bits(
    rows: tl.tensor, columns: tl.tensor, mask: tl.tensor, DIM: tl.constexpr
) -> tl.tensor:
    """The upper 4 bits of codes, two elements in a byte."""
    packed = tl.load(rows[:, None] + (columns % (DIM // 2))[None, :], mask=mask, other=0)
    return (packed.to(tl.int32) >> ((columns // (DIM // 2)) * 4)[None, :]) & 15


@triton.jit
def _channels(bounds: tl.tensor, columns: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """A bound of each channel, float32."""
    return tl.load(bounds + columns, mask=columns < DIM, other=0.0).to(tl.float32)


@triton.jit
def _add(target: tl.tensor, gained: tl.tensor, mask: tl.tensor) -> None:
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (before + gained).to(target.dtype.element_ty), mask=mask)
