"""Maps tokens to rows, chunks and blocks: the arithmetic of a read, vectorised, without any data.

Stage: load. Blocks are counted from the start of their layer, over all columns, so that what is
wanted of a layer is one mask, and consecutive blocks of it are consecutive in the file. Head groups
are handled together: the keys of all head groups have the same size and follow each other on disk,
and so do the values.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from impress_sglang import loops
from impress_sglang.importance.history import TokenHistory
from impress_sglang.loops.types import Flags, Floats, Indices, Int32s
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, SegmentLayout
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.transfer.expectation import BlockHistory

MappingRow = npt.NDArray[np.unsignedinteger[Any]]
NO_MAPPING = np.empty(0, np.uint16)
_NO_BLOCKS = np.empty(0, np.int32), np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True)
class ColumnGroup:
    """Columns of a layer that are read alike: the probe column, or all key or value columns.

    Sizes are in bytes; chunks and blocks of the group are numbered head group after head group.
    `start` and `first_chunk` are where the group begins in the layer.
    """

    head_groups: int
    heads: int  # of each column
    head_dim: int
    row_bytes: int
    rows: int  # of each column
    chunks: int  # of each column
    chunk_rows: int
    stride: int
    start: int
    column_bytes: int
    first_chunk: int

    @functools.cached_property
    def blocks(self) -> slice:
        """The blocks of the layer that belong to the group."""
        first = self.start // BLOCK_BYTES
        return slice(first, first + self.head_groups * self.column_bytes // BLOCK_BYTES)

    @functools.cached_property
    def unbroken(self) -> bool:
        """Whether rows follow each other without padding between chunks."""
        return self.stride == self.chunk_rows * self.row_bytes

    @functools.cached_property
    def chunk_of_block(self) -> Indices:
        """The chunk that each block of the group belongs to, both counted in the group."""
        own = np.arange(self.column_bytes // BLOCK_BYTES) // (self.stride // BLOCK_BYTES)
        return (np.arange(self.head_groups)[:, None] * self.chunks + own).reshape(-1)

    @functools.cached_property
    def rows_of_chunk(self) -> npt.NDArray[np.float64]:
        """How many rows each chunk has."""
        rows = np.full((self.head_groups, self.chunks), float(self.chunk_rows))
        rows[:, -1] = self.rows - (self.chunks - 1) * self.chunk_rows
        return rows.reshape(-1)

    def looks_like(self, other: ColumnGroup) -> bool:
        """Whether rows stand at the same distances in another group."""
        mine = (self.head_groups, self.row_bytes, self.rows, self.stride)
        return mine == (other.head_groups, other.row_bytes, other.rows, other.stride)

    def row_offsets(self, head_groups: Indices, rows: Indices) -> Indices:
        """Offsets of some rows from the start of the group, in bytes."""
        if self.unbroken:
            inside = rows * self.row_bytes
        else:
            chunks, offsets = np.divmod(rows, self.chunk_rows)
            inside = chunks * self.stride + offsets * self.row_bytes
        return inside if self.head_groups == 1 else inside + head_groups * self.column_bytes

    @functools.cached_property
    def rows_of_block(self) -> tuple[Int32s, Int32s]:
        """The first and the last row of which each block of a head group holds a part.

        Blocks of padding hold none: their last row is the row before their first.
        """
        rows = np.arange(self.rows)
        offsets = self.row_offsets(np.zeros_like(rows), rows)
        blocks = np.arange(self.column_bytes // BLOCK_BYTES) * BLOCK_BYTES
        first = np.searchsorted(offsets + self.row_bytes, blocks, side="right")
        last = np.searchsorted(offsets, blocks + BLOCK_BYTES) - 1
        return first.astype(np.int32), last.astype(np.int32)

    def blocks_of_rows(self, head_groups: Indices, rows: Indices) -> Flags:
        """Which blocks of the group hold some rows."""
        wanted = np.zeros(self.head_groups * self.column_bytes // BLOCK_BYTES, np.bool_)
        offsets = self.row_offsets(head_groups, rows)
        first, last = offsets // BLOCK_BYTES, (offsets + self.row_bytes - 1) // BLOCK_BYTES
        for step in range((self.row_bytes - 2) // BLOCK_BYTES + 2):
            wanted[np.minimum(first + step, last)] = True
        return wanted


@dataclasses.dataclass(frozen=True)
class LayerGeometry:
    """What is the same in all layers of a segment; groups without heads are None."""

    probe: ColumnGroup | None
    keys: ColumnGroup | None
    values: ColumnGroup
    num_blocks: int
    num_chunks: int
    chunk_of_block: Indices  # counted from the start of the layer

    @functools.cached_property
    def keys_like_values(self) -> bool:
        """Whether a key has the same place in its column as the value of the same token."""
        return self.keys is not None and self.keys.looks_like(self.values)


# An entry takes at most 24 bytes per block of a layer, so that all entries together are no larger
# than one and a half layers of the longest segment.
@functools.lru_cache(maxsize=256)
def geometry_of(layout: SegmentLayout) -> LayerGeometry:
    """Where the columns of a layer stand."""
    shape = layout.shape
    probe, keys, values = (
        _group(layout, columns)
        for columns in (range(PROBE, PROBE + 1), shape.key_columns, shape.value_columns)
    )
    assert values is not None
    present = [group for group in (probe, keys, values) if group is not None]
    return LayerGeometry(
        probe,
        keys,
        values,
        layout.columns_bytes // BLOCK_BYTES,
        layout.layer_chunks,
        np.concatenate([group.first_chunk + group.chunk_of_block for group in present]),
    )


def _group(layout: SegmentLayout, columns: range) -> ColumnGroup | None:
    shape, first = layout.shape, columns[0]
    if not shape.heads(first):
        return None
    return ColumnGroup(
        head_groups=len(columns),
        heads=len(shape.heads(first)),
        head_dim=shape.head_dim(first),
        row_bytes=shape.row_bytes(first),
        rows=layout.num_tokens,
        chunks=layout.num_chunks,
        chunk_rows=layout.chunk_tokens,
        stride=layout.chunk_stride(first),
        start=layout.column_offset(0, first) - layout.layer_offset(0),
        column_bytes=layout.column_bytes(first),
        first_chunk=layout.chunk_index(0, first, 0),
    )


@dataclasses.dataclass(frozen=True)
class SourceSpan:
    """The tokens [start, stop) of a segment whose first chunk has the id `base`.

    `history` is what is known of the segment's tokens, `blocks` of the blocks of this version.
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
        """Where the columns of a layer stand."""
        return geometry_of(self.segment.layout)

    def mapping(self, layer: int) -> MappingRow:
        """The row of each token, head group after head group; empty if rows are tokens."""
        if self.segment.mapping is None:
            return NO_MAPPING
        row: MappingRow = self.segment.mapping[layer].reshape(-1)
        return row

    @functools.cached_property
    def probe_chunks(self) -> tuple[Indices, Indices, Floats]:
        """Probe column chunks with tokens of the span; how many each has, and their row shares."""
        group, start, stop = self.geometry.probe, self.start, self.stop
        assert group is not None, "there is no probe column"
        chunks = np.arange(start // group.chunk_rows, (stop - 1) // group.chunk_rows + 1)
        counts = np.full(len(chunks), group.chunk_rows)
        counts[-1] -= (int(chunks[-1]) + 1) * group.chunk_rows - stop
        counts[0] -= start - int(chunks[0]) * group.chunk_rows
        return chunks, counts, counts / group.rows_of_chunk[chunks]

    @functools.cached_property
    def probe_blocks(self) -> Flags:
        """Blocks of a layer's probe column that hold tokens of the span; not to be changed."""
        blocks = np.zeros(self.geometry.num_blocks, np.bool_)
        if (group := self.geometry.probe) is not None:
            rows = np.arange(self.start, self.stop)
            blocks[group.blocks] = group.blocks_of_rows(np.zeros_like(rows), rows)
        return blocks

    @functools.cached_property
    def kv_blocks(self) -> Flags:
        """Blocks of a layer's keys and values that may hold tokens of the span; not to be changed.

        Rows are permuted only inside the nodes of the tree, and spans are made of nodes.
        """
        blocks = np.zeros(self.geometry.num_blocks, np.bool_)
        rows = np.arange(self.start, self.stop)
        for group in (self.geometry.keys, self.geometry.values):
            if group is not None:
                head_groups = np.repeat(np.arange(group.head_groups), len(rows))
                blocks[group.blocks] = group.blocks_of_rows(
                    head_groups, np.tile(rows, group.head_groups)
                )
        return blocks


@functools.lru_cache(maxsize=64)
def head_groups_of_tokens(num_head_groups: int, k: int) -> Indices:
    """The head group of each of k tokens per head group, token after token; not to be changed."""
    return np.tile(np.arange(num_head_groups), k)


@dataclasses.dataclass(slots=True)
class RowPlan:
    """The rows of a span that a read wants, the same for keys and for values.

    `head_groups` and `rows` int64 [n] say where each is: its head group, and its row in the columns
    of that. `positions` int64 [n] is its place in the read, None if the read has no other rows.
    `chunks` int64 [c] are those that hold the rows, ascending (head group * chunks of a column +
    chunk), `counts` how many rows of each are wanted, `shares` float64 what share of it that is.
    `value_blocks` and `key_blocks` say which blocks of the groups hold wanted rows; None where
    there are no keys. If all tokens of the span are wanted and rows are tokens, `start` is the
    first one.
    """

    positions: Indices | None
    head_groups: Indices
    rows: Indices
    chunks: Indices
    counts: Indices
    shares: Floats
    value_blocks: Flags
    key_blocks: Flags | None
    start: int | None = None


def plan_rows(span: SourceSpan, layer: int, tokens: Indices, first: int, *, alone: bool) -> RowPlan:
    """Find where a span has those of the given tokens that are its own, in its keys and values.

    Args:
        span: the part of a segment that a request uses.
        layer: from 0.
        tokens: int64 [head groups, k], counted from the start of the prefix.
        first: first token of the span, counted likewise.
        alone: whether no other span has any of the tokens.
    """
    geometry, stop = span.geometry, first + len(span)
    values, keys = geometry.values, geometry.keys
    # Where keys have the same places as values, their blocks are the same.
    other = None if geometry.keys_like_values else keys
    positions, head_groups, rows, by_chunk, value_blocks, key_blocks = loops.locate_rows(
        tokens,
        first,
        stop,
        span.start,
        span.mapping(layer),
        span.segment.layout.num_tokens,
        values.chunk_rows,
        *values.rows_of_block,
        *(_NO_BLOCKS if other is None else other.rows_of_block),
        not alone,
    )
    chunks, counts, shares = loops.touched_chunks(by_chunk, values.rows_of_chunk)
    return RowPlan(
        None if alone else positions,
        head_groups_of_tokens(*tokens.shape) if alone else head_groups,
        rows,
        chunks,
        counts,
        shares,
        value_blocks,
        value_blocks if geometry.keys_like_values else None if other is None else key_blocks,
    )
