"""Reads layers of a stored prefix, exact or in codes, from caches and SSD.

Blocks are taken from the tiers of their chunks, as they are on disk; codecs restore them. A layer
buffer may be evicted for a layer of another source, and is read again if it is needed again. So
tensors taken from a buffer must not be used after another source has read.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops.types import Indices, Uint8s
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.reader import PendingRead
from impress_sglang.storage.segment import OpenSegment
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Access, Tier
from impress_sglang.transfer.buffers import BufferPool, LayerBuffer, PooledMemory
from impress_sglang.transfer.wanted import WantedChunks, wanted_tokens

_SSD, _HOST, _DEVICE = int(Tier.SSD), int(Tier.HOST), int(Tier.DEVICE)

OpenSpan: TypeAlias = tuple[OpenSegment, range, int]
"""An open segment, its wanted tokens, and the id of its first chunk in the cache."""


class Piece(NamedTuple):
    """A layer of `length` tokens, from token `start` of a segment and token `position` of a prompt:
    their groups in each part of the layer that is not empty, uint8 [groups, group_bytes], on the
    device of the cache."""

    parts: Sequence[Tensor]
    start: int
    position: int
    length: int


@dataclasses.dataclass(slots=True)
class ReadStats:
    """Costs of reading a prefix: bytes, and accesses to chunks by the tier of the chunk.

    `ssd_needed_bytes` are wanted rows that came from SSD; `ssd_bytes` divided by it is the read
    amplification. Of `ssd_bytes`, `ahead_bytes` were read before their layer began, and of these
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
        """Accesses to chunks in all tiers."""
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
        """Return all counters, and those derived from them."""
        return {
            **dataclasses.asdict(self),
            "wait_ms": round(self.wait_ms, 3),
            "chunks_accessed": self.chunks_accessed,
            "chunks_loaded": self.chunks_loaded,
        }


class StoredSource(abc.ABC):
    """Reads layers of spans of segments in ascending order, with one kind of chunks."""

    def __init__(
        self, spans: Sequence[OpenSpan], pool: BufferPool, cache: ChunkCache, *, codes: bool
    ) -> None:
        """Start before the first layer of one or more consecutive spans.

        `cache` is that of their chunks: of codes, or of columns.
        """
        assert spans
        self.spans = tuple(spans)
        segments = [segment for segment, _, _ in spans]
        self.segment_ids = [segment.segment_id for segment in segments]
        self.lengths = [len(tokens) for _, tokens, _ in spans]
        self.num_tokens = sum(self.lengths)
        self.num_layers = segments[0].layout.shape.num_layers
        # A buffer has each segment once.
        self._segments = list(dict.fromkeys(segments))
        self._places = [self._segments.index(segment) for segment in segments]
        self.layer_bytes = pool.size_of(
            sum(segment.layout.max_bytes(codes=codes) for segment in self._segments)
        )
        """Bytes of the pool that the buffer of a layer takes."""
        self.stats = ReadStats()
        self.layer = -1
        """The layer requested last; -1 before the first."""
        self.next_ahead = 0
        """The next layer to be read ahead."""
        self.shape = segments[0].layout.shape
        self._pool, self._cache, self.codes = pool, cache, codes
        self._buffers: dict[int, LayerBuffer] = {}
        self._ending: list[PendingRead] = []

    @abc.abstractmethod
    def _certain(self, layer: int) -> Sequence[Sequence[WantedChunks]]:
        """Chunks that each span will certainly need, in the order of the requests."""

    def read_ahead(self) -> int:
        """Begin to read the blocks that layer `next_ahead` will certainly need, and advance it.

        Returns the number of bytes.
        """
        layer, num_bytes = self.next_ahead, 0
        self.next_ahead += 1
        # A chunk that enters a cache is read whole, which would cost each layer a separate read.
        whole = self._cache.placement.enabled
        buffer = self._buffer(layer)
        for of_spans in self._certain(layer):
            missing = []
            for number, span in enumerate(of_spans):
                count = len(span.layer.first)
                tiers = self._cache.placement.tiers(self._first_id(layer, number), count)
                blocks = span.missing(tiers[span.chunks] == _SSD, whole)
                missing.append(blocks + buffer.firsts[self._places[number]])
            num_bytes += buffer.read_ahead(_joined(missing))
        return num_bytes

    def read_some(self) -> None:
        """Begin to read ahead the first layer of which something is not cached."""
        while not self.read_ahead() and self.next_ahead < self.num_layers:
            pass

    @property
    def is_reading(self) -> bool:
        """Whether any of its reads is in progress."""
        return any(not read.done for read in self._reads())

    def wait_idle(self) -> bool:
        """Wait for its reads; False if the device has stopped."""
        return all(read.wait_idle() for read in self._reads())

    def _reads(self) -> list[PendingRead]:
        reads = (buffer.reads for buffer in self._buffers.values())
        return [*self._ending, *itertools.chain.from_iterable(reads)]

    def end_layer(self, layer: int) -> None:
        """Free the buffers of layers up to this one, which are no longer needed."""
        self._begin(layer)
        self._give_back(layer + 1)

    def close(self) -> None:
        """Begin no more reads; once `is_reading` is False, nothing reads from the segments."""
        self._give_back()

    def _take(
        self, layer: int, wanted: Mapping[int, WantedChunks], *, last: bool = True
    ) -> list[Tensor]:
        """Take the wanted blocks of some spans, by the numbers of the spans.

        They are taken from the tiers of chunks before the read; then the chunks move. `last`: see
        `LayerBuffer.read`. Returns uint8 [blocks, BLOCK_BYTES] for each, on the device of the
        cache; valid until any source is read again. It raises `PrefixUnreadable` if a block is
        missing, short or corrupt, or cannot be read now.
        """
        self._begin(layer)
        spans, buffer = list(wanted.values()), self._buffer(layer)
        # First block of each span's segment in the buffer.
        firsts = [buffer.firsts[self._places[number]] for number in wanted]
        ids = [span.chunks + self._first_id(layer, number) for number, span in wanted.items()]
        chunks, shares = np.concatenate(ids), np.concatenate([span.shares for span in spans])
        access = self._cache.placement.access(chunks, shares)
        try:
            edges = np.cumsum([len(span.chunks) for span in spans[:-1]], dtype=np.int64)
            tiers, kept = np.split(access.tiers, edges), np.split(access.kept, edges)
            missing = [
                span.missing(at == _SSD, whole) + first
                for span, at, whole, first in zip(spans, tiers, kept, firsts, strict=True)
            ]
            self._fetch(buffer, _joined(missing), last=last)
            blocks, page = [], 0
            for span, at, first in zip(spans, tiers, firsts, strict=True):
                pages = access.pages[page : (page := page + len(span.all_blocks))]
                frames, of_blocks = span.all_blocks + first, np.repeat(at, span.count)
                if at.any():
                    frames = np.where(of_blocks, pages, frames)
                taken = slice(None) if span.taken is None else span.taken
                own_frames = of_blocks[taken], frames[taken]
                blocks.append(take_blocks(self._cache, *own_frames, buffer.memory))
            begins = [span.first + first for span, first in zip(spans, firsts, strict=True)]
            self._apply_moves(access, chunks, np.concatenate(begins), buffer.memory)
        except BaseException:
            # The placement assumes bytes that were not copied.
            self._cache.placement.drop(access.moves.chunks)
            raise
        self._count(wanted, [len(blocks) for blocks in missing], access)
        return blocks

    def _first_id(self, layer: int, number: int) -> int:
        """Id of the first chunk of a layer of the span with this number."""
        segment, _, first = self.spans[number]
        return first + segment.layout.first_chunks[self.codes][layer]

    def _fetch(self, buffer: LayerBuffer, wanted: Indices, *, last: bool) -> None:
        """Read all blocks that must come from SSD into their buffer."""
        if len(wanted):
            self.stats.ssd_bytes += buffer.read(wanted, last=last)
            began = time.perf_counter()
            buffer.wait(wanted)
            self.stats.wait_ms += (time.perf_counter() - began) * 1e3

    def _apply_moves(
        self, access: Access, ids: Indices, begins: Indices, memory: PooledMemory | None
    ) -> None:
        """Move chunks between tiers; chunks read to be cached come from the buffer."""
        read = np.flatnonzero(access.kept)
        address = 0 if memory is None else memory.address
        fence = self._cache.apply_moves(access, ids[read], address + begins[read] * BLOCK_BYTES)
        if fence is not None and memory is not None and len(read):
            memory.fence = fence

    def _count(
        self, wanted: Mapping[int, WantedChunks], missing: Sequence[int], access: Access
    ) -> tuple[int, int, int]:
        """Count a read, with the number of blocks of each span that were not in a cache.

        Returns the wanted bytes on SSD, host, and device.
        """
        stats, chunks = self.stats, np.bincount(access.tiers, minlength=3).tolist()
        stats.ssd_chunks += chunks[_SSD]
        stats.host_chunks += chunks[_HOST]
        stats.device_chunks += chunks[_DEVICE]
        sizes = np.concatenate([span.bytes for span in wanted.values()])
        on_ssd, on_host, on_device = map(int, np.bincount(access.tiers, sizes, 3).tolist())
        stats.ssd_needed_bytes += on_ssd
        stats.h2d_bytes += on_ssd + on_host
        moves = access.moves
        pages = moves.counts[moves.targets == _DEVICE].sum(dtype=np.int64)
        stats.h2d_bytes += int(pages) * BLOCK_BYTES
        return on_ssd, on_host, on_device

    def _begin(self, layer: int) -> None:
        """Advance to a layer, and give back the buffers of earlier layers."""
        if layer == self.layer:
            return
        assert layer > self.layer, "layers are read in ascending order"
        self.layer = layer
        self.next_ahead = max(self.next_ahead, layer + 1)
        self._give_back(layer)

    def _buffer(self, layer: int) -> LayerBuffer:
        if layer not in self._buffers:
            places = (segment.layout.place(layer, codes=self.codes) for segment in self._segments)
            parts = [(segment, *at) for segment, at in zip(self._segments, places, strict=True)]
            self._buffers[layer] = LayerBuffer(
                parts, self._pool, lambda: self._close_buffer(self._buffers.pop(layer))
            )
        return self._buffers[layer]

    def _give_back(self, below: int | None = None) -> None:
        """Give back the buffers of layers below `below`, or all."""
        for layer in [number for number in self._buffers if below is None or number < below]:
            self._close_buffer(self._buffers.pop(layer))

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

    state: Any = None
    """State of the codec from layer to layer."""

    @functools.cached_property
    def sinks(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Exact keys [L, n, G, Dk] and values of the first tokens of a prompt, which are never in
        codes, by number of the span."""
        sinks = {}
        for number, (segment, tokens, _) in enumerate(self.spans):
            exact = torch.from_numpy(segment.sinks[:, tokens.start : tokens.stop])
            if exact.numel():
                sinks[number] = self.shape.kvs_of(exact.to(self._cache.device))
        return sinks

    def _wanted(self, layer: int) -> list[WantedChunks]:
        return [
            wanted_tokens(segment.layout.parts(layer, codes=self.codes), tokens.start, tokens.stop)
            for segment, tokens, _ in self.spans
        ]

    def _certain(self, layer: int) -> Sequence[Sequence[WantedChunks]]:
        return [self._wanted(layer)]

    def read(self, layer: int) -> list[Piece]:
        """Read a layer of each span; raises and stays valid as `_take`."""
        wanted, pieces = self._wanted(layer), []
        taken = [blocks.reshape(-1) for blocks in self._take(layer, dict(enumerate(wanted)))]
        for (segment, tokens, _), wanted_of, memory in zip(self.spans, wanted, taken, strict=True):
            parts = [pages.groups_in(memory[at])[groups] for pages, at, groups in wanted_of.places]
            position = segment.info.prefix_len + tokens.start
            pieces.append(Piece(parts, tokens.start, position, len(tokens)))
        return pieces


def take_blocks(
    cache: ChunkCache, tiers: Uint8s, frames: Indices, memory: PooledMemory | None
) -> Tensor:
    """Take blocks of a span, in the given order; does not wait on a GPU.

    The result does not change if chunks move after the call. `tiers` uint8 [n] are `Tier`
    values; `frames` int64 [n] page numbers in that cache, or block numbers in the layer buffer,
    whose `memory` is None if no block is taken from it.

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
    cache.copy_stream.record_reading(fence)
    if memory is not None:
        memory.fence = fence
    return blocks


def _joined(blocks: Sequence[Indices]) -> Indices:
    """Blocks wanted by any span, ascending."""
    joined = np.concatenate(blocks)
    # Only spans of one segment may want the same blocks, or be out of order.
    return joined if (joined[1:] > joined[:-1]).all() else np.unique(joined)
