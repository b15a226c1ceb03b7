"""One layer of KVs between tensors and coded bytes; what a device does with kernels, on the CPU.

Stage: load. `encode_layer` is the writer's; `restore_base` fills slots with what the base says, and
`raise_units` adds planes to what is in them. `triton.codes` does both on a device.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from impress_sglang.loops import codes as loops
from impress_sglang.precision.codec import (
    BASE_BITS,
    GROUP_TOKENS,
    NUM_PLANES,
    PLANE_BITS,
    Codes,
    base_of,
    code_keys,
    code_values,
    pack,
    plane_of,
)
from impress_sglang.precision.layout import CodeLayout


@dataclasses.dataclass(frozen=True, slots=True)
class CodedLayer:
    """The bytes of a layer, or of its first groups; uint8 in memory of the CPU.

    ranges [groups, group_range_bytes], base [groups, group_base_bytes], and planes
    [NUM_PLANES, G, units, unit_bytes].
    """

    ranges: Tensor
    base: Tensor
    planes: Tensor

    @classmethod
    def empty(cls, layout: CodeLayout) -> CodedLayer:
        """New memory for a layer."""
        shapes = (
            (layout.num_groups, layout.group_range_bytes),
            (layout.num_groups, layout.group_base_bytes),
            (NUM_PLANES, layout.num_heads, layout.num_units, layout.unit_bytes),
        )
        return cls(*(torch.zeros(shape, dtype=torch.uint8) for shape in shapes))


def encode_layer(layout: CodeLayout, keys: Tensor, values: Tensor, coded: CodedLayer) -> None:
    """Code keys [t, G, Dk] and values [t, G, Dv] into the bytes of a layer.

    Raises:
        NotCodable: no range holds them.
    """
    parts = (code_keys(keys), code_values(values))
    key_ranges, value_ranges = _range_views(layout, coded.ranges)
    key_ranges[:] = torch.stack([parts[0].low, parts[0].step], 2)
    value_ranges[:] = _in_groups(torch.stack([parts[1].low, parts[1].step], 2))
    for own, base in zip(parts, _base_views(layout, coded.base), strict=True):
        base[:] = _in_groups(pack(base_of(own.codes), BASE_BITS))
    for plane in range(NUM_PLANES):
        _encode_plane(layout, plane, parts, coded.planes[plane])


def restore_base(
    layout: CodeLayout, coded: CodedLayer, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Keys and values [stop - start, G, D] of some tokens as the base has them, float32."""
    count, first = stop - start, start // GROUP_TOKENS
    groups = slice(first, -(-stop // GROUP_TOKENS))
    keys = torch.empty(count, layout.num_heads, layout.key_dim)
    values = torch.empty(count, layout.num_heads, layout.value_dim)
    bases = _base_views(layout, coded.base[groups])
    ranges = _range_views(layout, coded.ranges[groups])
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
    key_ranges, value_ranges = _range_views(layout, coded.ranges)
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


def _in_groups(rows: Tensor) -> Tensor:
    """Rows [t, ...] in whole groups, zeros behind them: [groups, GROUP_TOKENS, ...]."""
    padding = [0, 0] * (rows.ndim - 1) + [0, -len(rows) % GROUP_TOKENS]
    return torch.nn.functional.pad(rows, padding).unflatten(0, (-1, GROUP_TOKENS))


def _encode_plane(
    layout: CodeLayout, plane: int, parts: tuple[Codes, Codes], target: Tensor
) -> None:
    """Lay out a plane of keys and values in units, uint8 [G, units, unit_bytes]."""
    first = 0
    for own in parts:
        packed = pack(plane_of(own.codes, plane), PLANE_BITS)
        rest = layout.num_units * layout.unit_tokens - len(packed)
        padded = torch.nn.functional.pad(packed, (0, 0, 0, 0, 0, rest)).transpose(0, 1)
        units = padded.unflatten(1, (-1, layout.unit_tokens)).flatten(2)
        target[..., first : first + units.shape[2]] = units
        first += units.shape[2]


def _base_views(layout: CodeLayout, base: Tensor) -> tuple[Tensor, Tensor]:
    """Packed keys and values [groups, GROUP_TOKENS, G, D / 2] in the base of some groups."""
    split = GROUP_TOKENS * layout.num_heads * layout.key_dim * BASE_BITS // 8
    shape = (GROUP_TOKENS, layout.num_heads, -1)
    return base[:, :split].unflatten(1, shape), base[:, split:].unflatten(1, shape)


def _range_views(layout: CodeLayout, ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges of keys [groups, G, 2, Dk] and of values [groups, GROUP_TOKENS, G, 2], float16."""
    halves = ranges.view(torch.float16)
    split = layout.num_heads * 2 * layout.key_dim
    return (
        halves[:, :split].unflatten(1, (layout.num_heads, 2, layout.key_dim)),
        halves[:, split:].unflatten(1, (GROUP_TOKENS, layout.num_heads, 2)),
    )
