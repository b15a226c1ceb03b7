"""Reads keys and values as they were computed, from caches and SSD.

Stage: load. A layer of a segment has columns of rows, cut into chunks (`storage.layout`). What a
read wants of it are rows of some columns. The blocks that hold them are taken from where their
chunks are, one after another, and rows are found again in these bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.loops import areas
from impress_sglang.loops.types import Flags, Indices
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, Column, SegmentLayout
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.moves import LoadedChunks
from impress_sglang.tiers.placement import Access, Tier
from impress_sglang.transfer.buffers import BufferPool, LayerBuffer, Tenant
from impress_sglang.transfer.frames import take_frames
from impress_sglang.transfer.stored_source import ReadStats, StoredSource

_SSD, _HOST, _DEVICE = int(Tier.SSD), int(Tier.HOST), int(Tier.DEVICE)


@dataclasses.dataclass(frozen=True)
class ColumnChunks:
    """The chunks of a layer's columns, in the order of `SegmentLayout.chunk_index`.

    int64 [chunks]: `first` is the block of the layer where each begins, `count` its blocks, `rows`
    its rows, and `row_bytes` the bytes of a row.
    """

    first: Indices
    count: Indices
    rows: Indices
    row_bytes: Indices

    @functools.cached_property
    def chunk_of_block(self) -> Indices:
        """The chunk that each block of the layer belongs to."""
        return np.repeat(np.arange(len(self.count)), self.count)


# An entry takes at most 24 bytes per block of a layer: all together are no larger than one and a
# half layers of the longest segment.
@functools.lru_cache(maxsize=256)
def chunks_of_columns(layout: SegmentLayout) -> ColumnChunks:
    """Where the chunks of a layer's columns stand; the same in all layers."""
    shape, blocks = layout.shape, []
    for column in shape.columns:
        own = np.full(layout.num_chunks, layout.chunk_stride(column) // BLOCK_BYTES)
        own[-1] = layout.column_bytes(column) // BLOCK_BYTES - own[:-1].sum()
        blocks.append(own)
    count = np.concatenate(blocks)
    rows = np.full(layout.num_chunks, layout.chunk_tokens)
    rows[-1] = layout.chunk_rows(layout.num_chunks - 1)
    row_bytes = np.repeat([shape.row_bytes(own) for own in shape.columns], layout.num_chunks)
    return ColumnChunks(np.cumsum(count) - count, count, np.tile(rows, len(blocks)), row_bytes)


def column_pages(layout: SegmentLayout) -> npt.NDArray[np.uint16]:
    """Pages that each chunk of all layers takes in a cache; a page is a block."""
    return np.tile(chunks_of_columns(layout).count, layout.shape.num_layers).astype(np.uint16)


def most_column_pages(layout: SegmentLayout) -> int:
    """Pages of the largest chunk of any segment of the same shape."""
    return max(map(layout.chunk_stride, layout.shape.columns)) // BLOCK_BYTES


@dataclasses.dataclass(frozen=True)
class ColumnSpan:
    """The tokens [start, stop) of a segment whose first chunk of columns has the id `base`."""

    segment: OpenSegment
    start: int
    stop: int
    base: int
    _whole: dict[tuple[Column, ...], WantedRows] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return self.stop - self.start

    def whole(self, columns: tuple[Column, ...]) -> WantedRows:
        """All rows of the span in some columns, in the order of the file."""
        if columns not in self._whole:
            rows = dict.fromkeys(columns, np.arange(self.start, self.stop))
            self._whole[columns] = WantedRows(self.segment.layout, rows)
        return self._whole[columns]


class WantedRows:
    """Rows of some columns of a layer: the chunks and blocks that hold them, and where in these."""

    def __init__(self, layout: SegmentLayout, rows: Mapping[Column, Indices]) -> None:
        """`rows`: of each column, int64 [n], in any order."""
        chunks = chunks_of_columns(layout)
        self._layout = layout
        self._offsets: dict[Column, Indices] = {}
        self._places: dict[Column, Indices] = {}
        self.blocks: Flags = np.zeros(layout.columns_bytes // BLOCK_BYTES, np.bool_)
        """Which blocks of the layer hold wanted rows."""
        counts = np.zeros(len(chunks.count), np.int64)
        for column, own in rows.items():
            size = layout.shape.row_bytes(column)
            number, inside = np.divmod(own, layout.chunk_tokens)
            begin = layout.column_offset(0, column) - layout.layer_offset(0)
            offsets = begin + number * layout.chunk_stride(column) + inside * size
            self._offsets[column] = offsets
            for step in {*range(0, size, BLOCK_BYTES), size - 1}:
                self.blocks[(offsets + step) // BLOCK_BYTES] = True
            first, stop = column * layout.num_chunks, (column + 1) * layout.num_chunks
            counts[first:stop] += np.bincount(number, minlength=layout.num_chunks)
        self.chunks: Indices = np.flatnonzero(counts)
        """The chunks that hold wanted rows, ascending."""
        self.shares = counts[self.chunks] / chunks.rows[self.chunks]
        """float64, how much of each is wanted."""
        self.bytes = counts[self.chunks] * chunks.row_bytes[self.chunks]
        """int64, bytes of the wanted rows in each."""
        self.spared: Flags = ~self.blocks

    @functools.cached_property
    def taken(self) -> Flags:
        """Of all blocks of `chunks`, one after another, which are in `blocks`."""
        touched = np.zeros(self._layout.layer_chunks, np.bool_)
        touched[self.chunks] = True
        return self.blocks[touched[chunks_of_columns(self._layout).chunk_of_block]]

    def rows_in(self, blocks: Tensor, column: Column) -> Tensor:
        """The rows of a column [n, heads, D], from `self.blocks`: uint8 [blocks, BLOCK_BYTES]."""
        shape = self._layout.shape
        size, width = shape.row_bytes(column), shape.dtype.itemsize
        places, flat = self._places_of(column), blocks.view(-1).view(shape.dtype)
        if len(places) and (np.diff(places) == size).all():
            first = int(places[0]) // width
            rows = flat[first : first + len(places) * size // width]
        else:
            # Rows begin at multiples of this, also where one does not divide a block.
            unit = math.gcd(size, BLOCK_BYTES)
            index = places[:, None] // unit + np.arange(size // unit)
            units = flat.view(-1, unit // width)
            rows = units[torch.from_numpy(index.reshape(-1)).to(units.device, non_blocking=True)]
        return rows.view(len(places), len(shape.heads(column)), shape.head_dim(column))

    def _places_of(self, column: Column) -> Indices:
        """Where each row begins in the bytes of `blocks`, which stand one after another."""
        if column not in self._places:
            offsets = self._offsets[column]
            rank = np.cumsum(self.blocks) - 1
            self._places[column] = rank[offsets // BLOCK_BYTES] * BLOCK_BYTES + (
                offsets % BLOCK_BYTES
            )
        return self._places[column]


class ColumnSource(StoredSource):
    """Reads consecutive spans of one or more segments from their columns."""

    def __init__(
        self,
        spans: Sequence[ColumnSpan],
        reader: BlockReader,
        pool: BufferPool,
        cache: ChunkCache,
        ahead: Sequence[tuple[Column, ...]],
    ) -> None:
        """Begin with nothing read; all of the columns `ahead` are wanted, in this order."""
        assert spans
        firsts = itertools.accumulate((len(span) for span in spans[:-1]), initial=0)
        self.spans = tuple(zip(firsts, spans, strict=True))
        """Each with the number of its first token."""
        self.num_tokens = sum(map(len, spans))
        # Spans of one segment are read into one layer buffer, that of the first of them.
        segments = [span.segment for span in spans]
        self._buffer_of = [segments.index(segment) for segment in segments]
        layer_bytes = sum(
            pool.size_of(spans[number].segment.layout.columns_bytes)
            for number in set(self._buffer_of)
        )
        super().__init__(segments, layer_bytes, reader, ReadStats())
        self._pool = pool
        self._cache = cache
        self._ahead = ahead

    def read_ahead(self, waste_budget: float) -> None:
        """See `StoredSource.read_ahead`."""
        layer = self.next_ahead
        self.next_ahead += 1
        # In separate reads, because the first columns are asked for first.
        for columns in self._ahead:
            for number, (_, span) in enumerate(self.spans):
                chunks, own = chunks_of_columns(span.segment.layout), span.whole(columns)
                first = self._first_id(layer, number)
                tiers = self._cache.placement.tiers(first, len(chunks.first))
                wanted = areas.uncached_blocks(
                    own.chunks, chunks.first, chunks.count, tiers, own.spared
                )
                if len(wanted):
                    self._buffer(layer, number).read_ahead(wanted, self._reader)

    def _first_id(self, layer: int, number: int) -> int:
        span = self.spans[number][1]
        return span.base + layer * span.segment.layout.layer_chunks

    def _buffer(self, layer: int, number: int) -> LayerBuffer:
        """The buffer of a layer of the span with this number."""
        number = self._buffer_of[number]
        segment = self.spans[number][1].segment
        layout = segment.layout

        def make(tenant: Tenant) -> LayerBuffer:
            offset = layout.layer_offset(layer)
            return LayerBuffer(segment, offset, layout.columns_bytes, self._pool, tenant)

        return self._open_buffer(layer, number, make)

    def _take(
        self, layer: int, wanted: Mapping[int, WantedRows], *, chosen: bool = True
    ) -> list[Tensor]:
        """Take the blocks that rows of some spans are in, by the numbers of the spans.

        They are taken from where chunks stood before the read; then the chunks move. `chosen`: all
        of the rows are of tokens that the layer uses.

        Returns:
            uint8 [blocks, BLOCK_BYTES] for each, on the device of the cache; valid until any source
            is read from again.

        Raises:
            PrefixUnreadable: a block is missing, short or corrupt, or cannot be read now.
        """
        self._begin(layer)
        ids = [own.chunks + self._first_id(layer, number) for number, own in wanted.items()]
        shares = np.concatenate([own.shares for own in wanted.values()])
        access = self._cache.access(np.concatenate(ids), shares)
        parts, start = [], 0
        for (number, own), found in zip(wanted.items(), ids, strict=True):
            place = slice(start, start := start + len(found))
            parts.append(PartOfRead(number, own, found, place, access, self.spans[number][1]))
        try:
            self._fetch(layer, parts)
            blocks = [self._blocks(layer, part) for part in parts]
            self._settle(layer, parts, access)
        except BaseException:
            # The placement assumes bytes that were not copied.
            self._cache.abandon(access)
            raise
        self._count(parts, access, chosen=chosen)
        return blocks

    def _fetch(self, layer: int, parts: Sequence[PartOfRead]) -> None:
        """Bring all blocks that must come from SSD into their buffers."""
        gap, reading = self._reader.cost.gap_bytes, []
        for part in parts:
            if len(part.from_ssd):
                buffer = self._buffer(layer, part.number)
                # A read of the probe column is followed by one of the layer's rows.
                last = part.wanted.chunks[-1] >= part.layout.num_chunks
                self.stats.ssd_bytes += buffer.read(part.from_ssd, gap, self._reader, last=last)
                reading.append((buffer, part.from_ssd))
        began = time.perf_counter()
        for buffer, wanted in reading:
            buffer.wait(wanted)
        self.stats.wait_ms += (time.perf_counter() - began) * 1e3

    def _blocks(self, layer: int, part: PartOfRead) -> Tensor:
        memory = self._buffer(layer, part.number).memory if len(part.from_ssd) else None
        taken = part.wanted.taken
        return take_frames(self._cache, part.tiers[taken], part.frames[taken], memory)

    def _settle(self, layer: int, parts: Sequence[PartOfRead], access: Access) -> None:
        """Move chunks between tiers; those that were read to be cached come from the buffers."""
        loaded, memories = [], []
        for part in parts:
            if part.kept.any():
                memories.append(memory := self._buffer(layer, part.number).memory)
                first = chunks_of_columns(part.layout).first[part.wanted.chunks[part.kept]]
                flat = memory.vectors(torch.uint8, 1).view(-1)
                loaded.append(LoadedChunks(flat, part.ids[part.kept], first * BLOCK_BYTES))
        fence = self._cache.settle(access, loaded)
        if fence is not None:
            for memory in memories:
                memory.fence = fence

    def _count(self, parts: Sequence[PartOfRead], access: Access, *, chosen: bool) -> None:
        stats, chunks = self.stats, np.bincount(access.tiers, minlength=3).tolist()
        stats.ssd_chunks += chunks[_SSD]
        stats.host_chunks += chunks[_HOST]
        stats.device_chunks += chunks[_DEVICE]
        for part in parts:
            on_ssd, on_host, on_device = part.bytes_by_tier
            stats.ssd_needed_bytes += on_ssd
            stats.h2d_bytes += on_ssd + on_host
            if part.wanted.chunks[-1] >= part.layout.num_chunks:
                stats.selected_chunks += len(part.ids)
            if chosen:
                stats.important_bytes += on_ssd + on_host + on_device
                stats.important_device_bytes += on_device
        if len(access.moves):
            stats.h2d_bytes += int(access.moves.pages_moved()[:, _DEVICE].sum()) * BLOCK_BYTES


class PartOfRead:
    """What a read wants of a span, and where that is.

    `ids` int64 are the chunks, of which some will be cached (`kept`). For their blocks, one after
    another, `tiers` and `frames` say where each is; see `take_frames`. Blocks `from_ssd`,
    ascending, must come from there.
    """

    def __init__(
        self,
        number: int,
        wanted: WantedRows,
        ids: Indices,
        place: slice,
        access: Access,
        span: ColumnSpan,
    ) -> None:
        """`place`: of the chunks in the access."""
        self.number, self.wanted, self.ids = number, wanted, ids
        self.layout = span.segment.layout
        self.kept = access.kept[place]
        chunks, tiers = chunks_of_columns(self.layout), access.tiers[place]
        self.tiers, self.frames, self.from_ssd, _ = areas.find_blocks(
            wanted.chunks,
            chunks.first,
            chunks.count,
            tiers,
            self.kept,
            access.pages[place],
            wanted.spared,
        )
        self.bytes_by_tier = np.bincount(tiers, wanted.bytes, 3).astype(np.int64).tolist()


class ExactSource(ColumnSource):
    """Reads whole layers of segments whose rows are in the order of the tokens.

    Their shape has no probe heads: each KV head is a head group.
    """

    def __init__(
        self,
        spans: Sequence[ColumnSpan],
        reader: BlockReader,
        pool: BufferPool,
        cache: ChunkCache,
    ) -> None:
        """Begin with nothing read."""
        assert all(span.segment.mapping is None for span in spans)
        self._columns = tuple(spans[0].segment.layout.shape.columns[PROBE + 1 :])
        super().__init__(spans, reader, pool, cache, (self._columns,))

    def fill(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Copy a layer of all tokens into slots; see `SlotFiller.fill`."""
        wanted = {number: own.whole(self._columns) for number, (_, own) in enumerate(self.spans)}
        blocks = self._take(layer, wanted)
        with self.writing():
            for (first, span), own, found in zip(self.spans, wanted.values(), blocks, strict=True):
                places = slots[first : first + len(span)]
                for pool, columns in (
                    (keys, self._shape.key_columns),
                    (values, self._shape.value_columns),
                ):
                    for head, column in enumerate(columns):
                        pool[:, head].index_copy_(0, places, own.rows_in(found, column)[:, 0])
