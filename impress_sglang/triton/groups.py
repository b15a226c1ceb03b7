"""Restores keys and values from codes into slots of a pool, as `codes.groups.slots` on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from impress_sglang.triton import power_of_two

# Tokens of one head that one program handles.
TILE_TOKENS = 16
# As in `codes.groups.codec`, which this package may not import.
_GROUP_TOKENS = tl.constexpr(64)


def restore(
    layout: Any, groups: Tensor, start: int, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Fill slots with what codes stand for, in one launch that is not waited for.

    Args:
        layout: of the groups, `codes.groups.codec.GroupLayout`.
        groups: uint8 [groups, group_bytes or more]; the first stride is even, the last is 1.
        start: the first token, counted from the first one of the groups.
        slots: int64 [n], where this token and the next ones go, distinct.
        keys: pool [slots, G, Dk]; the last stride is 1.
        values: pool [slots, G, Dv] of the same dtype.
    """
    count = len(slots)
    assert slots.dtype == torch.int64 and slots.is_contiguous()
    assert groups.dtype == torch.uint8 and groups.stride(1) == 1
    assert not groups.stride(0) % 2 and not groups.data_ptr() % 2
    assert start + count <= len(groups) * _GROUP_TOKENS.value
    assert keys.stride(2) == values.stride(2) == 1 and keys.dtype == values.dtype
    assert keys.shape[:2] == values.shape[:2]
    if not count:
        return
    # Tiles begin where those of groups do, so that each is in one group.
    tiles = -(-(start % TILE_TOKENS + count) // TILE_TOKENS)
    pools = keys, values, *keys.stride()[:2], *values.stride()[:2]
    options = constants(layout, keys.shape[1], keys.shape[2], values.shape[2])
    _restore_kernel[(tiles, keys.shape[1], 2)](
        groups, groups.stride(0), slots, start, count, *pools, **options, num_warps=4
    )


def constants(layout: Any, num_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """What the kernel is compiled for."""
    names = ("NUM_PAIRS", "KEYS", "PAIRS", "VALUES", "MORE")
    return {
        **dict(zip(names, layout.places[2:-1], strict=True)),
        "ALL_PAIRS": layout.num_pairs,
        "MORE_BITS": layout.more_bits,
        "HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_PADDED": power_of_two(key_dim),
        "VALUE_PADDED": power_of_two(value_dim),
        "HEADS_PADDED": power_of_two(num_heads * key_dim),
        "TILE_TOKENS": TILE_TOKENS,
    }


# Numbers of tokens, and where a span's groups and slots begin in memory, differ between launches.
_UNSPECIALISED: dict[str, list[str]] = {
    "do_not_specialize": ["start", "count"],
    "do_not_specialize_on_alignment": ["groups", "slots"],
}


@triton.jit(**_UNSPECIALISED)
def _restore_kernel(
    groups: tl.tensor, group_stride: tl.tensor, slots: tl.tensor, start: tl.tensor,
    count: tl.tensor, keys: tl.tensor, values: tl.tensor, key_stride: tl.tensor,
    key_head_stride: tl.tensor, value_stride: tl.tensor, value_head_stride: tl.tensor,
    NUM_PAIRS: tl.constexpr, KEYS: tl.constexpr, PAIRS: tl.constexpr, VALUES: tl.constexpr,
    MORE: tl.constexpr, ALL_PAIRS: tl.constexpr, MORE_BITS: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr, HEADS_PADDED: tl.constexpr, TILE_TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """One program per tile of tokens and head; for keys where program id 2 is 0, else values."""
    head = tl.program_id(1)
    tile = (start // TILE_TOKENS + tl.program_id(0)) * TILE_TOKENS
    tokens = tile + tl.arange(0, TILE_TOKENS)
    inside = (tokens >= start) & (tokens < start + count)
    slot = tl.load(slots + tokens - start, mask=inside, other=0)
    group = groups + (tile // _GROUP_TOKENS).to(tl.int64) * group_stride
    bounds = group.to(tl.pointer_type(tl.float16))
    within = tokens % _GROUP_TOKENS
    if tl.program_id(2) == 0:
        columns = tl.arange(0, KEY_PADDED)
        there = columns < KEY_DIM
        kept = tl.load(group + NUM_PAIRS + head * KEY_DIM + columns, mask=there, other=0)
        every = tl.arange(0, HEADS_PADDED)
        others = tl.load(group + NUM_PAIRS + every, mask=every < head * KEY_DIM, other=0)
        _restore_keys(
            keys + slot * key_stride + head * key_head_stride,
            group + KEYS + head * (_GROUP_TOKENS // 2) * KEY_DIM,
            group + PAIRS,
            bounds + head * 2 * KEY_DIM,
            kept.to(tl.int32),
            tl.sum(others.to(tl.int32), 0),
            within,
            inside,
            ALL_PAIRS,
            KEY_DIM,
            KEY_PADDED,
        )
    else:
        _restore_values(
            values + slot * value_stride + head * value_head_stride,
            group + VALUES + head * (_GROUP_TOKENS // 2) * VALUE_DIM,
            group + MORE + head * (_GROUP_TOKENS // 8 * MORE_BITS) * VALUE_DIM,
            bounds + HEADS * 2 * KEY_DIM + (within * HEADS + head) * 2,
            within,
            inside,
            MORE_BITS,
            VALUE_DIM,
            VALUE_PADDED,
        )


@triton.jit
def _restore_keys(
    target: tl.tensor, upper: tl.tensor, pairs: tl.tensor, bounds: tl.tensor, kept: tl.tensor,
    before: tl.tensor, tokens: tl.tensor, inside: tl.tensor, ALL_PAIRS: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    """Rows whose channels have `kept` pairs; the head's first is that behind `before`."""
    columns = tl.arange(0, PADDED)
    there = columns < DIM
    mask = inside[:, None] & there[None, :]
    places = before + tl.cumsum(kept, 0) - kept
    code = _parts(upper, tokens, columns, mask, 4, DIM) << 4
    code += _parts(pairs, tokens, places, mask & (kept > 0)[None, :], 2, ALL_PAIRS) << 2
    code += _parts(pairs, tokens, places + 1, mask & (kept > 1)[None, :], 2, ALL_PAIRS)
    # From the lowest value of a cell to its middle.
    half = tl.where(kept == 0, 7.5, tl.where(kept == 1, 1.5, 0.0))
    low = tl.load(bounds + columns, mask=there, other=0.0).to(tl.float32)
    step = tl.load(bounds + DIM + columns, mask=there, other=0.0).to(tl.float32)
    restored = low[None, :] + (code.to(tl.float32) + half[None, :]) * step[None, :]
    tl.store(target[:, None] + columns, restored.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _restore_values(
    target: tl.tensor, upper: tl.tensor, more: tl.tensor, bounds: tl.tensor, tokens: tl.tensor,
    inside: tl.tensor, BITS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, PADDED)
    mask = inside[:, None] & (columns < DIM)[None, :]
    code = _parts(upper, tokens, columns, mask, 4, DIM) << 4
    code += _parts(more, tokens, columns, mask, BITS, DIM) << (4 - BITS)
    low = tl.load(bounds, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(bounds + 1, mask=inside, other=0.0).to(tl.float32)
    middle = code.to(tl.float32) + ((1 << (4 - BITS)) - 1) / 2
    restored = low[:, None] + middle * step[:, None]
    tl.store(target[:, None] + columns, restored.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _parts(
    begin: tl.tensor, tokens: tl.tensor, columns: tl.tensor, mask: tl.tensor, WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Parts of `WIDTH` bits of codes, packed in rows of `STRIDE` bytes; 0 outside of the mask."""
    ROWS: tl.constexpr = _GROUP_TOKENS * WIDTH // 8
    packed = tl.load(begin + (tokens % ROWS)[:, None] * STRIDE + columns[None, :], mask, other=0)
    return (packed.to(tl.int32) >> (tokens // ROWS * WIDTH)[:, None]) & ((1 << WIDTH) - 1)
