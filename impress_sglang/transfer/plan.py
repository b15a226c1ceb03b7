"""From tokens to chunks, rows and blocks: the arithmetic of a read, vectorised, without any data.

Stage: load. Blocks are counted from the start of their layer, over all streams, so that what is
wanted of a layer is one mask, whose runs are runs of the file. Lanes are handled together: keys of
all lanes have the same size and follow each other on disk, and so have and do values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from impress_sglang.importance.history import TokenHistory
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, SegmentLayout
from impress_sglang.storage.reader import OpenSegment
from impress_sglang.transfer.expectation import BlockHistory

_I = TypeVar("_I", bound=np.integer[Any])
Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class StreamGroup:
    """Streams of a layer that are read alike: the probe stream, or keys or values of all lanes.

    Sizes in bytes; chunks and blocks of the group go lane after lane. `start` and `first_chunk` are
    where it begins in the layer.
    """

    lanes: int
    heads: int  # of each stream
    head_dim: int
    row_bytes: int
    rows: int  # of each stream
    chunks: int  # of each stream
    chunk_rows: int
    stride: int
    start: int
    stream_bytes: int
    first_chunk: int

    @functools.cached_property
    def blocks(self) -> slice:
        """Blocks of the layer that belong to the group."""
        first = self.start // BLOCK_BYTES
        return slice(first, first + self.lanes * self.stream_bytes // BLOCK_BYTES)

    @functools.cached_property
    def unbroken(self) -> bool:
        """Whether rows follow each other without padding between chunks."""
        return self.stride == self.chunk_rows * self.row_bytes

    @functools.cached_property
    def chunk_of_block(self) -> Indices:
        """The chunk of the group that each of its blocks belongs to."""
        own = np.arange(self.stream_bytes // BLOCK_BYTES) // (self.stride // BLOCK_BYTES)
        return (np.arange(self.lanes)[:, None] * self.chunks + own).reshape(-1)

    @functools.cached_property
    def rows_of_chunk(self) -> npt.NDArray[np.float64]:
        """Rows of each chunk."""
        rows = np.full((self.lanes, self.chunks), float(self.chunk_rows))
        rows[:, -1] = self.rows - (self.chunks - 1) * self.chunk_rows
        return rows.reshape(-1)

    def looks_like(self, other: StreamGroup) -> bool:
        """Whether rows stand at the same distances in another group."""
        mine = (self.lanes, self.row_bytes, self.rows, self.stride)
        return mine == (other.lanes, other.row_bytes, other.rows, other.stride)

    def row_offsets(self, lanes: Indices, rows: Indices) -> Indices:
        """Bytes from the start of the group to some rows."""
        if self.unbroken:
            inside = rows * self.row_bytes
        else:
            chunks, offsets = np.divmod(rows, self.chunk_rows)
            inside = chunks * self.stride + offsets * self.row_bytes
        return inside if self.lanes == 1 else inside + lanes * self.stream_bytes

    def blocks_of_rows(self, lanes: Indices, rows: Indices) -> Flags:
        """Which blocks of the group hold some rows."""
        wanted = np.zeros(len(self.chunk_of_block), np.bool_)
        offsets = self.row_offsets(lanes, rows)
        if self.unbroken and BLOCK_BYTES % self.row_bytes == 0:
            wanted[divided(offsets, BLOCK_BYTES)] = True
            return wanted
        first, last = offsets // BLOCK_BYTES, (offsets + self.row_bytes - 1) // BLOCK_BYTES
        for step in range((self.row_bytes - 2) // BLOCK_BYTES + 2):
            wanted[np.minimum(first + step, last)] = True
        return wanted


@dataclasses.dataclass(frozen=True)
class LayerGeometry:
    """What is the same for all layers of a segment; groups without heads are None."""

    probe: StreamGroup | None
    keys: StreamGroup | None
    values: StreamGroup
    num_blocks: int
    num_chunks: int
    chunk_of_block: Indices  # counted from the start of the layer


@functools.lru_cache(maxsize=4096)
def geometry_of(layout: SegmentLayout) -> LayerGeometry:
    """Where the streams of a layer stand."""
    shape = layout.shape
    probe, keys, values = (
        _group(layout, streams)
        for streams in (range(PROBE, PROBE + 1), shape.key_streams, shape.value_streams)
    )
    assert values is not None
    present = [group for group in (probe, keys, values) if group is not None]
    return LayerGeometry(
        probe,
        keys,
        values,
        layout.layer_bytes // BLOCK_BYTES,
        layout.layer_chunks,
        np.concatenate([group.first_chunk + group.chunk_of_block for group in present]),
    )


def _group(layout: SegmentLayout, streams: range) -> StreamGroup | None:
    shape, first = layout.shape, streams[0]
    if not shape.heads(first):
        return None
    return StreamGroup(
        lanes=len(streams),
        heads=len(shape.heads(first)),
        head_dim=shape.head_dim(first),
        row_bytes=shape.row_bytes(first),
        rows=layout.stream_rows(first),
        chunks=layout.stream_chunks(first),
        chunk_rows=layout.chunk_tokens,
        stride=layout.chunk_stride(first),
        start=layout.stream_offset(0, first) - layout.layer_offset(0),
        stream_bytes=layout.stream_bytes(first),
        first_chunk=layout.chunk_index(0, first, 0),
    )


@dataclasses.dataclass(frozen=True)
class SourceSpan:
    """The tokens [start, stop) of a segment whose first chunk has the id `base`.

    `history` is what is known of its tokens, `blocks` of the blocks of this version of the file.
    """

    segment: OpenSegment
    start: int
    stop: int
    base: int
    history: TokenHistory
    blocks: BlockHistory

    def __len__(self) -> int:
        return self.stop - self.start

    @functools.cached_property
    def geometry(self) -> LayerGeometry:
        """Where the streams of a layer stand."""
        return geometry_of(self.segment.layout)

    @functools.cached_property
    def probe_rows(self) -> range:
        """Rows of the probe stream that have the span's tokens; those of a sketch hold several."""
        per_row = self.segment.layout.shape.tokens_per_row(PROBE)
        return range(self.start // per_row, -(-self.stop // per_row))

    @functools.cached_property
    def probe_chunks(self) -> tuple[Indices, Indices]:
        """Chunks that hold `probe_rows`, ascending, and how many of their rows."""
        group, rows = self.geometry.probe, self.probe_rows
        assert group is not None, "there is no probe stream"
        chunks = np.arange(rows[0] // group.chunk_rows, rows[-1] // group.chunk_rows + 1)
        counts = np.full(len(chunks), group.chunk_rows)
        counts[-1] -= (int(chunks[-1]) + 1) * group.chunk_rows - rows.stop
        counts[0] -= rows.start - int(chunks[0]) * group.chunk_rows
        return chunks, counts

    @functools.cached_property
    def probe_blocks(self) -> Flags:
        """Blocks of a layer that hold `probe_rows`; not to be changed."""
        blocks = np.zeros(self.geometry.num_blocks, np.bool_)
        if (group := self.geometry.probe) is not None:
            rows = np.asarray(self.probe_rows)
            blocks[group.blocks] = group.blocks_of_rows(np.zeros_like(rows), rows)
        return blocks

    @functools.cached_property
    def kv_blocks(self) -> Flags:
        """Blocks of a layer's keys and values that may hold the span's tokens; not to be changed.

        Rows are permuted inside the nodes of the tree, and spans are made of these.
        """
        blocks = np.zeros(self.geometry.num_blocks, np.bool_)
        rows = np.arange(self.start, self.stop)
        for group in (self.geometry.keys, self.geometry.values):
            if group is not None:
                lanes = np.repeat(np.arange(group.lanes), len(rows))
                blocks[group.blocks] = group.blocks_of_rows(lanes, np.tile(rows, group.lanes))
        return blocks


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Rows of a span that a read wants, the same of keys and of values.

    `lanes` int64 [n] and `stored` (some integer type) [n] say where each stands: its row in the
    streams of its lane. `positions` int64 [n] is its place in the read, None if the read has no
    other rows. `counts` [lanes * chunks of a stream] are the rows wanted of each chunk, `blocks`
    [blocks of the group] says which blocks of the values hold wanted rows.
    """

    span: SourceSpan
    positions: Indices | None
    lanes: Indices
    stored: npt.NDArray[np.integer[Any]]
    counts: Indices
    blocks: Flags

    @functools.cached_property
    def rows(self) -> Indices:
        """`stored` as int64."""
        return self.stored.astype(np.int64)

    @functools.cached_property
    def chunks(self) -> Indices:
        """[n] lane * chunks of a stream + chunk, of each row."""
        group = self.span.geometry.values
        return divided(self.rows, group.chunk_rows) + self.lanes * group.chunks


def plan_rows(
    span: SourceSpan,
    layer: int,
    lanes: Indices,
    tokens: Indices,
    positions: Indices | None,
) -> RowPlan:
    """Where tokens of a segment stand in the keys and in the values.

    Args:
        span: the part of the segment that a request uses.
        layer: from 0.
        lanes: int64 [n], of each row.
        tokens: int64 [n], counted from the start of the segment.
        positions: see `RowPlan`.
    """
    segment, group = span.segment, span.geometry.values
    stored: npt.NDArray[np.integer[Any]] = tokens
    if segment.mapping is not None:
        flat = segment.mapping[layer].reshape(-1)
        stored = flat.take(lanes * segment.layout.num_tokens + tokens)
    if not (group.unbroken and BLOCK_BYTES % group.row_bytes == 0):
        rows = stored.astype(np.int64)
        chunks = divided(rows, group.chunk_rows) + lanes * group.chunks
        counts = np.bincount(chunks, minlength=group.lanes * group.chunks)
        blocks = group.blocks_of_rows(lanes, rows)
        return RowPlan(span, positions, lanes, stored, counts, blocks)
    # One pass for both: rows are counted by block, as if the last chunks were whole ones.
    per_chunk = group.stride // BLOCK_BYTES
    own = divided(stored, BLOCK_BYTES // group.row_bytes) + lanes * (group.chunks * per_chunk)
    by_block = np.bincount(own, minlength=group.lanes * group.chunks * per_chunk)
    counts = by_block.reshape(-1, per_chunk).sum(1)
    present = by_block.reshape(group.lanes, -1)[:, : group.stream_bytes // BLOCK_BYTES] > 0
    return RowPlan(span, positions, lanes, stored, counts, present.reshape(-1))


def chances_by_tokens(
    span: SourceSpan, layer: int, chances: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Chance of each block of a layer to be wanted, if each token of a span is, independently.

    Args:
        span: whose tokens these are.
        layer: from 0.
        chances: float64 [tokens], of any lane to want the token.

    Returns:
        float64 [blocks of the layer], 0 for blocks of the probe stream.
    """
    geometry = span.geometry
    unwanted = np.log1p(-np.minimum(chances, 0.999))
    result = np.zeros(geometry.num_blocks)
    for group in (geometry.keys, geometry.values):
        if group is None:
            continue
        lanes = np.repeat(np.arange(group.lanes), len(span))
        tokens = np.tile(np.arange(span.start, span.stop), group.lanes)
        plan = plan_rows(span, layer, lanes, tokens, None)
        blocks = divided(group.row_offsets(plan.lanes, plan.rows), BLOCK_BYTES)
        weights = np.tile(unwanted, group.lanes)
        sums = np.bincount(blocks, weights, minlength=len(group.chunk_of_block))
        result[group.blocks] = -np.expm1(sums)
    return result


def divided(values: npt.NDArray[_I], divisor: int) -> npt.NDArray[_I]:
    """`values` // `divisor`, of which a shift is several times faster."""
    if divisor & (divisor - 1):
        return values // divisor
    shifted: npt.NDArray[_I] = np.right_shift(values, divisor.bit_length() - 1)
    return shifted


def runs_of(wanted: Flags, gap_bytes: int) -> tuple[Indices, Indices]:
    """Starts and stops (in blocks) of runs that cover a mask.

    Runs at most `gap_bytes` apart are joined: the gap costs less to read than to skip.
    """
    blocks = np.flatnonzero(wanted)
    if not len(blocks):
        return blocks, blocks
    breaks = np.flatnonzero(np.diff(blocks) > 1 + gap_bytes // BLOCK_BYTES)
    starts = blocks[np.concatenate([[0], breaks + 1])]
    stops = blocks[np.concatenate([breaks, [len(blocks) - 1]])] + 1
    return starts, stops
