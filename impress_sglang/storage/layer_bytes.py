"""One layer of a segment between tensors in logical order and its bytes on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.loops.types import Uint8s
from impress_sglang.storage.layout import PROBE, KVShape, SegmentLayout

# The mapping lists of one layer: for each head group and token, the row of the token.
LayerMapping = npt.NDArray[np.unsignedinteger[Any]]


def encode_layer(
    layout: SegmentLayout,
    layer: int,
    keys: Tensor,
    values: Tensor,
    mapping: LayerMapping | None,
    memory: memoryview,
    groups: Tensor | None = None,
) -> None:
    """Lay keys [t, G, Dk] and values [t, G, Dv] out in `memory`, `layout.layer_bytes(layer)` long.

    `groups`: the same in codes, if the layer has codes.
    """
    shape, flat = layout.shape, torch.frombuffer(memory, dtype=torch.uint8)
    if layer >= shape.first_raw:
        layout.rows.put_groups(_rows_of(keys, values), flat)
        return
    parts = _parts(layout, flat)
    for column, (pages, part) in enumerate(zip(layout.columns, parts, strict=True)):
        if pages.group_bytes:
            rows = values if column in shape.value_columns else keys
            if mapping is not None and column != PROBE:
                rows = rows[torch.from_numpy(np.argsort(mapping[shape.head_group_of(column)]))]
            heads = shape.heads(column)
            # Of one head it is a view, and copied in half the time.
            rows = rows[:, heads[0]] if len(heads) == 1 else rows[:, list(heads)]
            rows = rows.contiguous().view(torch.uint8)
            pages.put_groups(rows.view(layout.num_tokens, pages.group_bytes), part)
    if groups is not None:
        layout.codes[layer].put_groups(groups, flat[layout.columns_bytes :])


def put_sinks(sinks: Uint8s, keys: Tensor, values: Tensor) -> None:
    """Note the first tokens of keys [t, G, Dk] and values [t, G, Dv] in uint8 [sinks, bytes]."""
    sinks[:] = _rows_of(keys[: len(sinks)], values[: len(sinks)]).numpy()


def _rows_of(keys: Tensor, values: Tensor) -> Tensor:
    """All keys [t, G, Dk] and then all values [t, G, Dv] of each token, uint8 [t, bytes]."""
    return torch.cat([keys.flatten(1), values.flatten(1)], 1).contiguous().view(torch.uint8)


def sinks_of(shape: KVShape, sinks: Uint8s) -> tuple[Tensor, Tensor]:
    """Keys [L, sinks, G, Dk] and values [L, sinks, G, Dv] of what `put_sinks` noted of L layers."""
    places = *sinks.shape[:2], shape.num_kv_heads
    keys = torch.empty(*places, shape.key_dim, dtype=shape.dtype)
    values = torch.empty(*places, shape.value_dim, dtype=shape.dtype)
    split = shape.num_kv_heads * shape.key_dim * shape.dtype.itemsize
    for rows, own in ((keys, sinks[..., :split]), (values, sinks[..., split:])):
        rows.flatten(2).view(torch.uint8).copy_(torch.from_numpy(own))
    return keys, values


def decode_layer(
    layout: SegmentLayout, memory: memoryview, mapping: LayerMapping | None
) -> tuple[Tensor, Tensor]:
    """Keys [t, G, Dk] and values [t, G, Dv] in logical order, copied out of a layer's columns."""
    shape, flat = layout.shape, torch.frombuffer(memory, dtype=torch.uint8)
    keys = torch.empty(layout.num_tokens, shape.num_kv_heads, shape.key_dim, dtype=shape.dtype)
    values = keys.new_empty(layout.num_tokens, shape.num_kv_heads, shape.value_dim)
    parts = _parts(layout, flat)
    for column, (pages, part) in enumerate(zip(layout.columns, parts, strict=True)):
        if pages.group_bytes:
            target = values if column in shape.value_columns else keys
            heads = list(shape.heads(column))
            rows = pages.groups_in(part)[: layout.num_tokens].view(shape.dtype)
            if mapping is not None and column != PROBE:
                head_group = mapping[shape.head_group_of(column)].astype(np.int64)
                rows = rows[torch.from_numpy(head_group)]
            target[:, heads] = rows.unflatten(1, (len(heads), -1))
    return keys, values


def _parts(layout: SegmentLayout, flat: Tensor) -> tuple[Tensor, ...]:
    """The bytes of each column of a layer, uint8."""
    return flat[: layout.columns_bytes].split([own.num_bytes for own in layout.columns])
