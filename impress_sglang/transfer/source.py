"""Where the KVs of a request's stored prefix come from.

Stage: load. A source gives rows (tokens) of a stream of a layer. `SegmentSource` reads them from
SSD, `MemorySource` has them in memory, after a recompute of a prefix whose chunks were unreadable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from impress_sglang.storage.direct_io import AlignedBuffer
from impress_sglang.storage.layout import KVShape, Stream
from impress_sglang.storage.reader import ChunkReader, ChunkRun, OpenSegment


@dataclasses.dataclass(frozen=True, slots=True)
class Want:
    """Rows of a stream: `tokens` is ascending int64 [k] on the CPU, None for all m tokens."""

    stream: Stream
    tokens: Tensor | None = None


class PrefixSource(Protocol):
    """The KVs of the tokens [0, num_tokens) of a stored prefix.

    Implementations must return exactly the rows that are wanted, in the order of the tokens, as
    CPU tensors [rows, heads of the stream, dim] in the KV's dtype. A returned tensor is valid until
    the next `read` of the same stream by any source. `bytes_read` counts bytes that came from SSD.
    """

    num_tokens: int
    bytes_read: int

    def read(self, layer: int, wants: Sequence[Want]) -> list[Tensor]:
        """Read rows of several streams of a layer at once.

        Raises:
            ChunkUnreadable: a chunk is missing, short or corrupt.
        """
        ...


class Staging:
    """Memory that reads land in: one buffer per stream, shared by the sources of one thread."""

    def __init__(self) -> None:
        self._buffers = {stream: AlignedBuffer() for stream in Stream}

    def view(self, stream: Stream, num_bytes: int) -> memoryview:
        """Memory for the next read of a stream."""
        return self._buffers[stream].view(num_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class SourceSpan:
    """The tokens [start, stop) of a segment."""

    segment: OpenSegment
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class _SpanRead:
    """Chunks of one span that a read touches: their numbers, and where rows stand in them."""

    span: SourceSpan
    stream: Stream
    chunks: Tensor  # int64, ascending, distinct
    chunk_of_row: Tensor  # int64, position in `chunks`
    offset_of_row: Tensor  # int64, row inside its chunk
    unbroken: bool  # rows follow each other without a gap

    @property
    def staged_bytes(self) -> int:
        return len(self.chunks) * self.span.segment.layout.chunk_stride(self.stream)


class SegmentSource:
    """A stored prefix on SSD: consecutive spans of one or more segments."""

    def __init__(
        self, shape: KVShape, spans: Sequence[SourceSpan], reader: ChunkReader, staging: Staging
    ) -> None:
        assert spans
        self.num_tokens = sum(len(span) for span in spans)
        self.bytes_read = 0
        self.chunks_read = dict.fromkeys(Stream, 0)
        self._shape = shape
        self._spans = tuple(spans)
        self._reader = reader
        self._staging = staging

    @property
    def segment_ids(self) -> list[str]:
        """Names of the segments that this source reads, in order."""
        return [span.segment.segment_id for span in self._spans]

    def read(self, layer: int, wants: Sequence[Want]) -> list[Tensor]:
        """See `PrefixSource.read`; neighbouring chunks are one read."""
        plans = [self._plan(want) for want in wants]
        memory = [
            self._staging.view(want.stream, _staged_bytes(p))
            for want, p in zip(wants, plans, strict=True)
        ]
        runs = [
            run
            for p, target in zip(plans, memory, strict=True)
            for run in _chunk_runs(layer, p, target)
        ]
        self.bytes_read += self._reader.read(runs)
        for want, plan in zip(wants, plans, strict=True):
            if self._shape.row_bytes(want.stream):
                self.chunks_read[want.stream] += sum(len(part.chunks) for part in plan)
        return [self._rows(plan, target) for plan, target in zip(plans, memory, strict=True)]

    def _plan(self, want: Want) -> list[_SpanRead]:
        reads, first = [], 0
        for span in self._spans:
            local = _local_tokens(want.tokens, first, span)
            if len(local):
                reads.append(_plan_span(span, want.stream, local))
            first += len(span)
        return reads

    def _rows(self, plan: list[_SpanRead], memory: memoryview) -> Tensor:
        parts, start = [], 0
        for part in plan:
            parts.append(self._gather(part, memory[start : start + part.staged_bytes]))
            start += part.staged_bytes
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gather(self, part: _SpanRead, memory: memoryview) -> Tensor:
        shape, stream = self._shape, part.stream
        heads, dim = len(shape.heads(stream)), shape.head_dim(stream)
        if not heads:
            return torch.empty(len(part.chunk_of_row), 0, dim, dtype=shape.dtype)
        rows_per_chunk = part.span.segment.layout.chunk_tokens
        stride = part.span.segment.layout.chunk_stride(stream) // shape.dtype.itemsize
        flat = torch.frombuffer(memory, dtype=shape.dtype)
        if part.unbroken and stride == rows_per_chunk * heads * dim:
            first = int(part.offset_of_row[0])
            return flat.view(-1, heads, dim)[first : first + len(part.offset_of_row)]
        staged = flat.as_strided(
            (len(part.chunks), rows_per_chunk, heads, dim), (stride, heads * dim, dim, 1)
        )
        return staged[part.chunk_of_row, part.offset_of_row]


class MemorySource:
    """A prefix whose KVs are in memory: `keys` [L, m, G, Dk] and `values` [L, m, G, Dv]."""

    def __init__(self, shape: KVShape, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        assert len(keys) == len(values) == shape.num_layers
        self.num_tokens = keys[0].shape[0]
        self.bytes_read = 0
        self._shape = shape
        self._keys = keys
        self._values = values

    def read(self, layer: int, wants: Sequence[Want]) -> list[Tensor]:
        """See `PrefixSource.read`."""
        return [self._rows(layer, want) for want in wants]

    def _rows(self, layer: int, want: Want) -> Tensor:
        whole = self._values[layer] if want.stream is Stream.VALUES else self._keys[layer]
        rows = whole if want.tokens is None else whole[want.tokens]
        return rows[:, list(self._shape.heads(want.stream))]


def _local_tokens(tokens: Tensor | None, first: int, span: SourceSpan) -> Tensor:
    """Tokens of the prefix that fall into a span, counted from the start of its segment."""
    if tokens is None:
        return torch.arange(span.start, span.stop)
    bounds = torch.tensor([first, first + len(span)])
    low, high = torch.searchsorted(tokens, bounds).tolist()
    return tokens[low:high] - first + span.start


def _plan_span(span: SourceSpan, stream: Stream, local: Tensor) -> _SpanRead:
    rows_per_chunk = span.segment.layout.chunk_tokens
    chunk_of_token = torch.div(local, rows_per_chunk, rounding_mode="floor")
    chunks, position = torch.unique_consecutive(chunk_of_token, return_inverse=True)
    offsets = local - chunk_of_token * rows_per_chunk
    unbroken = int(local[-1] - local[0]) + 1 == len(local)
    return _SpanRead(span, stream, chunks, position, offsets, unbroken)


def _staged_bytes(plan: list[_SpanRead]) -> int:
    return sum(part.staged_bytes for part in plan)


def _chunk_runs(layer: int, plan: list[_SpanRead], memory: memoryview) -> list[ChunkRun]:
    """Runs of neighbouring chunks, each with its part of the memory."""
    runs: list[ChunkRun] = []
    start = 0
    for part in plan:
        layout = part.span.segment.layout
        stride = layout.chunk_stride(part.stream)
        if stride:
            for first, stop, position in _neighbours(part.chunks):
                begin = start + position * stride
                end = begin + layout.run_bytes(part.stream, first, stop)
                runs.append(
                    ChunkRun(part.span.segment, layer, part.stream, first, stop, memory[begin:end])
                )
        start += part.staged_bytes
    return runs


def _neighbours(chunks: Tensor) -> list[tuple[int, int, int]]:
    """Ascending chunk numbers -> (first, stop, position of first) of each unbroken run."""
    breaks = torch.nonzero(chunks[1:] - chunks[:-1] != 1).flatten() + 1
    starts = [0, *breaks.tolist()]
    stops = [*starts[1:], len(chunks)]
    numbers = chunks.tolist()
    return [(numbers[a], numbers[b - 1] + 1, a) for a, b in zip(starts, stops, strict=True)]
