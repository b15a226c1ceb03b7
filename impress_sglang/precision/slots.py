"""Coded layers in slots of a pool on the CPU; `triton.codes` does the same on a device.

Stage: load. `restore_base` gives what the base says, `raise_units` adds planes to what slots hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impress_sglang.loops import codes as loops
from impress_sglang.precision.codec import GROUP_TOKENS, NUM_PLANES, PLANE_BITS
from impress_sglang.precision.layer import CodedLayer, base_views, range_views
from impress_sglang.precision.layout import CodeLayout


def restore_base(
    layout: CodeLayout, coded: CodedLayer, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [stop - start, G, D] of some tokens as the base has them, float32."""
    count, first = stop - start, start // GROUP_TOKENS
    groups = slice(first, -(-stop // GROUP_TOKENS))
    keys = torch.empty(count, layout.num_heads, layout.key_dim)
    values = torch.empty(count, layout.num_heads, layout.value_dim)
    bases = base_views(layout, coded.base[groups])
    ranges = range_views(layout, coded.ranges[groups])
    place = start - first * GROUP_TOKENS
    for loop, base, own, rows in (
        (loops.restore_keys, bases[0], ranges[0], keys),
        (loops.restore_values, bases[1], ranges[1], values),
    ):
        loop(base.contiguous().numpy(), own.float().contiguous().numpy(), place, rows.numpy())
    return keys, values


def raise_units(
    layout: CodeLayout,
    coded: CodedLayer,
    raised: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> None:
    """Add planes to what slots of pools hold of a layer.

    Args:
        layout: of the layer.
        coded: its ranges and planes; of these only the units that are named are read.
        raised: int64 [n, 3] on the CPU, distinct: plane, head and unit. What is below a plane must
            be in the slots or among them.
        keys: pool [slots, G, Dk].
        values: pool [slots, G, Dv].
        slots: int64 [t], where each token of the layer is.
    """
    if not len(raised):
        return
    # A token that gets several planes is rounded to the dtype of the pool once.
    places, entry_of = raised[:, 1:].unique(dim=0, return_inverse=True)
    heads, units = places.T
    tokens = units[:, None] * layout.unit_tokens + torch.arange(layout.unit_tokens)
    inside = tokens < layout.num_tokens
    tokens = tokens.clamp_max(layout.num_tokens - 1)
    planes, own_heads, own_units = raised.T
    bytes_of = coded.planes[planes, own_heads, own_units]
    cells = 2.0 ** (PLANE_BITS * (NUM_PLANES - 1 - planes))
    key_bytes = layout.unit_tokens * layout.key_dim * PLANE_BITS // 8
    key_ranges, value_ranges = range_views(layout, coded.ranges)
    group, place = tokens // GROUP_TOKENS, tokens % GROUP_TOKENS
    key_steps = key_ranges[group, heads[:, None], 1]
    value_steps = value_ranges[group, place, heads[:, None], 1]
    for pool, own_bytes, steps in (
        (keys, bytes_of[:, :key_bytes], key_steps),
        (values, bytes_of[:, key_bytes:], value_steps[..., None].expand(-1, -1, values.shape[2])),
    ):
        rows = torch.zeros(len(places), layout.unit_tokens, pool.shape[2])
        loops.add_planes(
            own_bytes.unflatten(1, (layout.unit_tokens, -1)).contiguous().numpy(),
            cells.float().numpy(),
            entry_of.numpy(),
            rows.numpy(),
        )
        index = slots[tokens[inside].to(slots.device)], heads[:, None].expand_as(tokens)[inside]
        gained = (rows * steps.float())[inside].to(pool.device)
        pool[index] = (pool[index].float() + gained).to(pool.dtype)
