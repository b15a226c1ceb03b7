"""Where each byte of a segment stands: pure arithmetic, no I/O.

A segment holds the KVs of one run of tokens. Per layer it has three streams, each cut into
chunks of `chunk_tokens` tokens: keys of the probe heads (stored apart, so that probing reads
nothing else), keys of the other heads, and values of all heads. A stream is contiguous, so that
neighbouring chunks are one read.

    header | layer 0: probe keys, other keys, values | layer 1: ... | ...

Every chunk starts at a multiple of `BLOCK_BYTES` from the start of the file, which O_DIRECT needs.
The last chunk of a stream has only the tokens that are left. The chunk is the unit of storing,
caching and scoring; the block is the unit of reading and of the checksums, so that a part of a
chunk can be read and verified. See docs/format.md.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import Any

import torch

BLOCK_BYTES = 4096


class Stream(enum.IntEnum):
    """What a chunk holds."""

    PROBE_KEYS = 0
    OTHER_KEYS = 1
    VALUES = 2


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclasses.dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of a model's KV on this rank.

    `probe_kv_heads` are the KV heads whose keys are stored apart; heads count from 0.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    probe_kv_heads: tuple[int, ...]

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

    @property
    def other_kv_heads(self) -> tuple[int, ...]:
        """KV heads that are not probe heads."""
        return tuple(h for h in range(self.num_kv_heads) if h not in self.probe_kv_heads)

    def heads(self, stream: Stream) -> tuple[int, ...]:
        """KV heads that a stream holds, in storage order."""
        if stream is Stream.PROBE_KEYS:
            return self.probe_kv_heads
        if stream is Stream.OTHER_KEYS:
            return self.other_kv_heads
        return tuple(range(self.num_kv_heads))

    def head_dim(self, stream: Stream) -> int:
        """Elements of one head's vector in a stream."""
        return self.value_dim if stream is Stream.VALUES else self.key_dim

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one token in a stream."""
        return len(self.heads(stream)) * self.head_dim(stream) * self.dtype.itemsize


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
            for stream in Stream
        )

    @functools.cached_property
    def _stream_sizes(self) -> tuple[int, ...]:
        last = self.chunk_rows(self.num_chunks - 1)
        return tuple(
            (self.num_chunks - 1) * self._strides[stream]
            + round_up(self.shape.row_bytes(stream) * last, BLOCK_BYTES)
            for stream in Stream
        )

    @functools.cached_property
    def layer_bytes(self) -> int:
        """Bytes of one layer: its three streams."""
        return sum(self._stream_sizes)

    @functools.cached_property
    def file_bytes(self) -> int:
        """Size of the segment file."""
        return self.header_bytes + self.shape.num_layers * self.layer_bytes

    def chunk_rows(self, chunk: int) -> int:
        """Tokens in a chunk; only the last one may have fewer than `chunk_tokens`."""
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

    def stream_offset(self, layer: int, stream: Stream) -> int:
        """Offset of a stream in the file."""
        return self.layer_offset(layer) + sum(self._stream_sizes[:stream])

    def run_bytes(self, stream: Stream, first: int, stop: int) -> int:
        """Bytes on disk of the chunks `first` to `stop - 1` of a stream, with padding."""
        if stop < self.num_chunks:
            return (stop - first) * self._strides[stream]
        return self._stream_sizes[stream] - first * self._strides[stream]

    def chunk_index(self, layer: int, stream: Stream, chunk: int) -> int:
        """Position of a chunk among all chunks of the segment."""
        return (layer * len(Stream) + stream) * self.num_chunks + chunk

    @property
    def total_chunks(self) -> int:
        """Chunks of all streams of all layers."""
        return self.shape.num_layers * len(Stream) * self.num_chunks

    @property
    def num_blocks(self) -> int:
        """Blocks of `BLOCK_BYTES` after the header: entries of the checksum table."""
        return self.shape.num_layers * self.layer_bytes // BLOCK_BYTES
