"""Coded layers in slots of a pool on the CPU; `triton.codes` does the same on a device.

Stage: load. `restore_base` fills slots with what the base says, `raise_units` adds planes to that.
"""

from __future__ import annotations

import dataclasses

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
    layout, count = tokens.layout, len(tokens.slots)
    place = tokens.start - tokens.first_token
    bases, ranges = base_views(layout, tokens.groups), range_views(layout, tokens.groups)
    for loop, base, own, pool in (
        (loops.restore_keys, bases[0], ranges[0], keys),
        (loops.restore_values, bases[1], ranges[1], values),
    ):
        rows = torch.empty(count, *pool.shape[1:])
        loop(base.contiguous().numpy(), own.float().contiguous().numpy(), place, rows.numpy())
        _put(pool.flatten(1), tokens.slots, rows.flatten(1))


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
    if not len(raised):
        return
    layout = tokens.layout
    # A token that gets several planes is rounded to the dtype of the pool once.
    places, entry_of = raised[:, 1:].unique(dim=0, return_inverse=True)
    heads, units = places.T
    own = units[:, None] * layout.unit_tokens + torch.arange(layout.unit_tokens)
    inside = (own >= tokens.start) & (own < tokens.start + len(tokens.slots))
    near = own.clamp(tokens.start, tokens.start + len(tokens.slots) - 1)
    cells = 2.0 ** (PLANE_BITS * (NUM_PLANES - 1 - raised[:, 0]))
    split = layout.unit_tokens * layout.key_dim * PLANE_BITS // 8
    key_ranges, value_ranges = range_views(layout, tokens.groups)
    within = near - tokens.first_token
    group, place = within // GROUP_TOKENS, within % GROUP_TOKENS
    # From the dimension of a vector to that of a pool of heads.
    rows_of = (tokens.slots[near - tokens.start] * layout.num_heads + heads[:, None])[inside]
    key_steps = key_ranges[group, heads[:, None], 1]
    value_steps = value_ranges[group, place, heads[:, None], 1][..., None]
    for pool, own_bytes, steps in (
        (keys, planes[:, :split], key_steps),
        (values, planes[:, split : layout.unit_bytes], value_steps),
    ):
        rows = torch.zeros(len(places), layout.unit_tokens, pool.shape[2])
        loops.add_planes(
            own_bytes.unflatten(1, (layout.unit_tokens, -1)).contiguous().numpy(),
            cells.float().numpy(),
            entry_of.numpy(),
            rows.numpy(),
        )
        vectors = pool.flatten(0, 1)
        gained = (rows * steps.float())[inside]
        _put(vectors, rows_of, vectors.index_select(0, rows_of).float().add_(gained))


def _put(pool: Tensor, index: Tensor, rows: Tensor) -> None:
    """Fill rows of a pool [n, width], faster than by indexing: words are copied, not elements."""
    words = rows.to(pool.dtype).view(torch.uint8)
    assert pool.data_ptr() == pool.view(torch.uint8).data_ptr(), "a copy would be filled"
    width = torch.int64 if not words.shape[1] % 8 else torch.uint8
    pool.view(width).index_copy_(0, index, words.view(width))
