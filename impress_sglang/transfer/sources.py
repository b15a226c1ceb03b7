"""Reads layers of a stored prefix, exact or in codes, from caches and SSD.

Blocks are taken from where their chunks are, as they stand on disk; restoring them is up to others.
A layer buffer may be taken away for a layer of another source; a source that wants it again reads
it again. So what was taken from a buffer may not be used after another source has read.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops.types import Flags, Indices, Uint8s
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.reader import PendingRead
from impress_sglang.storage.segment import OpenSegment
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Access, Tier
from impress_sglang.transfer.buffers import BufferPool, LayerBuffer, PooledMemory, Tenant
from impress_sglang.transfer.wanted import Wanted, wanted_tokens

_SSD, _HOST, _DEVICE = int(Tier.SSD), int(Tier.HOST), int(Tier.DEVICE)
_NOTHING: Indices = np.empty(0, np.int64)

OpenSpan: TypeAlias = tuple[OpenSegment, range, int]
"""An open segment, which of its tokens are wanted, and the id of its first chunk in the cache."""


class Piece(NamedTuple):
    """What was read of a layer of `length` tokens, which begin with token `start` of a segment and
    token `position` of a prompt: the groups that have them of each part of the layer that is not
    empty, uint8 [groups, group_bytes], on the device of the cache."""

    parts: Sequence[Tensor]
    start: int
    position: int
    length: int


@dataclasses.dataclass(slots=True)
class ReadStats:
    """What reading a prefix took: bytes, and accesses to chunks by the tier where they were found.

    `ssd_needed_bytes` are wanted rows that came from SSD; `ssd_bytes` divided by it is the read
    amplification. Of `ssd_bytes`, `ahead_bytes` were read before their layer asked, and of these
    `ahead_used_bytes` were wanted. `h2d_bytes` are rows that were not on the device, and whole
    chunks that moved there. `important_bytes` are the KVs of selected tokens, and
    `important_device_bytes` those of them that were found on the device. `selected_chunks` leaves
    out the chunks of probe columns, which every probe reads. `wait_ms` is the wait for bytes from
    SSD.
    """

    ssd_bytes: int = 0
    ssd_needed_bytes: int = 0
    ahead_bytes: int = 0
    ahead_used_bytes: int = 0
    h2d_bytes: int = 0
    device_chunks: int = 0
    host_chunks: int = 0
    ssd_chunks: int = 0
    selected_chunks: int = 0
    important_bytes: int = 0
    important_device_bytes: int = 0
    wait_ms: float = 0.0

    @property
    def chunks_accessed(self) -> int:
        """Accesses to chunks, wherever they were found."""
        return self.device_chunks + self.host_chunks + self.ssd_chunks

    @property
    def chunks_loaded(self) -> int:
        """Accesses to chunks that were not on the device."""
        return self.host_chunks + self.ssd_chunks

    def add(self, other: ReadStats) -> None:
        """Add the counters of another source."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, value)

    def as_dict(self) -> dict[str, float]:
        """All counters, and those that are derived from them."""
        return {
            **dataclasses.asdict(self),
            "wait_ms": round(self.wait_ms, 3),
            "chunks_accessed": self.chunks_accessed,
            "chunks_loaded": self.chunks_loaded,
        }


class StoredSource(abc.ABC):
    """Spans of segments whose layers are read in ascending order, one kind of chunks of them."""

    def __init__(
        self,
        spans: Sequence[OpenSpan],
        pool: BufferPool,
        cache: ChunkCache,
        *,
        codes: bool,
    ) -> None:
        """Begin with nothing read of one or more consecutive spans.

        The cache is that of their chunks: of codes, or of columns.
        """
        assert spans
        self.spans = tuple(spans)
        segments = [segment for segment, _, _ in spans]
        self.segment_ids = [segment.segment_id for segment in segments]
        self.lengths = [len(tokens) for _, tokens, _ in spans]
        self.num_tokens = sum(self.lengths)
        self.num_layers = segments[0].layout.shape.num_layers
        # Spans of one segment are read into one layer buffer, that of the first of them.
        self._buffer_of = [segments.index(segment) for segment in segments]
        self.layer_bytes = sum(
            pool.size_of(segments[number].layout.most_bytes(codes=codes))
            for number in set(self._buffer_of)
        )
        """How much of the pool the buffers of a layer take."""
        self.stats = ReadStats()
        self.layer = -1
        """The layer that was asked for last; -1 before the first."""
        self.next_ahead = 0
        """The next layer to be read ahead."""
        self.shape = segments[0].layout.shape
        self._pool, self._cache, self.codes = pool, cache, codes
        self._buffers: dict[int, dict[int, LayerBuffer]] = {}
        self._ending: list[PendingRead] = []

    @abc.abstractmethod
    def _certain(self, layer: int) -> Sequence[Sequence[Wanted]]:
        """What is certain to be wanted of each span, in the order in which it is asked for."""

    def read_ahead(self) -> None:
        """Begin to read what the layer `next_ahead` will certainly want, and advance that."""
        layer = self.next_ahead
        self.next_ahead += 1
        # What enters a cache is wanted whole, and would cost each layer a read of its own.
        whole = self._cache.placement.enabled
        for of_spans in self._certain(layer):
            missing = {}
            for number, own in enumerate(of_spans):
                count = len(own.layer.first)
                tiers = self._cache.placement.tiers(self._first_id(layer, number), count)
                missing[number] = own.missing(tiers[own.chunks] == _SSD, whole)
            for buffer, blocks in self._of_buffers(layer, missing):
                buffer.read_ahead(blocks)

    @property
    def is_reading(self) -> bool:
        """Whether any of its reads is still under way."""
        return any(not read.done for read in self._reads())

    def ended_in_time(self) -> bool:
        """Wait for its reads; False if the device has stopped."""
        return all(read.ended_in_time() for read in self._reads())

    def _reads(self) -> list[PendingRead]:
        buffers = (buffer for own in self._buffers.values() for buffer in own.values())
        return [*self._ending, *itertools.chain.from_iterable(own.reads for own in buffers)]

    def end_layer(self, layer: int) -> None:
        """Drop the layers up to this one, of which nothing is wanted any more."""
        self._begin(layer)
        self._give_back(layer + 1)

    def close(self) -> None:
        """Begin no more reads; once `is_reading` is False, nothing reads from the segments."""
        self._give_back()

    def _take(self, layer: int, wanted: Mapping[int, Wanted], *, last: bool = True) -> list[Tensor]:
        """Take the blocks that are wanted of some spans, by the numbers of the spans.

        They are taken from where chunks stood before the read; then the chunks move. `last`: see
        `LayerBuffer.read`. Returns uint8 [blocks, BLOCK_BYTES] for each, on the device of the
        cache; valid until any source is read from again. It raises `PrefixUnreadable` if a block is
        missing, short or corrupt, or cannot be read now.
        """
        self._begin(layer)
        ids = [own.chunks + self._first_id(layer, number) for number, own in wanted.items()]
        shares = np.concatenate([own.shares for own in wanted.values()])
        access = self._cache.placement.access(np.concatenate(ids), shares)
        try:
            parts, start, page = [], 0, 0
            for (number, own), found in zip(wanted.items(), ids, strict=True):
                place = slice(start, start := start + len(found))
                pages = access.pages[page : (page := page + len(own.all_blocks))]
                parts.append(PartOfRead(number, own, found, place, access, pages))
            self._fetch(layer, parts, last=last)
            blocks = [part.take(self._cache) for part in parts]
            self._settle(parts, access)
        except BaseException:
            # The placement assumes bytes that were not copied.
            self._cache.abandon(access)
            raise
        self._count(parts, access)
        return blocks

    def _first_id(self, layer: int, number: int) -> int:
        """Id of the first chunk of a layer of the span with this number."""
        segment, _, first = self.spans[number]
        return first + segment.layout.first_chunks[self.codes][layer]

    def _fetch(self, layer: int, parts: Sequence[PartOfRead], *, last: bool) -> None:
        """Bring all blocks that must come from SSD into their buffers."""
        missing = {part.number: part.from_ssd for part in parts if len(part.from_ssd)}
        for part in parts:
            if part.number in missing:
                part.buffer = self._buffer(layer, part.number)
        reading = self._of_buffers(layer, missing)
        for buffer, blocks in reading:
            self.stats.ssd_bytes += buffer.read(blocks, last=last)
        began = time.perf_counter()
        for buffer, blocks in reading:
            buffer.wait(blocks)
        self.stats.wait_ms += (time.perf_counter() - began) * 1e3

    def _of_buffers(
        self, layer: int, blocks: Mapping[int, Indices]
    ) -> list[tuple[LayerBuffer, Indices]]:
        """The buffers of spans of which blocks are wanted, and what any of their spans wants."""
        found: dict[LayerBuffer, list[Indices]] = {}
        for number, own in blocks.items():
            if len(own):
                found.setdefault(self._buffer(layer, number), []).append(own)
        return [
            (buffer, own[0] if len(own) == 1 else np.unique(np.concatenate(own)))
            for buffer, own in found.items()
        ]

    def _settle(self, parts: Sequence[PartOfRead], access: Access) -> None:
        """Move chunks between tiers; those that were read to be cached come from the buffers."""
        ids, addresses, memories = [_NOTHING], [_NOTHING], list[PooledMemory]()
        for part in parts:
            if part.buffer is not None and part.kept.any():
                memories.append(memory := part.buffer.memory)
                ids.append(part.ids[part.kept])
                addresses.append(memory.address + part.wanted.first[part.kept] * BLOCK_BYTES)
        fence = self._cache.settle(access, np.concatenate(ids), np.concatenate(addresses))
        if fence is not None:
            for memory in memories:
                memory.fence = fence

    def _count(self, parts: Sequence[PartOfRead], access: Access) -> tuple[int, int, int]:
        """Count a read; returns the wanted bytes that were found on SSD, host, and device."""
        stats, chunks = self.stats, np.bincount(access.tiers, minlength=3).tolist()
        stats.ssd_chunks += chunks[_SSD]
        stats.host_chunks += chunks[_HOST]
        stats.device_chunks += chunks[_DEVICE]
        sizes = np.concatenate([part.wanted.bytes for part in parts])
        on_ssd, on_host, on_device = map(int, np.bincount(access.tiers, sizes, 3).tolist())
        stats.ssd_needed_bytes += on_ssd
        stats.h2d_bytes += on_ssd + on_host
        if len(access.moves):
            stats.h2d_bytes += access.moves.pages_to(Tier.DEVICE) * BLOCK_BYTES
        return on_ssd, on_host, on_device

    def _begin(self, layer: int) -> None:
        """Move on to a layer, and give back the buffers of earlier layers."""
        if layer == self.layer:
            return
        assert layer > self.layer, "layers are read in ascending order"
        self.layer = layer
        self.next_ahead = max(self.next_ahead, layer + 1)
        self._give_back(layer)

    def _buffer(self, layer: int, number: int) -> LayerBuffer:
        """The buffer of a layer of the span with this number; a layer's are open together."""
        number, buffers = self._buffer_of[number], self._buffers.setdefault(layer, {})
        if number not in buffers:
            segment = self.spans[number][0]

            def evict() -> None:
                self._close_buffer(self._buffers[layer].pop(number))

            tenant = Tenant((self, layer), evict, self.layer_bytes)
            part = segment.layout.place(layer, codes=self.codes)
            buffers[number] = LayerBuffer(segment, *part, self._pool, tenant)
        return buffers[number]

    def _give_back(self, below: int | None = None) -> None:
        """Give back the buffers of layers below `below`, or all."""
        for layer in [own for own in self._buffers if below is None or own < below]:
            for buffer in self._buffers.pop(layer).values():
                self._close_buffer(buffer)

    def _close_buffer(self, buffer: LayerBuffer) -> None:
        buffer.close()
        self._ending = [read for read in (*self._ending, *buffer.reads) if not read.done]
        self.stats.ssd_bytes += buffer.ahead_bytes
        self.stats.ahead_bytes += buffer.ahead_bytes
        self.stats.ahead_used_bytes += buffer.ahead_used_bytes


class WholeSource(StoredSource):
    """Reads whole layers of segments, in sequence: their codes, or their columns.

    The rows of columns must be in the order of the tokens, and their shape have no probe heads:
    each KV head is a head group.
    """

    def __init__(
        self,
        spans: Sequence[OpenSpan],
        pool: BufferPool,
        cache: ChunkCache,
        *,
        codes: bool,
    ) -> None:
        """See `StoredSource`."""
        assert codes or all(segment.mapping is None for segment, _, _ in spans)
        super().__init__(spans, pool, cache, codes=codes)
        self.state: Any = None
        """What restores codes keeps from layer to layer."""
        self.sinks: dict[int, tuple[Tensor, Tensor]] = {}
        """By the number of a span, exact keys [L, n, G, Dk] and values of first tokens of a prompt,
        which are never in codes."""
        for number, (own, tokens, _) in enumerate(spans):
            exact = torch.from_numpy(own.sinks[:, tokens.start : tokens.stop])
            if codes and exact.numel():
                self.sinks[number] = self.shape.kvs_of(exact.to(cache.device))

    def _wanted(self, layer: int) -> list[Wanted]:
        return [
            wanted_tokens(own.layout.parts(layer, codes=self.codes), tokens.start, tokens.stop)
            for own, tokens, _ in self.spans
        ]

    def _certain(self, layer: int) -> Sequence[Sequence[Wanted]]:
        return [self._wanted(layer)]

    def read(self, layer: int) -> list[Piece]:
        """Read a layer of each span; raises and stays valid as `_take`."""
        wanted, found = self._wanted(layer), []
        taken = [own.reshape(-1) for own in self._take(layer, dict(enumerate(wanted)))]
        for (segment, tokens, _), own, memory in zip(self.spans, wanted, taken, strict=True):
            parts = [pages.groups_in(memory[at])[groups] for pages, at, groups in own.places]
            position = segment.info.prefix_len + tokens.start
            found.append(Piece(parts, tokens.start, position, len(tokens)))
        return found


class PartOfRead:
    """What a read wants of a span, and where that is.

    `ids` int64 are the chunks, of which some will be cached (`kept`). For their blocks, one after
    another, `tiers` and `frames` say where each is; see `take_blocks`. Blocks `from_ssd`,
    ascending, must come from there, into `buffer`.
    """

    __slots__ = ("buffer", "frames", "from_ssd", "ids", "kept", "number", "tiers", "wanted")

    def __init__(
        self,
        number: int,
        wanted: Wanted,
        ids: Indices,
        place: slice,
        access: Access,
        pages: Indices,
    ) -> None:
        """`number`: of the span; `place`: of the chunks in the access, which has these `pages`."""
        self.number, self.wanted, self.ids = number, wanted, ids
        self.buffer: LayerBuffer | None = None
        self.kept: Flags = access.kept[place]
        tiers: Uint8s = access.tiers[place]
        self.from_ssd = wanted.missing(tiers == _SSD, self.kept)
        self.tiers, self.frames = np.repeat(tiers, wanted.count), wanted.all_blocks
        if tiers.any():
            self.frames = np.where(self.tiers, pages, self.frames)

    def take(self, cache: ChunkCache) -> Tensor:
        """Its blocks; see `take_blocks`."""
        memory = None if self.buffer is None else self.buffer.memory
        taken = slice(None) if self.wanted.taken is None else self.wanted.taken
        return take_blocks(cache, self.tiers[taken], self.frames[taken], memory)


def take_blocks(
    cache: ChunkCache, tiers: Uint8s, frames: Indices, memory: PooledMemory | None
) -> Tensor:
    """Take blocks of a span, in the given order; on a GPU nothing is waited for.

    What is read stays unchanged, and chunks may move after the call. `tiers` uint8 [n] are `Tier`
    values; `frames` int64 [n] page numbers in that cache, or block numbers in the layer buffer,
    whose `memory` is None if nothing is taken from there.

    Returns uint8 [n, BLOCK_BYTES] on the device of the cache. On a CPU it may share `memory`.
    """
    if cache.copier.in_place and memory is not None and len(frames):
        in_sequence = not tiers.any() and (np.diff(frames) == 1).all()
        if in_sequence:
            first = int(frames[0])
            return memory.blocks[first : first + len(frames)]
    begins = cache.begins(0 if memory is None else memory.address)
    blocks = torch.empty(len(frames), BLOCK_BYTES, dtype=torch.uint8, device=cache.device)
    table = cache.copier.begin(len(frames))
    table[: len(frames)] = begins[tiers] + frames * BLOCK_BYTES
    table[len(frames) :] = blocks.data_ptr() + np.arange(len(frames)) * BLOCK_BYTES
    cache.copy_stream.join()
    fence = cache.copier.launch()
    cache.copy_stream.note_reading(fence)
    if memory is not None:
        memory.fence = fence
    return blocks
