"""Coded layers in slots of a pool on the CPU; `triton.codes` does the same on a device.

Stage: load. `restore_base` fills slots from the base, `raise_units` adds planes to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from impress_sglang.codes.planes.codec import PLANE_BITS
from impress_sglang.codes.planes.layout import CodeLayout
from impress_sglang.codes.planes.tokens import CodedTokens, planes_by_unit
from impress_sglang.loops import codes as loops
from impress_sglang.loops.types import Float32s


def restore_base(tokens: CodedTokens, keys: Tensor, values: Tensor) -> None:
    """Fill slots with the values that the base stands for.

    Args:
        tokens: tokens of a layer.
        keys: pool [slots, G, Dk].
        values: pool [slots, G, Dv].
    """
    layout, ranges = tokens.layout, _ranges_of(tokens)
    place = tokens.start - tokens.first_token
    groups, size = tokens.groups.contiguous().view(-1).numpy(), layout.group_bytes
    upper_keys, pairs, upper_values, bits = layout.base_places
    sections = layout.group_bounds_bytes
    with _numbers_of(keys, tokens.slots) as (numbers, slots):
        loops.restore_keys(groups, size, sections, upper_keys, pairs, ranges, place, slots, numbers)
    first = _first_of_values(layout)
    with _numbers_of(values, tokens.slots) as (numbers, slots):
        loops.restore_values(groups, size, upper_values, bits, ranges, first, place, slots, numbers)


def raise_units(
    tokens: CodedTokens, raised: Tensor, planes: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Add planes to the values of a layer in slots of pools.

    Args:
        tokens: of the layer; of their bytes only ranges are read. Others of a unit are skipped.
        raised: int64 [n, 3] on the CPU, distinct: plane, head and unit. The planes below each must
            be in the slots or among these.
        planes: uint8 [n, unit_bytes or more], the bytes of `raised`.
        keys: pool [slots, G, Dk].
        values: pool [slots, G, Dv].
    """
    layout, ranges = tokens.layout, _ranges_of(tokens)
    place = tokens.start - tokens.first_token
    units = planes_by_unit(raised, layout, tokens.start)
    groups, size = tokens.groups.contiguous().view(-1).numpy(), tokens.groups.shape[1]
    sections = layout.group_bounds_bytes
    flat, stride = planes.contiguous().view(-1).numpy(), planes.shape[1]
    count = layout.unit_tokens
    with _numbers_of(keys, tokens.slots) as (numbers, slots):
        loops.raise_keys(
            flat, stride, count, units, groups, size, sections, ranges, place, slots, numbers
        )
    split, first = count * layout.key_dim * PLANE_BITS // 8, _first_of_values(layout)
    with _numbers_of(values, tokens.slots) as (numbers, slots):
        loops.raise_values(flat, stride, split, count, units, ranges, first, place, slots, numbers)


def _ranges_of(tokens: CodedTokens) -> Float32s:
    """All ranges of the groups, those of keys first: [groups, n]."""
    bounds = tokens.groups[:, : tokens.layout.group_bounds_bytes]
    ranges: Float32s = bounds.view(torch.float16).float().contiguous().numpy()
    return ranges


def _first_of_values(layout: CodeLayout) -> int:
    """Which number of the ranges of a group is the first of values."""
    return 2 * layout.num_heads * layout.key_dim


@contextlib.contextmanager
def _numbers_of(pool: Tensor, slots: Tensor) -> Iterator[tuple[Any, Any]]:
    """A pool as the loops need it, and the slots in it; what loops write ends up in the pool."""
    if pool.is_contiguous() and pool.dtype in (torch.float32, torch.bfloat16):
        words = pool if pool.dtype == torch.float32 else pool.view(torch.uint16)
        yield words.numpy(), slots.numpy()
        return
    rows = pool[slots].float()
    yield rows.numpy(), torch.arange(len(slots)).numpy()
    pool[slots] = rows.to(pool.dtype)
