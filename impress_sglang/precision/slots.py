"""Coded layers in slots of a pool on the CPU; `triton.codes` does the same on a device.

Stage: load. `restore_base` fills slots with what the base says, `raise_units` adds planes to that.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from impress_sglang.loops import codes as loops
from impress_sglang.precision.codec import GROUP_TOKENS, NUM_PLANES, PLANE_BITS
from impress_sglang.precision.layer import base_views, range_views
from impress_sglang.precision.layout import CodeLayout


@dataclasses.dataclass(frozen=True, slots=True)
class CodedTokens:
    """The tokens [start, start + len(slots)) of a coded layer, and where they go.

    Attributes:
        layout: of the layer.
        groups: uint8 [groups, group_bytes], the groups of these tokens.
        start: the first token, counted from the start of the layer.
        slots: int64 [n] on the device of `groups` and of the pools, distinct.
    """

    layout: CodeLayout
    groups: Tensor
    start: int
    slots: Tensor

    def __post_init__(self) -> None:
        assert self.first_token + len(self.groups) * GROUP_TOKENS >= self.start + len(self.slots)

    @property
    def first_token(self) -> int:
        """Of the first group."""
        return self.start // GROUP_TOKENS * GROUP_TOKENS


def restore_base(tokens: CodedTokens, keys: Tensor, values: Tensor) -> None:
    """Fill slots with what the base says.

    Args:
        tokens: of a layer.
        keys: pool [slots, G, Dk].
        values: pool [slots, G, Dv].
    """
    layout = tokens.layout
    place = tokens.start - tokens.first_token
    bases, ranges = base_views(layout, tokens.groups), range_views(layout, tokens.groups)
    for loop, base, own, pool in (
        (loops.restore_keys, bases[0], ranges[0], keys),
        (loops.restore_values, bases[1], ranges[1], values),
    ):
        with _numbers_of(pool, tokens.slots) as (numbers, slots):
            loop(base.numpy(), own.float().contiguous().numpy(), place, slots, numbers)


def raise_units(
    tokens: CodedTokens, raised: Tensor, planes: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Add planes to what slots of pools hold of a layer.

    Args:
        tokens: of the layer; of their bytes only ranges are read. Others of a unit are left out.
        raised: int64 [n, 3] on the CPU, distinct: plane, head and unit. What is below a plane must
            be in the slots or among them.
        planes: uint8 [n, unit_bytes], their bytes.
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
                planes.numpy(),
                begin,
                layout.unit_tokens,
                units.numpy(),
                steps.float().contiguous().numpy(),
                tokens.start - tokens.first_token,
                slots,
                numbers,
            )


def planes_by_unit(raised: Tensor, layout: CodeLayout, origin: int) -> Tensor:
    """Planes that are raised, one row for each unit.

    Args:
        raised: int64 [n, 3] on the CPU, distinct: plane, head and unit.
        layout: of the layer.
        origin: the token from which tokens are counted.

    Returns:
        int64 [units, 2 + NUM_PLANES]: head, first token, and of each plane its row in `raised`, -1
        if it is not there.
    """
    places, entry_of = raised[:, 1:].unique(dim=0, return_inverse=True)
    units = torch.full((len(places), 2 + NUM_PLANES), -1)
    units[:, 0] = places[:, 0]
    units[:, 1] = places[:, 1] * layout.unit_tokens - origin
    units[entry_of, 2 + raised[:, 0]] = torch.arange(len(raised))
    return units


@contextlib.contextmanager
def _numbers_of(pool: Tensor, slots: Tensor) -> Iterator[tuple[Any, Any]]:
    """A pool as the loops take it, and where slots are in that; what they write gets there."""
    if pool.is_contiguous() and pool.dtype in (torch.float32, torch.bfloat16):
        words = pool if pool.dtype == torch.float32 else pool.view(torch.uint16)
        yield words.numpy(), slots.numpy()
        return
    rows = pool[slots].float()
    yield rows.numpy(), torch.arange(len(slots)).numpy()
    pool[slots] = rows.to(pool.dtype)
