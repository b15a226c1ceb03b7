"""One layer of a segment between tensors in logical order and its bytes on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.storage.layout import SegmentLayout, Stream

# The mapping list of one layer: for each token the row where it stands.
MappingList = npt.NDArray[np.unsignedinteger[Any]]


def encode_layer(
    layout: SegmentLayout,
    keys: Tensor,
    values: Tensor,
    mapping: MappingList | None,
    memory: memoryview,
) -> None:
    """Lay keys [t, G, Dk] and values [t, G, Dv] out in `memory`, `layout.layer_bytes` long."""
    if mapping is not None:
        order = torch.from_numpy(np.argsort(mapping))
        keys, values = keys[order], values[order]
    start = 0
    for stream in Stream:
        rows = values if stream is Stream.VALUES else keys
        size = layout.stream_bytes(stream)
        _encode_stream(layout, stream, rows, memory[start : start + size])
        start += size


def decode_layer(
    layout: SegmentLayout, memory: memoryview, mapping: MappingList | None
) -> tuple[Tensor, Tensor]:
    """Keys [t, G, Dk] and values [t, G, Dv] in logical order, copied out of a layer's bytes."""
    shape, start = layout.shape, 0
    keys = torch.empty(layout.num_tokens, shape.num_kv_heads, shape.key_dim, dtype=shape.dtype)
    values = keys.new_empty(layout.num_tokens, shape.num_kv_heads, shape.value_dim)
    for stream in Stream:
        size = layout.stream_bytes(stream)
        if size:
            rows = _decode_stream(layout, stream, memory[start : start + size])
            target = values if stream is Stream.VALUES else keys
            logical = rows if mapping is None else rows[torch.from_numpy(mapping.astype(np.int64))]
            target[:, list(shape.heads(stream))] = logical
        start += size
    return keys, values


def _encode_stream(layout: SegmentLayout, stream: Stream, rows: Tensor, memory: memoryview) -> None:
    """Lay rows [t, G, D] out in chunks, zeros between them."""
    if not len(memory):
        return
    part = rows[:, list(layout.shape.heads(stream))].contiguous().view(torch.uint8)
    data = part.view(len(rows), -1).numpy().reshape(-1)
    target = np.frombuffer(memory, np.uint8)
    stride, chunk_bytes = layout.chunk_stride(stream), layout.chunk_bytes(stream, 0)
    whole = layout.num_chunks - 1
    body = target[: whole * stride].reshape(whole, stride)
    body[:, :chunk_bytes] = data[: whole * chunk_bytes].reshape(whole, chunk_bytes)
    body[:, chunk_bytes:] = 0
    last = target[whole * stride :]
    rest = data[whole * chunk_bytes :]
    last[: len(rest)] = rest
    last[len(rest) :] = 0


def _decode_stream(layout: SegmentLayout, stream: Stream, memory: memoryview) -> Tensor:
    """Rows [t, heads, D] of a stream in the order of the disk."""
    source = np.frombuffer(memory, np.uint8)
    stride, chunk_bytes = layout.chunk_stride(stream), layout.chunk_bytes(stream, 0)
    whole = layout.num_chunks - 1
    data = np.empty(layout.shape.row_bytes(stream) * layout.num_tokens, np.uint8)
    body = source[: whole * stride].reshape(whole, stride)
    data[: whole * chunk_bytes] = body[:, :chunk_bytes].reshape(-1)
    rest = len(data) - whole * chunk_bytes
    data[whole * chunk_bytes :] = source[whole * stride : whole * stride + rest]
    rows = torch.from_numpy(data).view(layout.shape.dtype)
    heads = len(layout.shape.heads(stream))
    return rows.view(layout.num_tokens, heads, layout.shape.head_dim(stream))
