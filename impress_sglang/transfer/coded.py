"""Reads a stored prefix in codes: its base, and planes unit by unit, from caches and SSD.

Stage: load. Bytes come as they stand on disk; `transfer.precise` says which, and puts them into
slots. A base is always wanted whole, so it is read ahead; which planes, only the request decides.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops import areas
from impress_sglang.loops.types import Flags, Indices, Uint8s
from impress_sglang.precision.floors import Floors
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.moves import LoadedChunks
from impress_sglang.tiers.placement import Access, Tier
from impress_sglang.timeline import COPY, NO_TIMELINE, PLAN, PROBE_READ, SSD_READ, Timeline
from impress_sglang.transfer.buffers import BufferPool, LayerBuffer, PooledMemory, Tenant
from impress_sglang.transfer.coded_span import CodedSpan
from impress_sglang.transfer.frames import FrameTaker, make_taker
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.stored_source import StoredSource

_SSD, _HOST, _DEVICE = int(Tier.SSD), int(Tier.HOST), int(Tier.DEVICE)


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    """What every request reads of a layer of a span.

    `groups` uint8 [groups, group_bytes]. For units that are read with them, else None: `raised`
    int64 [n, 3] on the CPU (plane, head and unit), and their bytes `planes` uint8 [n, unit_stride].
    """

    groups: Tensor
    raised: Tensor | None = None
    planes: Tensor | None = None


class ResidentRange(Protocol):
    """The tokens [start, stop) of a segment that are, or will be, in slots."""

    segment_id: str
    start: int
    stop: int
    layers_loaded: int


class CodedSource(StoredSource):
    """Reads consecutive spans of one or more segments from their codes."""

    def __init__(
        self,
        spans: Sequence[CodedSpan],
        reader: BlockReader,
        pool: BufferPool,
        cache: ChunkCache,
        *,
        in_slots: Sequence[bool] | None = None,
        timeline: Timeline = NO_TIMELINE,
        taker: FrameTaker | None = None,
    ) -> None:
        """Begin with nothing read.

        Args:
            spans: one or more.
            reader: reads blocks.
            pool: gives the layer buffers that blocks are read into.
            cache: the cache of codes.
            in_slots: for each span, whether its base is in slots; None: no span's is.
            timeline: the timeline of the request that opens the source.
            taker: None for the one that fits the device.
        """
        assert spans
        self._in_slots = tuple(in_slots or [False] * len(spans))
        self.spans = tuple(spans)
        self.num_tokens = sum(map(len, spans))
        # Spans of one segment are read into one layer buffer, that of the first of them.
        segments = [span.segment for span in spans]
        self._buffer_of = [segments.index(segment) for segment in segments]
        own_buffers = (spans[number] for number in set(self._buffer_of))
        layer_bytes = sum(pool.size_of(span.layout.layer_bytes) for span in own_buffers)
        super().__init__(segments, layer_bytes, reader, ReadStats(), timeline)
        self._pool = pool
        self._cache = cache
        self._taker = make_taker(cache) if taker is None else taker

    @property
    def planes(self) -> int:
        """How many planes are read with the base of each span."""
        return self.spans[0].planes

    def floors(self, layer: int, number: int, planes: int | None = None) -> Floors:
        """See `CodedSpan.floors`."""
        return self.spans[number].floors(layer, planes)

    def read_base(self, layer: int, *, early: bool = False) -> list[Base | None]:
        """Read the base of each span whose base is not in slots; None for the others.

        They are on the source's device, and valid until any source is read from again. `early`:
        the layer before is not done yet.

        Raises:
            PrefixUnreadable: a block is missing, short or corrupt, or cannot be read now.
        """
        if not early:
            self._begin(layer)
        chosen = [number for number, own in enumerate(self._in_slots) if not own]
        wanted = [(number, self.spans[number].pages) for number in chosen]
        raised = {number: self.spans[number].floor_units(layer) for number in chosen}
        raised = {number: units for number, units in raised.items() if len(units)}
        wanted += [(own, self.spans[own].unit_chunks(units)) for own, units in raised.items()]
        blocks = self._read(layer, wanted, PROBE_READ, last=False)
        planes = dict(zip(raised, blocks[len(chosen) :], strict=True))
        found: list[Base | None] = [None] * len(self.spans)
        for number, pages in zip(chosen, blocks, strict=False):
            span, base = self.spans[number], Base(_groups(self.spans[number], pages))
            if number in raised:
                units = planes[number].view(-1, span.layout.unit_stride)
                base = Base(base.groups, torch.from_numpy(raised[number]), units)
                self.stats.selected_chunks += len(units)
            found[number] = base
        return found

    def ask_units(self, layer: int, number: int, raised: Tensor) -> None:
        """Begin to read what `read_units` will read, as far as it is in no cache now."""
        self._begin(layer)
        span, chunks = self.spans[number], self.spans[number].chunks
        tiers = self._cache.placement.tiers(self._first_id(layer, span), len(chunks.first))
        asked = span.unit_chunks(raised.numpy())
        blocks = areas.uncached_blocks(asked, chunks.first, chunks.count, tiers, span.spared_blocks)
        if len(blocks):
            buffer = self._buffer(layer, number)
            self.stats.ssd_bytes += buffer.read(blocks, 0, self._reader, last=False)

    def read_units(self, layer: int, number: int, raised: Tensor) -> Tensor:
        """Read the bytes of units of a span, uint8 [n, unit_stride], on the source's device.

        Args:
            layer: from 0.
            number: number of the span.
            raised: int64 [n, 3] on the CPU, ascending: plane, head and unit.

        Raises:
            PrefixUnreadable: as for `read_base`.
        """
        self._begin(layer)
        span = self.spans[number]
        chunks = span.unit_chunks(raised.numpy())
        (found,) = self._read(layer, [(number, chunks)], SSD_READ, last=True)
        self.stats.selected_chunks += len(chunks)
        return found.view(-1, span.layout.unit_stride)

    def reads(self, parts: Sequence[ResidentRange]) -> bool:
        """Whether its spans are these parts, and it reads the base of just those not in slots."""
        mine = [
            (own.segment.segment_id, own.start, own.stop, there)
            for own, there in zip(self.spans, self._in_slots, strict=True)
        ]
        return mine == [
            (own.segment_id, own.start, own.stop, own.layers_loaded > 0) for own in parts
        ]

    def read_ahead(self, waste_budget: float) -> None:
        """See `StoredSource.read_ahead`; reads only what is certain, whatever `waste_budget` is."""
        layer = self.next_ahead
        self.next_ahead += 1
        for number, span in enumerate(self.spans):
            if self._in_slots[number]:
                continue
            chunks, first = span.chunks, self._first_id(layer, span)
            tiers = self._cache.placement.tiers(first, len(chunks.first))
            base = areas.uncached_blocks(
                span.certain_chunks(layer), chunks.first, chunks.count, tiers, span.spared_blocks
            )
            if len(base):
                self._buffer(layer, number).read_ahead(base, self._reader)

    def _buffer(self, layer: int, number: int) -> LayerBuffer:
        """The buffer of a layer of the span with this number."""
        number = self._buffer_of[number]
        span = self.spans[number]
        offset = span.segment.layout.codes_offset(layer)

        def make(tenant: Tenant) -> LayerBuffer:
            return LayerBuffer(span.segment, offset, span.layout.layer_bytes, self._pool, tenant)

        return self._open_buffer(layer, number, make)

    def _first_id(self, layer: int, span: CodedSpan) -> int:
        return span.base + layer * len(span.chunks.first)

    def _read(
        self, layer: int, wanted: Sequence[tuple[int, Indices]], stage: str, *, last: bool
    ) -> list[Tensor]:
        """Read the blocks of chunks of some spans, uint8 [blocks, BLOCK_BYTES] for each.

        Blocks are taken from where chunks stood before the read; then the chunks move.
        """
        with self.timeline.span(PLAN, layer):
            ids = [own + self._first_id(layer, self.spans[number]) for number, own in wanted]
            access = self._cache.access(np.concatenate(ids), np.ones(sum(map(len, ids))))
            parts, start = [], 0
            for (number, chunks), own in zip(wanted, ids, strict=True):
                place = slice(start, start := start + len(chunks))
                parts.append(_Part.of(number, self.spans[number], chunks, own, place, access))
        try:
            with self.timeline.span(stage, layer):
                self._fetch(layer, parts, last=last)
            with self.timeline.span(COPY, layer):
                found = [self._take(part) for part in parts]
                self._settle(parts, access)
        except BaseException:
            # The placement assumes bytes that were not copied.
            self._cache.abandon(access)
            raise
        self._count(parts, access)
        return found

    def _fetch(self, layer: int, parts: Sequence[_Part], *, last: bool) -> None:
        """Bring all blocks that must come from SSD into their buffers."""
        # Units are wanted here and there, many at a time: reading what is between them costs more
        # than it saves.
        gap = 0 if last else self._reader.cost.gap_bytes
        reading: list[tuple[LayerBuffer, Indices]] = []
        for part in parts:
            if len(part.wanted):
                part.buffer = self._buffer(layer, part.number)
                self.stats.ssd_needed_bytes += len(part.wanted) * BLOCK_BYTES
                self.stats.ssd_bytes += part.buffer.read(part.wanted, gap, self._reader, last=last)
                reading.append((part.buffer, part.wanted))
        began = time.perf_counter()
        for buffer, wanted in reading:
            buffer.wait(wanted)
        self.stats.wait_ms += (time.perf_counter() - began) * 1e3

    def _take(self, part: _Part) -> Tensor:
        memory = None if part.buffer is None else part.buffer.memory
        return self._taker.take(part.tiers, part.frames, memory)

    def _settle(self, parts: Sequence[_Part], access: Access) -> None:
        """Move chunks between tiers; those that were read to be cached come from the buffers."""
        loaded: list[LoadedChunks] = []
        memories: list[PooledMemory] = []
        for part in parts:
            if part.buffer is not None and part.kept.any():
                memories.append(memory := part.buffer.memory)
                flat = memory.vectors(torch.uint8, 1).view(-1)
                starts = part.starts[part.kept] * BLOCK_BYTES
                loaded.append(LoadedChunks(flat, part.ids[part.kept], starts))
        fence = self._cache.settle(access, loaded)
        if fence is not None:
            for memory in memories:
                memory.fence = fence

    def _count(self, parts: Sequence[_Part], access: Access) -> None:
        stats = self.stats
        chunks = np.bincount(access.tiers, minlength=3).tolist()
        stats.ssd_chunks += chunks[_SSD]
        stats.host_chunks += chunks[_HOST]
        stats.device_chunks += chunks[_DEVICE]
        stats.h2d_bytes += sum([part.not_on_device for part in parts]) * BLOCK_BYTES
        if len(access.moves):
            stats.h2d_bytes += int(access.moves.pages_moved()[:, _DEVICE].sum()) * BLOCK_BYTES


@dataclasses.dataclass(slots=True)
class _Part:
    """What a read wants of a span: chunks of these `ids`, of which some will be cached (`kept`).

    `starts` int64 is the first block of each chunk. For their blocks, one after another, `tiers`
    uint8 and `frames` int64 say where each is; see `FrameTaker.take`. Blocks `wanted` int64,
    ascending, must come from SSD into `buffer`; `not_on_device` counts those of chunks that stood
    elsewhere than on the device.
    """

    number: int
    ids: Indices
    starts: Indices
    kept: Flags
    tiers: Uint8s
    frames: Indices
    wanted: Indices
    not_on_device: int
    buffer: LayerBuffer | None = None

    @classmethod
    def of(
        cls,
        number: int,
        span: CodedSpan,
        chunks: Indices,
        ids: Indices,
        place: slice,
        access: Access,
    ) -> _Part:
        """The part of an access at `place` in it, for chunks of the span with this number."""
        own, kept = span.chunks, access.kept[place]
        tiers, frames, wanted, sums = areas.find_blocks(
            chunks,
            own.first,
            own.count,
            access.tiers[place],
            kept,
            access.pages[place],
            span.spared_blocks,
        )
        on_ssd, on_host, _ = sums.tolist()
        starts = own.first[chunks]
        return cls(number, ids, starts, kept, tiers, frames, wanted, on_ssd + on_host)


def _groups(span: CodedSpan, blocks: Tensor) -> Tensor:
    """The span's groups [groups, group_bytes], from the blocks of `span.pages`."""
    layout, flat = span.layout, blocks.reshape(-1)
    size = layout.page_groups * layout.group_bytes
    if size == layout.page_bytes:
        joined = flat[: len(flat) // layout.group_bytes * layout.group_bytes]
    else:
        pages = flat.split(layout.page_bytes)
        whole = (min(size, len(page) // layout.group_bytes * layout.group_bytes) for page in pages)
        joined = torch.cat([page[:end] for page, end in zip(pages, whole, strict=True)])
    groups = joined.view(-1, layout.group_bytes)
    first = span.groups[0] - int(span.pages[0]) * layout.page_groups
    return groups[first : first + len(span.groups)]
