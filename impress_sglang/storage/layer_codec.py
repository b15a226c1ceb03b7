"""One layer of a segment between tensors in logical order and its bytes on disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.precision.layer import CodedLayer
from impress_sglang.precision.layer import encode_layer as encode_codes
from impress_sglang.storage.layout import PROBE, SegmentLayout, Stream

# The mapping lists of one layer: for each lane and token the row where the token stands.
LayerMapping = npt.NDArray[np.unsignedinteger[Any]]


def encode_layer(
    layout: SegmentLayout,
    keys: Tensor,
    values: Tensor,
    mapping: LayerMapping | None,
    memory: memoryview,
) -> None:
    """Lay keys [t, G, Dk] and values [t, G, Dv] out in `memory`, `layout.layer_bytes` long.

    Raises:
        NotCodable: there shall be codes, and no range holds these KVs.
    """
    shape, start = layout.shape, 0
    for stream in shape.streams:
        rows = values if stream in shape.value_streams else keys
        if mapping is not None and stream != PROBE:
            rows = rows[torch.from_numpy(np.argsort(mapping[shape.lane_of(stream)]))]
        rows = rows[:, list(shape.heads(stream))]
        size = layout.stream_bytes(stream)
        _encode_stream(layout, stream, rows, memory[start : start + size])
        start += size
    if layout.codes is not None:
        coded = CodedLayer.empty(layout.codes)
        encode_codes(layout.codes, keys, values, coded)
        coded.put(layout.codes, torch.frombuffer(memory[start:], dtype=torch.uint8))


def decode_layer(
    layout: SegmentLayout, memory: memoryview, mapping: LayerMapping | None
) -> tuple[Tensor, Tensor]:
    """Keys [t, G, Dk] and values [t, G, Dv] in logical order, copied out of a layer's bytes."""
    shape, start = layout.shape, 0
    keys = torch.empty(layout.num_tokens, shape.num_kv_heads, shape.key_dim, dtype=shape.dtype)
    values = keys.new_empty(layout.num_tokens, shape.num_kv_heads, shape.value_dim)
    for stream in shape.streams:
        size = layout.stream_bytes(stream)
        if size:
            rows = _decode_stream(layout, stream, memory[start : start + size])
            if mapping is not None and stream != PROBE:
                lane = mapping[shape.lane_of(stream)].astype(np.int64)
                rows = rows[torch.from_numpy(lane)]
            target = values if stream in shape.value_streams else keys
            target[:, list(shape.heads(stream))] = rows
        start += size
    return keys, values


def _encode_stream(layout: SegmentLayout, stream: Stream, rows: Tensor, memory: memoryview) -> None:
    """Lay rows [t, ...] out in chunks, zeros between them."""
    if not len(memory):
        return
    data = rows.contiguous().view(torch.uint8).view(-1).numpy()
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
