"""Coded layers in slots of a pool on the CPU; `triton.codes` does the same on a device.

Stage: load. `restore_base` fills slots from the base, `raise_units` adds planes to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops import codes as loops
from impress_sglang.precision.codec import PLANE_BITS
from impress_sglang.precision.layer import range_views, section_view
from impress_sglang.precision.tokens import CodedTokens, planes_by_unit


def restore_base(tokens: CodedTokens, keys: Tensor, values: Tensor) -> None:
    """Fill slots with the values that the base stands for.

    Args:
        tokens: tokens of a layer.
        keys: pool [slots, G, Dk].
        values: pool [slots, G, Dv].
    """
    layout = tokens.layout
    place = tokens.start - tokens.first_token
    key_ranges, value_ranges = (
        own.float().contiguous().numpy() for own in range_views(layout, tokens.groups)
    )
    sections = section_view(layout, tokens.groups).contiguous().view(-1).numpy()
    groups = tokens.groups.contiguous().view(-1).numpy()
    begins = np.array(layout.base_places).reshape(2, 2)
    size = layout.group_bytes
    with _numbers_of(keys, tokens.slots) as (numbers, slots):
        loops.restore_keys(groups, size, begins[0], sections, key_ranges, place, slots, numbers)
    with _numbers_of(values, tokens.slots) as (numbers, slots):
        loops.restore_values(groups, size, begins[1], value_ranges, place, slots, numbers)


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
    layout = tokens.layout
    place = tokens.start - tokens.first_token
    units = planes_by_unit(raised, layout, tokens.start)
    key_ranges, value_ranges = range_views(layout, tokens.groups)
    key_steps = key_ranges[:, None, :, 1].float().contiguous().numpy()
    value_steps = value_ranges[..., 1:].float().contiguous().numpy()
    sections = section_view(layout, tokens.groups).contiguous().view(-1).numpy()
    size, unit_tokens = planes.shape[1], layout.unit_tokens
    split = unit_tokens * layout.key_dim * PLANE_BITS // 8
    flat = planes.contiguous().view(-1).numpy()
    with _numbers_of(keys, tokens.slots) as (numbers, slots):
        loops.raise_keys(flat, size, unit_tokens, units, sections, key_steps, place, slots, numbers)
    with _numbers_of(values, tokens.slots) as (numbers, slots):
        loops.raise_values(
            flat, size, split, unit_tokens, units, value_steps, place, slots, numbers
        )


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
