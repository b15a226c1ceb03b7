"""Where each byte of a segment stands: pure arithmetic, no I/O.

A segment holds the KVs of one run of tokens. Per layer it has streams, each cut into chunks of
`chunk_tokens` rows (a row is a token): a probe stream, and the keys and values of each *lane*. A
lane is the KV heads that share one order of their tokens and one selection. There are two kinds of
layout:

    with probe heads       the probe stream has the keys of a few heads, from which important tokens
                           are found; one lane has all heads, and its keys are those of the others
                           (the paper's)
    without                the probe stream is empty; each KV head is a lane of its own

A stream is contiguous, so that neighbouring chunks are one read:

    header | layer 0: probe, keys of lane 0, 1, ..., values of lane 0, 1, ..., codes | layer 1: ...

The probe stream is always read whole and stands in logical order.

Codes are no stream: behind the streams of a layer stand all of its keys and values again in a few
bits, as `precision.layout.CodeLayout` says, in logical order.

Every chunk starts at a multiple of `BLOCK_BYTES` from the start of the file, which O_DIRECT needs.
The last chunk of a stream has only the rows that are left. The chunk is the unit of storing,
caching and scoring; the block is the unit of reading and of the checksums, so that a part of a
chunk can be read and verified. See docs/format.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from impress_sglang.precision.layout import CodeLayout

BLOCK_BYTES = 4096

# Number of a stream within its layer, in the order of the disk; see `KVShape.streams`.
Stream = int
PROBE: Stream = 0


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class KVShape:
    """Shape of a model's KV on this rank, and how a layer of it is cut into streams.

    `probe_kv_heads` are the KV heads whose keys are stored apart; heads count from 0. Where
    `coded`, all keys and values stand behind the streams in codes.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    probe_kv_heads: tuple[int, ...]
    coded: bool = False

    def __post_init__(self) -> None:
        assert self.num_query_heads % self.num_kv_heads == 0
        assert self.probe_kv_heads == tuple(sorted(set(self.probe_kv_heads)))
        assert all(0 <= head < self.num_kv_heads for head in self.probe_kv_heads)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> KVShape:
        """The shape that `to_fields` described."""
        dtype = getattr(torch, fields["dtype"])
        probes = tuple(fields["probe_kv_heads"])
        return cls(**{**fields, "dtype": dtype, "probe_kv_heads": probes})

    def to_fields(self) -> dict[str, Any]:
        """The shape as values that JSON has."""
        return {**dataclasses.asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @functools.cached_property
    def other_kv_heads(self) -> tuple[int, ...]:
        """KV heads that are not probe heads."""
        return tuple(h for h in range(self.num_kv_heads) if h not in self.probe_kv_heads)

    @functools.cached_property
    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """KV heads of each lane."""
        heads = range(self.num_kv_heads)
        return (tuple(heads),) if self.probe_kv_heads else tuple((head,) for head in heads)

    @property
    def num_lanes(self) -> int:
        """Lanes of a layer."""
        return len(self.lanes)

    @property
    def streams(self) -> range:
        """All streams of a layer: probe, keys of each lane, values of each lane."""
        return range(1 + 2 * self.num_lanes)

    @property
    def key_streams(self) -> range:
        """Keys of each lane, without those that the probe stream has."""
        return range(1, 1 + self.num_lanes)

    @property
    def value_streams(self) -> range:
        """Values of each lane."""
        return range(1 + self.num_lanes, 1 + 2 * self.num_lanes)

    def lane_of(self, stream: Stream) -> int:
        """The lane of a stream of keys or values."""
        assert stream != PROBE
        return (stream - 1) % self.num_lanes

    def heads(self, stream: Stream) -> tuple[int, ...]:
        """KV heads that a stream holds, in storage order."""
        return self._heads[stream]

    def head_dim(self, stream: Stream) -> int:
        """Elements of one head's vector in a stream."""
        return self.value_dim if stream in self.value_streams else self.key_dim

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row in a stream."""
        return len(self._heads[stream]) * self.head_dim(stream) * self.dtype.itemsize

    @functools.cached_property
    def _heads(self) -> tuple[tuple[int, ...], ...]:
        if not self.probe_kv_heads:
            return ((), *self.lanes, *self.lanes)
        return (self.probe_kv_heads, self.other_kv_heads, *self.lanes)


@dataclasses.dataclass(frozen=True)
class SegmentLayout:
    """Offsets and sizes, in bytes, of everything in a segment of `num_tokens` tokens."""

    shape: KVShape
    chunk_tokens: int
    num_tokens: int
    header_bytes: int

    def __post_init__(self) -> None:
        assert self.num_tokens > 0
        assert self.header_bytes % BLOCK_BYTES == 0

    @functools.cached_property
    def num_chunks(self) -> int:
        """Chunks of one stream of one layer."""
        return -(-self.num_tokens // self.chunk_tokens)

    @functools.cached_property
    def _strides(self) -> tuple[int, ...]:
        return tuple(
            round_up(self.shape.row_bytes(stream) * self.chunk_tokens, BLOCK_BYTES)
            for stream in self.shape.streams
        )

    @functools.cached_property
    def _stream_sizes(self) -> tuple[int, ...]:
        sizes, last = [], self.num_chunks - 1
        for stream in self.shape.streams:
            tail = round_up(self.chunk_bytes(stream, last), BLOCK_BYTES)
            sizes.append(last * self._strides[stream] + tail)
        return tuple(sizes)

    @functools.cached_property
    def _stream_starts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self._stream_sizes, initial=0))

    @functools.cached_property
    def streams_bytes(self) -> int:
        """Bytes of all streams of one layer."""
        return sum(self._stream_sizes)

    @functools.cached_property
    def codes(self) -> CodeLayout | None:
        """Of the codes of one layer, None if there are none."""
        shape = self.shape
        if not shape.coded:
            return None
        dims = shape.num_kv_heads, shape.key_dim, shape.value_dim
        return CodeLayout(self.num_tokens, *dims, BLOCK_BYTES)

    @functools.cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer: its streams and its codes."""
        return self.streams_bytes + (0 if self.codes is None else self.codes.layer_bytes)

    @functools.cached_property
    def file_bytes(self) -> int:
        """Size of the segment file."""
        return self.header_bytes + self.shape.num_layers * self.layer_bytes

    def chunk_rows(self, chunk: int) -> int:
        """Rows of a chunk; only the last one may have fewer than `chunk_tokens`."""
        return min(self.chunk_tokens, self.num_tokens - chunk * self.chunk_tokens)

    def chunk_stride(self, stream: Stream) -> int:
        """Bytes from the start of one chunk to the start of the next."""
        return self._strides[stream]

    def chunk_bytes(self, stream: Stream, chunk: int) -> int:
        """Bytes of a chunk without padding."""
        return self.shape.row_bytes(stream) * self.chunk_rows(chunk)

    def stream_bytes(self, stream: Stream) -> int:
        """Bytes of one stream of one layer, with padding."""
        return self._stream_sizes[stream]

    def layer_offset(self, layer: int) -> int:
        """Offset of a layer in the file."""
        return self.header_bytes + layer * self.layer_bytes

    def codes_offset(self, layer: int) -> int:
        """Offset of the codes of a layer in the file."""
        return self.layer_offset(layer) + self.streams_bytes

    def stream_offset(self, layer: int, stream: Stream) -> int:
        """Offset of a stream in the file."""
        return self.layer_offset(layer) + self._stream_starts[stream]

    def run_bytes(self, stream: Stream, first: int, stop: int) -> int:
        """Bytes on disk of the chunks `first` to `stop - 1` of a stream, with padding."""
        if stop < self.num_chunks:
            return (stop - first) * self._strides[stream]
        return self._stream_sizes[stream] - first * self._strides[stream]

    def chunk_index(self, layer: int, stream: Stream, chunk: int) -> int:
        """Position of a chunk among all chunks of the segment."""
        return layer * self.layer_chunks + stream * self.num_chunks + chunk

    @property
    def layer_chunks(self) -> int:
        """Chunks of all streams of one layer."""
        return len(self.shape.streams) * self.num_chunks

    @property
    def total_chunks(self) -> int:
        """Chunks of all streams of all layers."""
        return self.shape.num_layers * self.layer_chunks

    @property
    def num_blocks(self) -> int:
        """Blocks of `BLOCK_BYTES` after the header: entries of the checksum table."""
        return self.shape.num_layers * self.layer_bytes // BLOCK_BYTES
