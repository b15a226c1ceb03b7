"""One layer of KVs as coded bytes: how they are written, and where each part is in them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from impress_sglang.codes.planes.codec import (
    GROUP_TOKENS,
    NUM_PLANES,
    code_keys,
    code_values,
    packed_base,
    packed_sections,
)
from impress_sglang.codes.planes.layout import CodeLayout


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
        layout.put_groups(self.groups, memory)
        units = memory[layout.base_bytes :].view(-1, layout.unit_stride)
        units[:, : layout.unit_bytes] = self.planes.flatten(0, 2)


def encode_layer(
    layout: CodeLayout,
    keys: Tensor,
    values: Tensor,
    coded: CodedLayer,
    energy: Tensor | None = None,
) -> None:
    """Code keys [t, G, Dk] and values [t, G, Dv] into the bytes of a layer.

    `energy` float32 [G, Dk] is the mean square of the queries in each channel, see `code_keys`.

    Raises:
        NotCodable: no range holds them.
    """
    parts = (code_keys(keys, energy), code_values(values))
    key_ranges, value_ranges = range_views(layout, coded.groups)
    key_ranges[:] = torch.stack([parts[0].low, parts[0].step], 2)
    value_ranges[:] = _in_groups(torch.stack([parts[1].low, parts[1].step], 2))
    assert parts[0].sections is not None
    section_view(layout, coded.groups)[:] = parts[0].sections
    views, first = base_views(layout, coded.groups), 0
    for own, upper, section in zip(parts, views[::2], views[1::2], strict=True):
        upper[:] = _in_groups(packed_base(own))
        sections = packed_sections(own)
        section[:] = _in_groups(sections[0])
        units = _in_units(layout, sections[1:])
        coded.planes[..., first : first + units.shape[-1]] = units
        first += units.shape[-1]


def _in_groups(rows: Tensor) -> Tensor:
    """Rows [t, ...] in whole groups, zeros behind them: [groups, GROUP_TOKENS, ...]."""
    padding = [0, 0] * (rows.ndim - 1) + [0, -len(rows) % GROUP_TOKENS]
    return torch.nn.functional.pad(rows, padding).unflatten(0, (-1, GROUP_TOKENS))


def _in_units(layout: CodeLayout, planes: Tensor) -> Tensor:
    """Planes [n, t, G, W] of bytes in whole units, zeros behind them: [n, G, units, u x W]."""
    rest = layout.num_units * layout.unit_tokens - planes.shape[1]
    padded = torch.nn.functional.pad(planes, (0, 0, 0, 0, 0, rest)).transpose(1, 2)
    return padded.unflatten(2, (-1, layout.unit_tokens)).flatten(3)


def base_views(layout: CodeLayout, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed codes of some groups of the base, [groups, GROUP_TOKENS, G, bytes].

    Of keys the upper bits [..., Dk / 2] and the first section [..., Dk / 8]; of values the same.
    """
    shape = (GROUP_TOKENS, layout.num_heads, -1)
    ends = (*layout.base_places[1:], layout.group_bytes)
    first, second, third, fourth = (
        groups[:, start:end].unflatten(1, shape)
        for start, end in zip(layout.base_places, ends, strict=True)
    )
    return first, second, third, fourth


def range_views(layout: CodeLayout, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges of keys [groups, G, 2, Dk] and of values [groups, GROUP_TOKENS, G, 2], float16."""
    halves = groups[:, : layout.group_bounds_bytes].view(torch.float16)
    split = layout.num_heads * 2 * layout.key_dim
    return (
        halves[:, :split].unflatten(1, (layout.num_heads, 2, layout.key_dim)),
        halves[:, split:].unflatten(1, (GROUP_TOKENS, layout.num_heads, 2)),
    )


def section_view(layout: CodeLayout, groups: Tensor) -> Tensor:
    """The sections of the pairs of keys, uint8 [groups, G, Dk], see `codes.planes.codec.Codes`."""
    sections = groups[:, layout.group_bounds_bytes : layout.group_range_bytes]
    return sections.unflatten(1, (layout.num_heads, layout.key_dim))
