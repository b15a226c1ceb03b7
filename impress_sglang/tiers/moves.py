"""Moves the bytes of chunks between tiers.

Stage: load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.loops.placing import page_moves
from impress_sglang.tiers.fence import CopyStream, Fence
from impress_sglang.tiers.page_copies import PageCopier
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


class ChunkMover:
    """Moves chunks, on a GPU concurrently with the model, on a stream of its own.

    One launch; two if a page is both source and target: such are set aside first. Readers of slabs
    call the copy stream's `join` before, `note_reading` after.
    """

    def __init__(
        self, page: PageShape, slabs: Mapping[int, Slab], stream: CopyStream, copier: PageCopier
    ) -> None:
        self._page_bytes = page.page_bytes
        self._device = slabs[Tier.DEVICE].device
        self._begins = np.zeros(len(Tier), np.int64)
        for tier in CACHES:
            self._begins[tier] = slabs[tier].address
        self._stream = stream
        self._copier = copier

    def move(self, moves: Moves, loaded: Sequence[LoadedChunks]) -> Fence:
        """Copy chunks to their new pages, which may be those of others; waits for nothing.

        Args:
            moves: at least one.
            loaded: each chunk that comes from SSD, once. They must not change before the fence.

        Returns:
            A fence after which all is copied.
        """
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
