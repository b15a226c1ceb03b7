"""Coded layers in slots of a pool on the CPU; `triton.codes` does the same on a device.

Stage: load. `restore_base` fills slots from the base, `raise_units` adds planes to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from impress_sglang.loops import codes as loops
from impress_sglang.precision.codec import BASE_BITS, GROUP_TOKENS, PLANE_BITS
from impress_sglang.precision.layer import range_views
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
    key_ranges, value_ranges = range_views(layout, tokens.groups)
    first = layout.group_range_bytes
    split = first + GROUP_TOKENS * layout.num_heads * layout.key_dim * BASE_BITS // 8
    groups = tokens.groups.contiguous().numpy()
    for loop, begin, ranges, pool in (
        (loops.restore_keys, first, key_ranges, keys),
        (loops.restore_values, split, value_ranges, values),
    ):
        with _numbers_of(pool, tokens.slots) as (numbers, slots):
            loop(groups, begin, ranges.float().contiguous().numpy(), place, slots, numbers)


def raise_units(
    tokens: CodedTokens, raised: Tensor, planes: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Add planes to the values of a layer in slots of pools.

    Args:
        tokens: of the layer; of their bytes only ranges are read. Others of a unit are skipped.
        raised: int64 [n, 3] on the CPU, distinct: plane, head and unit. The planes below each must
            be in the slots or among these.
        planes: uint8 [n, unit_bytes], the bytes of `raised`.
        keys: pool [slots, G, Dk].
        values: pool [slots, G, Dv].
    """
    layout = tokens.layout
    units = planes_by_unit(raised, layout, tokens.start)
    split = layout.unit_tokens * layout.key_dim * PLANE_BITS // 8
    key_ranges, value_ranges = range_views(layout, tokens.groups)
    for begin, steps, pool in (
        (0, key_ranges[:, None, :, 1], keys),
        (split, value_ranges[..., 1:], values),
    ):
        with _numbers_of(pool, tokens.slots) as (numbers, slots):
            loops.raise_units(
                planes.contiguous().numpy(),
                begin,
                layout.unit_tokens,
                units,
                steps.float().contiguous().numpy(),
                tokens.start - tokens.first_token,
                slots,
                numbers,
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
