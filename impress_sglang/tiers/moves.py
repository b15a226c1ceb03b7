"""Carries out which chunks move between tiers.

Stage: load. `ChunkMover` is the contract: `IndexedMover` indexes tensors, on any device;
`KernelMover` launches kernels on a stream of their own, beside computing, and is what a GPU uses.
tests/unit/test_chunk_cache.py runs the first, tests/unit/triton/test_moves.py the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.tiers.fence import CopyStream, Fence
from impress_sglang.tiers.placement import Move, Tier
from impress_sglang.tiers.slab import PageShape, Slab


class ChunkMover(Protocol):
    """The contract.

    All sources are as they were before the first page is written: a page may be both. Who reads
    slabs on a device joins the copy stream before, and tells it afterwards.
    """

    def move(self, moves: Sequence[Move], loaded: Mapping[int, Tensor]) -> Fence:
        """Copy chunks to their new pages.

        Args:
            moves: at least one.
            loaded: bytes (uint8, CPU) of each chunk that comes from SSD, by id; as many as its
                pages have, or fewer if the last page has a rest, for which the memory behind them
                may be read. They must not change before the fence.

        Returns:
            When all is copied.
        """
        ...


def make_mover(page: PageShape, slabs: Mapping[int, Slab], stream: CopyStream) -> ChunkMover:
    """What fits the device of the slabs."""
    kind = KernelMover if slabs[Tier.DEVICE].device.type == "cuda" else IndexedMover
    return kind(page, slabs, stream)


class IndexedMover:
    """Tensor indexing, group by group of moves between the same tiers."""

    def __init__(self, page: PageShape, slabs: Mapping[int, Slab], stream: CopyStream) -> None:
        self._page = page
        self._slabs = slabs

    def move(self, moves: Sequence[Move], loaded: Mapping[int, Tensor]) -> Fence:
        """See `ChunkMover`."""
        groups: dict[tuple[int, int], list[Move]] = {}
        for move in moves:
            groups.setdefault((move.source, move.target), []).append(move)
        contents = {
            (source, target): self._contents(source, own, loaded)
            for (source, target), own in groups.items()
        }
        for (source, target), own in groups.items():
            self._slabs[target].write_pages(target_pages(own), contents[source, target])
        return Fence(self._slabs[Tier.DEVICE].device)

    def _contents(self, source: int, moves: Sequence[Move], loaded: Mapping[int, Tensor]) -> Tensor:
        if source == Tier.SSD:
            return torch.cat([self._paged(loaded[m.chunk], len(m.target_pages)) for m in moves])
        return self._slabs[source].read_pages(source_pages(moves))

    def _paged(self, data: Tensor, num_pages: int) -> Tensor:
        """Bytes of a chunk as pages [p, page_vectors * unit]; the last one may have a rest."""
        size = num_pages * self._page.page_bytes
        if len(data) < size:
            data = torch.nn.functional.pad(data, (0, size - len(data)))
        return data[:size].view(self._page.dtype).view(num_pages, -1)


class KernelMover:
    """Two launches: chunks that leave their pages are set aside, then all pages are written."""

    def __init__(self, page: PageShape, slabs: Mapping[int, Slab], stream: CopyStream) -> None:
        # Only where it is used: Triton is not needed on a CPU.
        from impress_sglang.tiers.page_copies import PageCopier

        self._page = page
        self._slabs = slabs
        self._device = slabs[Tier.DEVICE].device
        self._stream = stream
        self._copier = PageCopier(page, self._device)

    def move(self, moves: Sequence[Move], loaded: Mapping[int, Tensor]) -> Fence:
        """See `ChunkMover`; nothing is waited for."""
        cached = [move for move in moves if move.source != Tier.SSD]
        with self._stream.after_reading():
            aside = self._set_aside(cached)
            first_bytes = {}
            start = aside.data_ptr()
            for move in cached:
                first_bytes[move.chunk] = start
                start += len(move.target_pages) * self._page.page_bytes
            for move in moves:
                if move.source == Tier.SSD:
                    first_bytes[move.chunk] = loaded[move.chunk].data_ptr()
            self._write(moves, first_bytes)
            return Fence(self._device)

    def _set_aside(self, moves: Sequence[Move]) -> Tensor:
        """Pages [p, elements] on the device with what cached chunks hold, one after another."""
        sources = [
            self._slabs[move.source].page_addresses(np.array(move.source_pages, np.int64))
            for move in moves
        ]
        count = sum(map(len, sources))
        aside = torch.empty(count, self._page.elements, dtype=self._page.dtype, device=self._device)
        if count:
            self._copier.copy([(aside, None, np.concatenate(sources))])
        return aside

    def _write(self, moves: Sequence[Move], first_bytes: Mapping[int, int]) -> None:
        """Fill the target pages of all moves from neighbouring pages in memory."""
        copies = []
        for tier in (Tier.DEVICE, Tier.HOST):
            own = [move for move in moves if move.target == tier]
            if own:
                counts = np.array([len(move.target_pages) for move in own])
                begin = np.array([first_bytes[move.chunk] for move in own], np.int64)
                number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
                addresses = np.repeat(begin, counts) + number * self._page.page_bytes
                copies.append((self._slabs[tier].pages, target_pages(own), addresses))
        self._copier.copy(copies)


def source_pages(moves: Sequence[Move]) -> npt.NDArray[np.int32]:
    """Where some cached chunks are, one after another."""
    return np.array([page for move in moves for page in move.source_pages], np.int32)


def target_pages(moves: Sequence[Move]) -> npt.NDArray[np.int32]:
    """Where some chunks go, one after another."""
    return np.array([page for move in moves for page in move.target_pages], np.int32)
