"""One layer of a segment between tensors in logical order and its bytes on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.loops.types import Uint8s
from impress_sglang.storage.layout import PROBE, Column, KVShape, SegmentLayout

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

    `groups`: the same in codes, if the layout has codes.
    """
    shape, start = layout.shape, 0
    for column in shape.columns:
        rows = values if column in shape.value_columns else keys
        if mapping is not None and column != PROBE:
            rows = rows[torch.from_numpy(np.argsort(mapping[shape.head_group_of(column)]))]
        rows = rows[:, list(shape.heads(column))]
        size = layout.column_bytes(column)
        _encode_column(layout, column, rows, memory[start : start + size])
        start += size
    if groups is not None:
        layout.codes[layer].put_groups(groups, torch.frombuffer(memory[start:], dtype=torch.uint8))


def put_sinks(sinks: Uint8s, keys: Tensor, values: Tensor) -> None:
    """Note the first tokens of keys [t, G, Dk] and values [t, G, Dv] in uint8 [sinks, bytes]."""
    rows = [own[: len(sinks)].flatten(1) for own in (keys, values)]
    sinks[:] = torch.cat(rows, 1).contiguous().view(torch.uint8).numpy()


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
    """Keys [t, G, Dk] and values [t, G, Dv] in logical order, copied out of a layer's bytes."""
    shape, start = layout.shape, 0
    keys = torch.empty(layout.num_tokens, shape.num_kv_heads, shape.key_dim, dtype=shape.dtype)
    values = keys.new_empty(layout.num_tokens, shape.num_kv_heads, shape.value_dim)
    for column in shape.columns:
        size = layout.column_bytes(column)
        if size:
            rows = _decode_column(layout, column, memory[start : start + size])
            if mapping is not None and column != PROBE:
                head_group = mapping[shape.head_group_of(column)].astype(np.int64)
                rows = rows[torch.from_numpy(head_group)]
            target = values if column in shape.value_columns else keys
            target[:, list(shape.heads(column))] = rows
        start += size
    return keys, values


def _encode_column(layout: SegmentLayout, column: Column, rows: Tensor, memory: memoryview) -> None:
    """Lay rows [t, ...] out in chunks, zeros between them."""
    if not len(memory):
        return
    data = rows.contiguous().view(torch.uint8).view(-1).numpy()
    target = np.frombuffer(memory, np.uint8)
    stride, chunk_bytes = layout.chunk_stride(column), layout.chunk_bytes(column, 0)
    whole = layout.num_chunks - 1
    body = target[: whole * stride].reshape(whole, stride)
    body[:, :chunk_bytes] = data[: whole * chunk_bytes].reshape(whole, chunk_bytes)
    body[:, chunk_bytes:] = 0
    last = target[whole * stride :]
    rest = data[whole * chunk_bytes :]
    last[: len(rest)] = rest
    last[len(rest) :] = 0


def _decode_column(layout: SegmentLayout, column: Column, memory: memoryview) -> Tensor:
    """Rows [t, heads, D] of a column, in the order on disk."""
    source = np.frombuffer(memory, np.uint8)
    stride, chunk_bytes = layout.chunk_stride(column), layout.chunk_bytes(column, 0)
    whole = layout.num_chunks - 1
    data = np.empty(layout.shape.row_bytes(column) * layout.num_tokens, np.uint8)
    body = source[: whole * stride].reshape(whole, stride)
    data[: whole * chunk_bytes] = body[:, :chunk_bytes].reshape(-1)
    rest = len(data) - whole * chunk_bytes
    data[whole * chunk_bytes :] = source[whole * stride : whole * stride + rest]
    rows = torch.from_numpy(data).view(layout.shape.dtype)
    heads = len(layout.shape.heads(column))
    return rows.view(layout.num_tokens, heads, layout.shape.head_dim(column))
