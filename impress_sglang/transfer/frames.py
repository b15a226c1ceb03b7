"""Takes blocks of codes from where they are: device cache, host cache, layer buffers.

Stage: load. A *frame* is a block in memory: a page of a cache, or a block of a layer buffer.
"""

from __future__ import annotations

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


def take_frames(
    cache: ChunkCache,
    tiers: npt.NDArray[np.uint8],
    frames: Indices,
    memory: PooledMemory | None,
) -> Tensor:
    """Take blocks of a span, in the given order; on a GPU nothing is waited for.

    What is read stays unchanged, and chunks may move after the call.

    Args:
        cache: of codes.
        tiers: uint8 [n], `Tier` values.
        frames: int64 [n], page numbers in that cache, or block numbers in the layer buffer.
        memory: memory of the layer buffer; None if nothing is taken from there.

    Returns:
        uint8 [n, BLOCK_BYTES] on the device of the cache. On a CPU it may share `memory`.
    """
    if cache.copier.in_place and memory is not None and _in_sequence(tiers, frames):
        first = int(frames[0])
        return memory.vectors(torch.uint8, BLOCK_BYTES)[first : first + len(frames)]
    begins = cache.begins(0 if memory is None else memory.address)
    blocks = torch.empty(len(frames), BLOCK_BYTES, dtype=torch.uint8, device=cache.device)
    table = cache.copier.begin(len(frames))
    areas.block_copies(tiers, frames, begins, blocks.data_ptr(), BLOCK_BYTES, table)
    cache.copy_stream.join()
    fence = cache.copier.launch()
    cache.copy_stream.note_reading(fence)
    if memory is not None:
        memory.fence = fence
    return blocks


def _in_sequence(tiers: npt.NDArray[np.uint8], frames: Indices) -> bool:
    """Whether blocks stand one after another in the layer buffer."""
    return bool(len(frames) and (tiers == Tier.SSD).all() and (np.diff(frames) == 1).all())
