"""Reads a stored prefix in codes from caches and SSD.

Stage: load. Bytes come as they stand on disk; `transfer.filling` puts them into slots. All of them
are known before the request runs, so they are read ahead, in sequence.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.rotation import Turns
from impress_sglang.loops import areas
from impress_sglang.loops.types import Flags, Indices, Uint8s
from impress_sglang.storage.layer_codec import sinks_of
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.moves import LoadedChunks
from impress_sglang.tiers.placement import Access, Tier
from impress_sglang.transfer.buffers import BufferPool, LayerBuffer, PooledMemory, Tenant
from impress_sglang.transfer.coded_span import CodedSpan
from impress_sglang.transfer.frames import take_frames
from impress_sglang.transfer.stored_source import ReadStats, StoredSource

_SSD, _HOST, _DEVICE = int(Tier.SSD), int(Tier.HOST), int(Tier.DEVICE)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCodes:
    """What a span has in a layer, on the source's device.

    `groups` uint8 [groups, group_bytes]; `sinks` are the exact keys [n, G, Dk] and values
    [n, G, Dv] of its first n tokens.
    """

    groups: Tensor
    sinks: tuple[Tensor, Tensor]


class CodedSource(StoredSource):
    """Reads consecutive spans of one or more segments from their codes."""

    def __init__(
        self,
        spans: Sequence[CodedSpan],
        reader: BlockReader,
        pool: BufferPool,
        cache: ChunkCache,
    ) -> None:
        """Begin with nothing read.

        Args:
            spans: one or more.
            reader: reads blocks.
            pool: gives the layer buffers that blocks are read into.
            cache: the cache of codes.
        """
        assert spans
        self.spans = tuple(spans)
        self.below: Tensor | None = None
        """What the last layer was restored to, by a basis; see `transfer.kv_codec`."""
        self.turns: Turns | None = None
        """How its keys are turned to their positions; None before the first layer."""
        self.num_tokens = sum(map(len, spans))
        # Spans of one segment are read into one layer buffer, that of the first of them.
        segments = [span.segment for span in spans]
        self._buffer_of = [segments.index(segment) for segment in segments]
        own_buffers = (spans[number] for number in set(self._buffer_of))
        layer_bytes = sum(
            pool.size_of(max(own.layer_bytes for own in span.segment.layout.codes))
            for span in own_buffers
        )
        super().__init__(segments, layer_bytes, reader, ReadStats())
        self._pool = pool
        self._cache = cache
        self._sinks = [
            tuple(own.to(cache.device) for own in sinks_of(self._shape, span.sinks))
            for span in self.spans
        ]

    def read(self, layer: int) -> list[LayerCodes]:
        """Read a layer of each span; valid until any source is read from again.

        Raises:
            PrefixUnreadable: a block is missing, short or corrupt, or cannot be read now.
        """
        self._begin(layer)
        found = []
        for span, blocks, (keys, values) in zip(
            self.spans, self._read(layer), self._sinks, strict=True
        ):
            groups = _groups(span, layer, blocks)
            found.append(LayerCodes(groups, (keys[layer], values[layer])))
        return found

    def read_ahead(self, waste_budget: float) -> None:
        """See `StoredSource.read_ahead`; all of it is wanted, whatever `waste_budget` is."""
        layer = self.next_ahead
        self.next_ahead += 1
        # What enters a cache is wanted whole, and would cost each layer a read of its own.
        whole = self._cache.placement.enabled
        of_buffer: dict[int, list[Indices]] = {}
        for number, span in enumerate(self.spans):
            chunks, first = span.chunks(layer), self._first_id(layer, span)
            tiers = self._cache.placement.tiers(first, len(chunks.first))
            wanted = areas.uncached_blocks(
                span.pages,
                chunks.first,
                chunks.count,
                tiers,
                span.no_blocks(layer) if whole else span.spared_blocks(layer),
            )
            if len(wanted):
                of_buffer.setdefault(self._buffer_of[number], []).append(wanted)
        for number, own in of_buffer.items():
            self._buffer(layer, number).read_ahead(_joined(own), self._reader)

    def _buffer(self, layer: int, number: int) -> LayerBuffer:
        """The buffer of a layer of the span with this number."""
        number = self._buffer_of[number]
        span = self.spans[number]
        offset = span.segment.layout.codes_offset(layer)

        def make(tenant: Tenant) -> LayerBuffer:
            size = span.layout_of(layer).layer_bytes
            return LayerBuffer(span.segment, offset, size, self._pool, tenant)

        return self._open_buffer(layer, number, make)

    def _first_id(self, layer: int, span: CodedSpan) -> int:
        return span.base + layer * len(span.chunks(layer).first)

    def _read(self, layer: int) -> list[Tensor]:
        """Read the blocks of all pages of each span, uint8 [blocks, BLOCK_BYTES].

        Blocks are taken from where chunks stood before the read; then the chunks move.
        """
        ids = [span.pages + self._first_id(layer, span) for span in self.spans]
        access = self._cache.access(np.concatenate(ids), np.ones(sum(map(len, ids))))
        parts, start = [], 0
        for number, own in enumerate(ids):
            place = slice(start, start := start + len(own))
            parts.append(_Part.of(layer, number, self.spans[number], own, place, access))
        try:
            self._fetch(layer, parts)
            found = [self._take(part) for part in parts]
            self._settle(parts, access)
        except BaseException:
            # The placement assumes bytes that were not copied.
            self._cache.abandon(access)
            raise
        self._count(parts, access)
        return found

    def _fetch(self, layer: int, parts: Sequence[_Part]) -> None:
        """Bring all blocks that must come from SSD into their buffers."""
        gap = self._reader.cost.gap_bytes
        of_buffer: dict[LayerBuffer, list[Indices]] = {}
        for part in parts:
            if len(part.wanted):
                part.buffer = self._buffer(layer, part.number)
                of_buffer.setdefault(part.buffer, []).append(part.wanted)
        reading: list[tuple[LayerBuffer, Indices]] = []
        for buffer, of_spans in of_buffer.items():
            wanted = _joined(of_spans)
            self.stats.ssd_needed_bytes += len(wanted) * BLOCK_BYTES
            self.stats.ssd_bytes += buffer.read(wanted, gap, self._reader)
            reading.append((buffer, wanted))
        began = time.perf_counter()
        for buffer, wanted in reading:
            buffer.wait(wanted)
        self.stats.wait_ms += (time.perf_counter() - began) * 1e3

    def _take(self, part: _Part) -> Tensor:
        memory = None if part.buffer is None else part.buffer.memory
        return take_frames(self._cache, part.tiers, part.frames, memory)

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
    uint8 and `frames` int64 say where each is; see `take_frames`. Blocks `wanted` int64,
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
        layer: int,
        number: int,
        span: CodedSpan,
        ids: Indices,
        place: slice,
        access: Access,
    ) -> _Part:
        """The part of a layer's access at `place`, for all pages of the span with this number."""
        own, kept = span.chunks(layer), access.kept[place]
        tiers, frames, wanted, sums = areas.find_blocks(
            span.pages,
            own.first,
            own.count,
            access.tiers[place],
            kept,
            access.pages[place],
            span.spared_blocks(layer),
        )
        on_ssd, on_host, _ = sums.tolist()
        starts = own.first[span.pages]
        return cls(number, ids, starts, kept, tiers, frames, wanted, on_ssd + on_host)


def _joined(wanted: Sequence[Indices]) -> Indices:
    """The blocks of a segment that any of its spans wants, ascending."""
    return wanted[0] if len(wanted) == 1 else np.unique(np.concatenate(wanted))


def _groups(span: CodedSpan, layer: int, blocks: Tensor) -> Tensor:
    """The span's groups [groups, group_bytes], from the blocks of `span.pages`."""
    layout = span.layout_of(layer)
    first = span.groups[0] - int(span.pages[0]) * layout.page_groups
    return layout.groups_in(blocks.reshape(-1))[first : first + len(span.groups)]
