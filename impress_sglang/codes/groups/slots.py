"""Codes in slots of a pool on the CPU; `triton.codes` does the same on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from impress_sglang.codes.groups.layout import GroupLayout
from impress_sglang.loops import codes as loops


def restore(
    layout: GroupLayout, groups: Tensor, start: int, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Fill slots with what codes stand for; see `triton.codes.restore`."""
    groups = groups.contiguous()
    _, _, pairs, upper_keys, columns, upper_values, more, _ = layout.places
    ranges = groups[:, :pairs].view(torch.float16).float().contiguous().numpy()
    codes, first, more_bits = groups.numpy(), layout.sizes[0] // 2, layout.more_bits
    with _numbers_of(keys, slots) as (pool, rows):
        places = pairs, upper_keys, columns, layout.num_pairs
        loops.restore_keys(codes, *places, ranges, start, rows, pool)
    with _numbers_of(values, slots) as (pool, rows):
        loops.restore_values(codes, upper_values, more, more_bits, ranges, first, start, rows, pool)


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
