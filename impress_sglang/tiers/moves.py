"""Moves the bytes of chunks between tiers.

Stage: load. `ChunkMover` is the contract: `IndexedMover` indexes tensors, on any device;
`KernelMover`, for GPUs, launches kernels on a stream of their own, concurrently with the model.
tests/unit/test_chunk_cache.py runs the first, tests/unit/triton/test_moves.py the second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.tiers.fence import CopyStream, Fence
from impress_sglang.tiers.placement import CACHES, Moves, Tier
from impress_sglang.tiers.slab import PageShape, Slab

_Integers = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedChunks:
    """Chunks that were read from SSD into one memory, uint8 on the CPU.

    `chunks` int64 [n] are their ids, distinct; `starts` int64 [n] the byte where each begins. From
    there on its pages follow one after another; the memory also covers the unused rest of a last
    page, with any content.
    """

    memory: Tensor
    chunks: _Integers
    starts: _Integers


class ChunkMover(Protocol):
    """The contract.

    All sources are read as they were before the first page is written: a page may be source and
    target. Readers of slabs on a device call the copy stream's `join` before, `note_reading` after.
    """

    def move(self, moves: Moves, loaded: Sequence[LoadedChunks]) -> Fence:
        """Copy chunks to their new pages.

        Args:
            moves: at least one.
            loaded: each chunk that comes from SSD, once. They must not change before the fence.

        Returns:
            A fence after which all is copied.
        """
        ...


def make_mover(page: PageShape, slabs: Mapping[int, Slab], stream: CopyStream) -> ChunkMover:
    """The mover that fits the device of the slabs."""
    kind = KernelMover if slabs[Tier.DEVICE].device.type == "cuda" else IndexedMover
    return kind(page, slabs, stream)


class IndexedMover:
    """Moves by tensor indexing, one group of moves between the same tiers after another."""

    def __init__(self, page: PageShape, slabs: Mapping[int, Slab], stream: CopyStream) -> None:
        self._page = page
        self._slabs = slabs

    def move(self, moves: Moves, loaded: Sequence[LoadedChunks]) -> Fence:
        """See `ChunkMover`."""
        writes = []
        for source in CACHES:
            for target in CACHES:
                own = moves.chosen((moves.sources == source) & (moves.targets == target))
                if len(own):
                    contents = self._slabs[source].read_pages(flat(own.source_pages, own.counts))
                    writes.append((target, flat(own.target_pages, own.counts), contents))
        for part, own in by_memory(moves, loaded):
            for target in CACHES:
                chosen = own.targets == target
                if chosen.any():
                    there = own.chosen(chosen)
                    contents = self._read(part.memory, part.starts[chosen], there.counts)
                    writes.append((target, flat(there.target_pages, there.counts), contents))
        for target, pages, contents in writes:
            self._slabs[target].write_pages(pages, contents)
        return Fence(self._slabs[Tier.DEVICE].device)

    def _read(self, memory: Tensor, starts: _Integers, counts: npt.NDArray[np.uint16]) -> Tensor:
        """Pages [p, page_vectors * unit] of chunks, one after another."""
        size = self._page.page_bytes
        first = page_starts(starts, counts, size)
        # The memory in rows so long that each page begins with one.
        grain = int(np.gcd.reduce(first, initial=size))
        rows = memory[: len(memory) // grain * grain].view(-1, grain)
        index = first[:, None] // grain + np.arange(size // grain)
        found = rows.index_select(0, torch.from_numpy(index.reshape(-1)))
        return found.view(self._page.dtype).view(len(first), -1)


class KernelMover:
    """Moves in two launches: chunks that leave their pages are set aside, then all are written."""

    def __init__(self, page: PageShape, slabs: Mapping[int, Slab], stream: CopyStream) -> None:
        # Imported only where it is used: Triton is not needed on a CPU.
        from impress_sglang.tiers.page_copies import PageCopier

        self._page = page
        self._slabs = slabs
        self._device = slabs[Tier.DEVICE].device
        self._stream = stream
        self._copier = PageCopier(page, self._device)

    def move(self, moves: Moves, loaded: Sequence[LoadedChunks]) -> Fence:
        """See `ChunkMover`; nothing is waited for."""
        size = self._page.page_bytes
        cached = moves.chosen(moves.sources != Tier.SSD)
        parts = []
        with self._stream.after_reading():
            aside = self._set_aside(cached)
            ends = np.cumsum(cached.counts, dtype=np.int64)
            parts.append((cached, aside.data_ptr() + (ends - cached.counts) * size))
            for part, own in by_memory(moves, loaded):
                parts.append((own, part.memory.data_ptr() + part.starts))
            copies = []
            for tier in CACHES:
                pages, addresses = [], []
                for own, starts in parts:
                    there = own.targets == tier
                    counts = own.counts[there]
                    pages.append(flat(own.target_pages[there], counts))
                    addresses.append(page_starts(starts[there], counts, size))
                joined = np.concatenate(pages)
                if len(joined):
                    copies.append((self._slabs[tier].pages, joined, np.concatenate(addresses)))
            self._copier.copy(copies)
            return Fence(self._device)

    def _set_aside(self, moves: Moves) -> Tensor:
        """Copies of the pages of cached chunks, one after another: [p, elements] on the device."""
        pages, counts = flat(moves.source_pages, moves.counts), moves.counts
        tiers, addresses = np.repeat(moves.sources, counts), np.empty(len(pages), np.int64)
        for tier in CACHES:
            own = tiers == tier
            addresses[own] = self._slabs[tier].page_addresses(pages[own])
        shape = len(pages), self._page.elements
        aside = torch.empty(shape, dtype=self._page.dtype, device=self._device)
        if len(pages):
            self._copier.copy([(aside, None, addresses)])
        return aside


def by_memory(moves: Moves, loaded: Sequence[LoadedChunks]) -> list[tuple[LoadedChunks, Moves]]:
    """The moves of the chunks of each memory, in the order of these chunks."""
    order = np.argsort(moves.chunks)
    found = []
    for part in loaded:
        place = order[np.searchsorted(moves.chunks, part.chunks, sorter=order)]
        own = moves.chosen(place)
        assert np.array_equal(own.chunks, part.chunks) and not own.sources.any()
        found.append((part, own))
    return found


def flat(pages: npt.NDArray[np.int32], counts: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
    """The first `counts` of each row, one after another."""
    return pages[np.arange(pages.shape[1]) < counts[:, None]]


def page_starts(starts: _Integers, counts: npt.NDArray[np.uint16], page_bytes: int) -> _Integers:
    """Where each page begins, in chunks that begin at `starts`, one after another."""
    ends = np.cumsum(counts, dtype=np.int64)
    number = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts, counts) + number * page_bytes
