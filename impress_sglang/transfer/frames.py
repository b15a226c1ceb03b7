"""Takes blocks of codes from where they are: device cache, host cache, layer buffers.

Stage: load. A *frame* is a block in memory: a page of a cache, or a block of a layer buffer.
`FrameTaker` is the contract; tests/unit/triton/test_coded_paths.py compares the two.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.loops import areas
from impress_sglang.loops.types import Indices
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Tier
from impress_sglang.tiers.slab import PageShape
from impress_sglang.transfer.buffers import PooledMemory

# A page of a cache of codes is a block as it stands on disk.
_WORD = torch.int32
CODE_PAGE = PageShape(BLOCK_BYTES // _WORD.itemsize, 1, _WORD)


class FrameTaker(Protocol):
    """The contract: what is read stays unchanged, and chunks may move after the call."""

    def take(
        self, tiers: npt.NDArray[np.uint8], frames: Indices, memory: PooledMemory | None
    ) -> Tensor:
        """Take blocks of a span, in the given order.

        Args:
            tiers: uint8 [n], `Tier` values.
            frames: int64 [n], page numbers in that cache, or block numbers in the layer buffer.
            memory: memory of the layer buffer; None if nothing is taken from there.

        Returns:
            uint8 [n, BLOCK_BYTES] on the device of the cache. May share `memory`.
        """
        ...


def make_taker(cache: ChunkCache) -> FrameTaker:
    """The taker that fits the device of the cache."""
    return KernelTaker(cache) if cache.device.type == "cuda" else IndexedTaker(cache)


class IndexedTaker:
    """Takes blocks by tensor indexing, tier by tier."""

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache

    def take(
        self, tiers: npt.NDArray[np.uint8], frames: Indices, memory: PooledMemory | None
    ) -> Tensor:
        """See `FrameTaker`."""
        found = np.flatnonzero(np.bincount(tiers, minlength=len(Tier))).tolist()
        if len(found) == 1:
            return self._take_from(found[0], frames, memory)
        blocks = torch.empty(len(frames), BLOCK_BYTES, dtype=torch.uint8)
        for tier in found:
            place = np.flatnonzero(tiers == tier)
            own = self._take_from(tier, frames[place], memory)
            blocks.index_copy_(0, torch.from_numpy(place), own.cpu())
        return blocks

    def _take_from(self, tier: int, frames: Indices, memory: PooledMemory | None) -> Tensor:
        if tier != Tier.SSD:
            return self._cache.slabs[tier].read_pages(frames).view(torch.uint8)
        assert memory is not None
        blocks = memory.vectors(torch.uint8, BLOCK_BYTES)
        first = int(frames[0])
        if int(frames[-1]) - first == len(frames) - 1 and (np.diff(frames) == 1).all():
            return blocks[first : first + len(frames)]
        return blocks.index_select(0, torch.from_numpy(frames))


class KernelTaker:
    """Takes blocks from all tiers in one kernel launch, and waits for nothing."""

    def __init__(self, cache: ChunkCache) -> None:
        # Imported only where it is used: Triton is not needed on a CPU.
        from impress_sglang.tiers.page_copies import PageCopier

        self._cache = cache
        self._copier = PageCopier(cache.page, cache.device, cache.staging)

    def take(
        self, tiers: npt.NDArray[np.uint8], frames: Indices, memory: PooledMemory | None
    ) -> Tensor:
        """See `FrameTaker`."""
        cache = self._cache
        begins = cache.begins(0 if memory is None else memory.address)
        blocks = torch.empty(len(frames), BLOCK_BYTES, dtype=torch.uint8, device=cache.device)
        table = self._copier.begin(len(frames))
        areas.block_copies(tiers, frames, begins, blocks.data_ptr(), BLOCK_BYTES, table)
        cache.copy_stream.join()
        fence = self._copier.launch()
        cache.copy_stream.note_reading(fence)
        if memory is not None:
            memory.fence = fence
        return blocks
