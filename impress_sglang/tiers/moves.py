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

from impress_sglang.loops.placing import page_moves
from impress_sglang.tiers.fence import CopyStream, Fence
from impress_sglang.tiers.placement import CACHES, Moves, Tier
from impress_sglang.tiers.slab import PageShape, Slab
from impress_sglang.tiers.staging import Staging

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


def make_mover(
    page: PageShape, slabs: Mapping[int, Slab], stream: CopyStream, staging: Staging
) -> ChunkMover:
    """The mover that fits the device of the slabs."""
    if slabs[Tier.DEVICE].device.type == "cuda":
        return KernelMover(page, slabs, stream, staging)
    return IndexedMover(page, slabs)


class IndexedMover:
    """Moves by tensor indexing, one group of moves between the same tiers after another."""

    def __init__(self, page: PageShape, slabs: Mapping[int, Slab]) -> None:
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
        for part, place in by_memory(moves, loaded):
            own = moves.chosen(place)
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
    """Moves in one launch; in two if a page is both source and target: such are set aside first."""

    def __init__(
        self, page: PageShape, slabs: Mapping[int, Slab], stream: CopyStream, staging: Staging
    ) -> None:
        # Imported only where it is used: Triton is not needed on a CPU.
        from impress_sglang.tiers.page_copies import PageCopier

        self._page_bytes = page.page_bytes
        self._device = slabs[Tier.DEVICE].device
        self._begins = np.zeros(len(Tier), np.int64)
        for tier in CACHES:
            self._begins[tier] = slabs[tier].address
        self._stream = stream
        self._copier = PageCopier(page, self._device, staging)

    def move(self, moves: Moves, loaded: Sequence[LoadedChunks]) -> Fence:
        """See `ChunkMover`; nothing is waited for."""
        size = self._page_bytes
        starts = np.zeros(len(moves), np.int64)
        for part, place in by_memory(moves, loaded):
            starts[place] = part.memory.data_ptr() + part.starts
        sources, targets, cached = page_moves(
            moves.counts,
            moves.sources,
            moves.source_pages,
            starts,
            moves.targets,
            moves.target_pages,
            self._begins,
            size,
        )
        with self._stream.after_reading():
            if len(cached) and np.isin(targets, sources[cached]).any():
                aside = torch.empty(len(cached), size, dtype=torch.uint8, device=self._device)
                kept = np.arange(len(cached)) * size + aside.data_ptr()
                self._copier.copy(sources[cached], kept)
                sources[cached] = kept
            return self._copier.copy(sources, targets)


def by_memory(moves: Moves, loaded: Sequence[LoadedChunks]) -> list[tuple[LoadedChunks, _Integers]]:
    """The places among the moves of the chunks of each memory, in the order of these chunks."""
    order = np.argsort(moves.chunks)
    found = []
    for part in loaded:
        place = order[np.searchsorted(moves.chunks, part.chunks, sorter=order)]
        assert np.array_equal(moves.chunks[place], part.chunks) and not moves.sources[place].any()
        found.append((part, place))
    return found


def flat(pages: npt.NDArray[np.int32], counts: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
    """The first `counts` of each row, one after another."""
    return pages[np.arange(pages.shape[1]) < counts[:, None]]


def page_starts(starts: _Integers, counts: npt.NDArray[np.uint16], page_bytes: int) -> _Integers:
    """Where each page begins, in chunks that begin at `starts`, one after another."""
    ends = np.cumsum(counts, dtype=np.int64)
    number = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts, counts) + number * page_bytes
