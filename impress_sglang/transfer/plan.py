"""From tokens to chunks, rows and blocks: the arithmetic of a read, vectorised, without any data.

Stage: load. A `RowPlan` says where the wanted tokens of a span stand in the chunks of a stream; it
is the same for the keys and the values of a lane. `block_runs` turns the chunks that must come from
SSD into runs of blocks.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from impress_sglang.importance.history import TokenHistory
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, SegmentLayout, Stream
from impress_sglang.storage.reader import OpenSegment

Indices = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class SourceSpan:
    """The tokens [start, stop) of a segment whose first chunk has the id `base`."""

    segment: OpenSegment
    start: int
    stop: int
    base: int
    history: TokenHistory

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlan:
    """Chunks of a stream of a span that hold the wanted rows, and where in them."""

    span: SourceSpan
    chunks: Indices  # ascending, distinct
    counts: Indices  # wanted rows of each of them
    chunk_of_row: Indices  # position in `chunks`
    offset_of_row: Indices  # row inside its chunk
    stream_rows: int  # of the whole segment
    unbroken: bool  # rows follow each other on disk without a gap

    @property
    def num_rows(self) -> int:
        """Wanted rows."""
        return len(self.chunk_of_row)

    def chunk_ids(self, layer: int, stream: Stream) -> Indices:
        """Ids of the chunks in a stream."""
        first = self.span.segment.layout.chunk_index(layer, stream, 0)
        return self.span.base + first + self.chunks

    def shares(self) -> npt.NDArray[np.float64]:
        """Share of each chunk's rows that is wanted."""
        layout = self.span.segment.layout
        rows = np.minimum(layout.chunk_tokens, self.stream_rows - self.chunks * layout.chunk_tokens)
        return self.counts / rows


def plan_probe(span: SourceSpan) -> RowPlan:
    """Where the probe stream has the tokens of a span: rows of a sketch may hold a few more."""
    per_row = span.segment.layout.shape.tokens_per_row(PROBE)
    rows = np.arange(span.start // per_row, -(-span.stop // per_row))
    return _row_plan(span, PROBE, rows, unbroken=True)


def plan_rows(span: SourceSpan, layer: int, lane: int, tokens: Indices) -> RowPlan:
    """Where tokens of a segment stand in the keys and in the values of a lane.

    Args:
        span: the part of the segment that a request uses.
        layer: from 0.
        lane: of the layer.
        tokens: ascending, at least one, counted from the start of the segment.
    """
    segment = span.segment
    stream = segment.layout.shape.key_streams[lane]
    if segment.mapping is not None:
        rows = segment.mapping[layer, lane][tokens].astype(np.int64)
        return _row_plan(span, stream, rows, unbroken=False)
    return _row_plan(span, stream, tokens, unbroken=int(tokens[-1] - tokens[0]) + 1 == len(tokens))


def _row_plan(span: SourceSpan, stream: Stream, rows: Indices, *, unbroken: bool) -> RowPlan:
    layout = span.segment.layout
    chunk_of_row, offsets = np.divmod(rows, layout.chunk_tokens)
    counts = np.bincount(chunk_of_row, minlength=layout.stream_chunks(stream))
    chunks = np.flatnonzero(counts)
    position = np.empty(len(counts), np.int64)
    position[chunks] = np.arange(len(chunks))
    return RowPlan(
        span,
        chunks,
        counts[chunks],
        position[chunk_of_row],
        offsets,
        layout.stream_rows(stream),
        unbroken,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class StagedRun:
    """Blocks to read: `offset` bytes into the file, [start, stop) bytes of the staging area."""

    offset: int
    start: int
    stop: int


def block_runs(
    layout: SegmentLayout,
    layer: int,
    stream: Stream,
    chunks: Indices,
    wanted: npt.NDArray[np.bool_],
    gap_bytes: int,
) -> list[StagedRun]:
    """Runs of blocks that cover what is wanted of some chunks.

    The chunks are staged one after another, each in `chunk_stride` bytes. Runs that are at most
    `gap_bytes` apart on disk are read as one, where they are neighbours in the staging area as
    well.

    Args:
        layout: of the segment.
        layer: from 0.
        stream: of the chunks.
        chunks: ascending, distinct.
        wanted: bool [chunks, blocks of a chunk].
        gap_bytes: gap that is not worth skipping.
    """
    blocks_per_chunk = wanted.shape[1]
    staged = np.flatnonzero(wanted.reshape(-1))
    if not len(staged):
        return []
    on_disk = chunks[staged // blocks_per_chunk] * blocks_per_chunk + staged % blocks_per_chunk
    steps = np.diff(staged)
    breaks = (steps > 1 + gap_bytes // BLOCK_BYTES) | (steps != np.diff(on_disk))
    firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    lasts = np.concatenate([firsts[1:] - 1, [len(staged) - 1]])
    base = layout.stream_offset(layer, stream)
    return [
        StagedRun(base + offset * BLOCK_BYTES, start * BLOCK_BYTES, stop * BLOCK_BYTES)
        for offset, start, stop in zip(
            on_disk[firsts].tolist(),
            staged[firsts].tolist(),
            (staged[lasts] + 1).tolist(),
            strict=True,
        )
    ]


def wanted_blocks(
    layout: SegmentLayout,
    stream: Stream,
    chunks: Indices,
    whole: npt.NDArray[np.bool_],
    chunk_of_row: Indices,
    offset_of_row: Indices,
) -> npt.NDArray[np.bool_]:
    """Which blocks of some chunks hold wanted rows; all of them where `whole`.

    Args:
        layout: of the segment.
        stream: of the chunks.
        chunks: their numbers.
        whole: bool per chunk.
        chunk_of_row: position in `chunks` of each wanted row.
        offset_of_row: of the row in its chunk.

    Returns:
        bool [chunks, blocks of a chunk].
    """
    blocks = layout.chunk_stride(stream) // BLOCK_BYTES
    row_bytes = layout.shape.row_bytes(stream)
    wanted = np.zeros((len(chunks), blocks), np.bool_)
    if not whole.all():
        first = offset_of_row * row_bytes // BLOCK_BYTES
        last = ((offset_of_row + 1) * row_bytes - 1) // BLOCK_BYTES
        for step in range((row_bytes - 2) // BLOCK_BYTES + 2):
            wanted[chunk_of_row, np.minimum(first + step, last)] = True
    wanted[whole] = True
    last_chunk = layout.stream_chunks(stream) - 1
    if chunks[-1] == last_chunk:
        tail = layout.run_bytes(stream, last_chunk, last_chunk + 1) // BLOCK_BYTES
        wanted[-1, tail:] = False
    return wanted
