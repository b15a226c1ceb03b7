"""One layer of KVs as coded bytes: how they are written, and where each part is in them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

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
    """The codes of a layer, or of its first groups; uint8 on the CPU.

    groups [groups, group_bytes], and planes [NUM_PLANES, G, units, unit_bytes].
    """

    groups: Tensor
    planes: Tensor

    @classmethod
    def empty(cls, layout: CodeLayout) -> CodedLayer:
        """New memory for a layer."""
        units = (NUM_PLANES, layout.num_heads, layout.num_units, layout.unit_bytes)
        groups = torch.zeros(layout.num_groups, layout.group_bytes, dtype=torch.uint8)
        return cls(groups, torch.zeros(units, dtype=torch.uint8))

    def put(self, layout: CodeLayout, memory: Tensor) -> None:
        """Write all codes into uint8 [layer_bytes] as laid out on disk; padding is zeros."""
        memory.zero_()
        for page, groups in enumerate(self.groups.split(layout.page_groups)):
            start = page * layout.page_bytes
            memory[start : start + groups.numel()] = groups.reshape(-1)
        units = memory[layout.base_bytes :].view(-1, layout.unit_stride)
        units[:, : layout.unit_bytes] = self.planes.flatten(0, 2)


def encode_layer(layout: CodeLayout, keys: Tensor, values: Tensor, coded: CodedLayer) -> None:
    """Code keys [t, G, Dk] and values [t, G, Dv] into the bytes of a layer.

    Raises:
        NotCodable: no range holds them.
    """
    parts = (code_keys(keys), code_values(values))
    key_ranges, value_ranges = range_views(layout, coded.groups)
    key_ranges[:] = torch.stack([parts[0].low, parts[0].step], 2)
    value_ranges[:] = _in_groups(torch.stack([parts[1].low, parts[1].step], 2))
    for own, base in zip(parts, base_views(layout, coded.groups), strict=True):
        base[:] = _in_groups(pack(base_of(own.codes), BASE_BITS))
    for plane in range(NUM_PLANES):
        _encode_plane(layout, plane, parts, coded.planes[plane])


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


def base_views(layout: CodeLayout, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Packed keys and values [groups, GROUP_TOKENS, G, D / 2] of some groups of the base."""
    base = groups[:, layout.group_range_bytes :]
    split = GROUP_TOKENS * layout.num_heads * layout.key_dim * BASE_BITS // 8
    shape = (GROUP_TOKENS, layout.num_heads, -1)
    return base[:, :split].unflatten(1, shape), base[:, split:].unflatten(1, shape)


def range_views(layout: CodeLayout, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges of keys [groups, G, 2, Dk] and of values [groups, GROUP_TOKENS, G, 2], float16."""
    halves = groups[:, : layout.group_range_bytes].view(torch.float16)
    split = layout.num_heads * 2 * layout.key_dim
    return (
        halves[:, :split].unflatten(1, (layout.num_heads, 2, layout.key_dim)),
        halves[:, split:].unflatten(1, (GROUP_TOKENS, layout.num_heads, 2)),
    )
