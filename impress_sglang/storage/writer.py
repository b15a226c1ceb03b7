"""Writes segments: one layer at a time, published only when complete.

Stage: write back. The file gets a temporary name, chunks first, the header last, then fsync, rename
and fsync of the directory, so that a file with its final name is always whole. Memory is bounded by
one layer of one segment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from impress_sglang.storage.direct_io import (
    AlignedBuffer,
    open_for_writing,
    sync_directory,
    write_exactly,
)
from impress_sglang.storage.layout import SegmentLayout, Stream
from impress_sglang.storage.segment import Checksums, SegmentInfo, checksum, encode_header

TEMPORARY_SUFFIX = ".tmp"


class LayerReader(Protocol):
    """Gives the KVs to write; called once per layer, in order, on the writing thread."""

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys [t, G, Dk] and values [t, G, Dv] of a layer, on the CPU, contiguous."""
        ...


def write_segment(
    path: Path, info: SegmentInfo, read_layer: LayerReader, buffer: AlignedBuffer, *, direct: bool
) -> None:
    """Write a segment and publish it under `path`.

    Raises:
        OSError: the file system refused, for example because it is full; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with _removed_on_error(temporary):
        with open_for_writing(temporary, direct=direct) as descriptor:
            _write_contents(descriptor, info, read_layer, buffer)
            os.fsync(descriptor)
        os.rename(temporary, path)
        sync_directory(path.parent)


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write_contents(
    descriptor: int, info: SegmentInfo, read_layer: LayerReader, buffer: AlignedBuffer
) -> None:
    layout = info.layout()
    checksums = np.zeros(layout.num_checksums, np.uint64)
    memory = buffer.view(max(layout.layer_bytes, layout.header_bytes))
    for layer in range(info.shape.num_layers):
        keys, values = read_layer(layer)
        _encode_layer(layout, layer, keys, values, memory[: layout.layer_bytes], checksums)
        write_exactly(descriptor, layout.layer_offset(layer), memory[: layout.layer_bytes])
    header = memory[: layout.header_bytes]
    header[:] = encode_header(info, checksums)
    write_exactly(descriptor, 0, header)


def _encode_layer(
    layout: SegmentLayout,
    layer: int,
    keys: Tensor,
    values: Tensor,
    memory: memoryview,
    checksums: Checksums,
) -> None:
    start = 0
    for stream in Stream:
        rows = values if stream is Stream.VALUES else keys
        size = layout.stream_bytes(stream)
        _encode_stream(layout, stream, rows, memory[start : start + size])
        table = layout.checksum_index(layer, stream, 0)
        checksums[table : table + layout.num_chunks] = _chunk_checksums(
            layout, stream, memory[start : start + size]
        )
        start += size


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


def _chunk_checksums(layout: SegmentLayout, stream: Stream, memory: memoryview) -> list[int]:
    stride = layout.chunk_stride(stream)
    return [
        checksum(memory[chunk * stride : chunk * stride + layout.chunk_bytes(stream, chunk)])
        for chunk in range(layout.num_chunks)
    ]
