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
    flat, whole, last = _chunks(layout, column, memory)
    if len(data) < len(flat):
        flat[:] = 0
    whole[:] = data[: whole.size].reshape(whole.shape)
    last[:] = data[whole.size :]


def _decode_column(layout: SegmentLayout, column: Column, memory: memoryview) -> Tensor:
    """Rows [t, heads, D] of a column, in the order on disk."""
    _, whole, last = _chunks(layout, column, memory)
    shape = layout.shape
    rows = torch.from_numpy(np.concatenate([whole.reshape(-1), last])).view(shape.dtype)
    return rows.view(layout.num_tokens, len(shape.heads(column)), shape.head_dim(column))


def _chunks(
    layout: SegmentLayout, column: Column, memory: memoryview
) -> tuple[Uint8s, Uint8s, Uint8s]:
    """The bytes of a column; in them the rows of all chunks but the last, and those of this one."""
    flat, count = np.frombuffer(memory, np.uint8), layout.num_chunks - 1
    stride, size = layout.chunk_stride(column), layout.chunk_bytes(column, 0)
    begin, rest = count * stride, layout.chunk_bytes(column, count)
    return flat, flat[:begin].reshape(count, stride)[:, :size], flat[begin : begin + rest]
