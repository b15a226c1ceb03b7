"""What of a layer of a segment is wanted: chunks of columns or of codes, and blocks in them.

Stage: load. A layer has columns of rows, cut into chunks, and pages of groups of codes
(`storage.layout`): a page is a chunk, too. Both kinds are read, cached and counted alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.codes.pages import Pages
from impress_sglang.loops.types import Flags, Floats, Indices
from impress_sglang.storage.layout import BLOCK_BYTES, Column, SegmentLayout


@dataclasses.dataclass(frozen=True)
class LayerChunks:
    """The chunks of one kind of a layer, in the order on disk.

    int64 [chunks]: `first` is the block where each begins, counted from that of the first one,
    `count` its blocks, `rows` its rows (groups, in codes), and `row_bytes` the bytes of a row.
    """

    first: Indices
    count: Indices
    rows: Indices
    row_bytes: Indices

    @functools.cached_property
    def chunk_of_block(self) -> Indices:
        """The chunk that each block belongs to."""
        return np.repeat(np.arange(len(self.count)), self.count)


# An entry takes at most 32 bytes per block of a layer: all together are no larger than two layers
# of the longest segment.
@functools.lru_cache(maxsize=256)
def column_chunks(layout: SegmentLayout) -> LayerChunks:
    """The chunks of a layer's columns, as `SegmentLayout.chunk_index`; the same in all layers."""
    shape, blocks = layout.shape, []
    for column in shape.columns:
        own = np.full(layout.num_chunks, layout.chunk_stride(column) // BLOCK_BYTES)
        own[-1] = layout.column_bytes(column) // BLOCK_BYTES - own[:-1].sum()
        blocks.append(own)
    count = np.concatenate(blocks)
    rows = np.full(layout.num_chunks, layout.chunk_tokens)
    rows[-1] = layout.chunk_rows(layout.num_chunks - 1)
    row_bytes = np.repeat([shape.row_bytes(own) for own in shape.columns], layout.num_chunks)
    return LayerChunks(np.cumsum(count) - count, count, np.tile(rows, len(blocks)), row_bytes)


# With a basis each layer of a segment has pages of its own.
@functools.lru_cache(maxsize=1024)
def code_chunks(pages: Pages) -> LayerChunks:
    """The chunks of a layer's codes, which are its pages."""
    count = np.full(pages.num_pages, pages.page_bytes // BLOCK_BYTES)
    count[-1] = pages.layer_bytes // BLOCK_BYTES - count[:-1].sum()
    rows = np.full(len(count), pages.page_groups)
    rows[-1] = pages.num_groups - rows[:-1].sum()
    return LayerChunks(
        np.cumsum(count) - count, count, rows, np.full(len(count), pages.group_bytes)
    )


def chunks_of(layout: SegmentLayout, layer: int, *, codes: bool) -> LayerChunks:
    """The chunks of one kind of a layer."""
    return code_chunks(layout.codes[layer]) if codes else column_chunks(layout)


@functools.lru_cache(maxsize=256)
def chunk_pages(layout: SegmentLayout, *, codes: bool) -> npt.NDArray[np.uint16]:
    """Pages that each chunk of one kind, of all layers, takes in a cache; a page is a block."""
    layers = range(layout.shape.num_layers)
    counts = [chunks_of(layout, layer, codes=codes).count for layer in layers]
    return np.concatenate(counts).astype(np.uint16)


def most_pages(layout: SegmentLayout, *, codes: bool) -> int:
    """Pages of the largest chunk of any segment of the same shape; at least 1."""
    sizes = [own.page_bytes for own in layout.codes]
    if not codes:
        sizes = [layout.chunk_stride(column) for column in layout.shape.columns]
    return max(max(sizes, default=0) // BLOCK_BYTES, 1)


class Wanted:
    """Chunks of a layer that are wanted, ascending, and which of their blocks."""

    def __init__(
        self, layer: LayerChunks, chunks: Indices, shares: Floats, num_bytes: Indices, blocks: Flags
    ) -> None:
        """`layer` has all chunks; `blocks` bool [blocks of the layer] are those that are wanted."""
        self.layer = layer
        self.chunks = chunks
        self.shares = shares
        """float64, how much of each is wanted."""
        self.bytes = num_bytes
        """int64, how many bytes of each are wanted."""
        self.blocks = blocks
        self.spared: Flags = ~blocks
        self.taken: Flags | None = None
        """Of all blocks of `chunks`, one after another, which are handed out; None: all."""


@functools.lru_cache(maxsize=1024)
def wanted_groups(pages: Pages, start: int, stop: int) -> Wanted:
    """What has the codes of the tokens [start, stop)."""
    chunks = code_chunks(pages)
    groups = range(start // pages.group_tokens, -(-stop // pages.group_tokens))
    numbers = np.arange(groups[0] // pages.page_groups, groups[-1] // pages.page_groups + 1)
    blocks = np.zeros(pages.layer_bytes // BLOCK_BYTES, np.bool_)
    last = pages.group_offset(groups[-1]) + pages.group_bytes
    blocks[pages.group_offset(groups[0]) // BLOCK_BYTES : -(-last // BLOCK_BYTES)] = True
    num_bytes = np.add.reduceat(blocks.astype(np.int64), chunks.first)[numbers] * BLOCK_BYTES
    return Wanted(chunks, numbers, np.ones(len(numbers)), num_bytes, blocks)


class WantedRows(Wanted):
    """Rows of some columns of a layer."""

    def __init__(self, layout: SegmentLayout, rows: Mapping[Column, Indices]) -> None:
        """`rows`: of each column, int64 [n], in any order."""
        chunks = column_chunks(layout)
        self._layout = layout
        self._offsets: dict[Column, Indices] = {}
        self._places: dict[Column, tuple[int, slice | Tensor, tuple[int, int, int]]] = {}
        blocks: Flags = np.zeros(layout.columns_bytes // BLOCK_BYTES, np.bool_)
        counts = np.zeros(len(chunks.count), np.int64)
        for column, own in rows.items():
            size = layout.shape.row_bytes(column)
            number, inside = np.divmod(own, layout.chunk_tokens)
            begin = layout.column_offset(0, column) - layout.layer_offset(0)
            offsets = begin + number * layout.chunk_stride(column) + inside * size
            self._offsets[column] = offsets
            for step in {*range(0, size, BLOCK_BYTES), size - 1}:
                blocks[(offsets + step) // BLOCK_BYTES] = True
            first, stop = column * layout.num_chunks, (column + 1) * layout.num_chunks
            counts[first:stop] += np.bincount(number, minlength=layout.num_chunks)
        touched = counts > 0
        numbers = np.flatnonzero(touched)
        counts = counts[numbers]
        super().__init__(
            chunks,
            numbers,
            counts / chunks.rows[numbers],
            counts * chunks.row_bytes[numbers],
            blocks,
        )
        self.taken = blocks[touched[chunks.chunk_of_block]]

    def rows_in(self, blocks: Tensor, column: Column) -> Tensor:
        """The rows of a column [n, heads, D], from `self.blocks`: uint8 [blocks, BLOCK_BYTES]."""
        unit, places, shape = self._place_of(column)
        units = blocks.view(-1).view(self._layout.shape.dtype).view(-1, unit)
        if isinstance(places, Tensor):
            places = places.to(units.device, non_blocking=True)
        return units[places].view(shape)

    def _place_of(self, column: Column) -> tuple[int, slice | Tensor, tuple[int, int, int]]:
        """Elements of a unit, which units of the wanted blocks are the rows, and their shape."""
        if column not in self._places:
            shape, offsets = self._layout.shape, self._offsets[column]
            # Rows begin at multiples of this, also where one does not divide a block.
            unit = math.gcd(shape.row_bytes(column), BLOCK_BYTES)
            count = shape.row_bytes(column) // unit
            rank = np.cumsum(self.blocks) - 1
            first = (rank[offsets // BLOCK_BYTES] * BLOCK_BYTES + offsets % BLOCK_BYTES) // unit
            places: slice | Tensor
            if len(first) and (np.diff(first) == count).all():
                places = slice(int(first[0]), int(first[0]) + len(first) * count)
            else:
                places = torch.from_numpy((first[:, None] + np.arange(count)).reshape(-1))
            rows = len(first), len(shape.heads(column)), shape.head_dim(column)
            self._places[column] = unit // shape.dtype.itemsize, places, rows
        return self._places[column]
