"""The two chunk caches: placement of chunks and the memory that holds their bytes, in pages.

The pages of a chunk need not be neighbours, so that chunks of different sizes share the memory
without fragments.

The order of a read is fixed: `access` decides; rows are taken from the tiers of chunks *before*
that; then `apply_moves` performs the moves, with chunks read from SSD. No page changes in between.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from impress_sglang.errors import ConfigError
from impress_sglang.loops.types import Indices
from impress_sglang.storage.files import AlignedMemory
from impress_sglang.storage.layout import BLOCK_BYTES, round_up
from impress_sglang.tiers.copying import CopyStream, Fence, PageCopier, pin_memory
from impress_sglang.tiers.placement import CACHES, Access, Placement, Tier
from impress_sglang.tiers.rules import Ids, ReplacementRule


class ChunkCache:
    """The device and the host cache of one kind of chunks."""

    def __init__(
        self,
        page_bytes: int,
        max_chunk_pages: int,
        rule: ReplacementRule,
        *,
        device: torch.device,
        device_bytes: int,
        host_bytes: int,
    ) -> None:
        """Allocate both caches, for chunks of at most `max_chunk_pages` pages.

        If memory does not suffice, a `ConfigError` names the option.
        """
        self.device, self._page_bytes, self._width = device, page_bytes, max_chunk_pages
        on_gpu = device.type == "cuda"
        sizes = device_bytes // page_bytes, host_bytes // page_bytes
        self.placement = Placement(rule, *sizes, max_chunk_pages)
        # Keeps pinned memory alive.
        self._memories = list[AlignedMemory]()
        self.pages: dict[int, Tensor] = {}
        """Memory of cached chunks by tier: uint8 [pages, page_bytes]."""
        for tier, where in ((Tier.DEVICE, device), (Tier.HOST, torch.device("cpu"))):
            try:
                self.pages[tier] = self._allocate(self.placement.capacity[tier], where, pin=on_gpu)
            except (RuntimeError, OSError) as error:
                raise ConfigError(
                    f"{self.placement.capacity[tier] * page_bytes / 1e9:.1f} GB for chunks cannot "
                    f"be allocated on {where}; lower --impress-{tier.name.lower()}-gb: {error}"
                ) from error
        self.copy_stream = CopyStream(device)
        """Moves chunks; readers on the device call `join` before and `record_reading` after."""
        self.copier = PageCopier(page_bytes, device, kernels=on_gpu)
        """Copies pages from and to the caches."""

    def _allocate(self, count: int, device: torch.device, *, pin: bool) -> Tensor:
        """Allocate pages on a device; `pin` those of the host, for an accelerator to read."""
        size, num_bytes = (count, self._page_bytes), count * self._page_bytes
        if device.type != "cpu" or not count:
            return torch.empty(size, dtype=torch.uint8, device=device)
        memory = AlignedMemory(round_up(num_bytes, BLOCK_BYTES))
        self._memories.append(memory)
        if pin:
            pin_memory(memory)
        else:
            # Touch each page now, so that no request waits for it later.
            memory.words[:: BLOCK_BYTES // memory.words.itemsize] = 0
        return torch.frombuffer(memory.view, dtype=torch.uint8, count=num_bytes).view(size)

    def emptied(self, rule: ReplacementRule) -> ChunkCache:
        """Return an empty cache with the same memory; this one must no longer be used."""
        self._synchronize()
        taken = copy.copy(self)
        sizes = self.placement.capacity
        taken.placement = Placement(rule, sizes[Tier.DEVICE], sizes[Tier.HOST], self._width)
        self.pages, self._memories = {}, []
        return taken

    def begins(self, memory_address: int = 0) -> Ids:
        """Addresses of the frames of each tier, int64 [tiers]; those of SSD are at the argument."""
        caches = (self.pages[tier].data_ptr() for tier in (Tier.HOST, Tier.DEVICE))
        return np.array([memory_address, *caches])

    def apply_moves(self, access: Access, loaded: Ids, addresses: Indices) -> Fence | None:
        """Perform the moves, before the next access, without waiting.

        On a GPU chunks move concurrently with the model, on a stream of their own. `loaded` int64
        [n] are the chunks read from SSD, each kept one once, and `addresses` their starts in host
        memory: their pages follow one after another, and the end of the last page may have any
        content. Returns a fence before which that memory must not change; None if no chunk moves.
        """
        moves, size, begins = access.moves, self._page_bytes, self.begins()
        if not len(moves):
            return None
        starts, order = begins[moves.sources], np.argsort(moves.chunks)
        place = order[np.searchsorted(moves.chunks, loaded, sorter=order)]
        assert np.array_equal(moves.chunks[place], loaded) and not moves.sources[place].any()
        starts[place] = addresses
        # For each page, chunk after chunk.
        sources = np.repeat(starts, moves.counts) + moves.source_pages * size
        targets = np.repeat(begins[moves.targets], moves.counts) + moves.target_pages * size
        cached = np.flatnonzero(np.repeat(moves.sources != Tier.SSD, moves.counts))
        with self.copy_stream.after_reading():
            if len(cached) and np.isin(targets, sources[cached]).any():
                # Pages that are both source and target are copied to a buffer first.
                aside = torch.empty(len(cached), size, dtype=torch.uint8, device=self.device)
                kept = np.arange(len(cached)) * size + aside.data_ptr()
                self.copier.copy(sources[cached], kept)
                sources[cached] = kept
            return self.copier.copy(sources, targets)

    def close(self) -> None:
        """Free the memory; the cache must not be used afterwards."""
        self._synchronize()
        self.pages.clear()
        self._memories.clear()

    def _synchronize(self) -> None:
        """Wait for the device, because kernels on any stream may still be reading."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def summary(self) -> dict[str, object]:
        """Sizes and counters for the statistics page."""
        placement, size = self.placement, self._page_bytes
        tiers: dict[str, object] = {
            tier.name.lower(): {
                "capacity_bytes": placement.capacity[tier] * size,
                "used_bytes": placement.used_pages(tier) * size,
                "chunks": placement.cached_chunks(tier),
                "evicted_score": placement.evicted_scores.get(tier),
            }
            for tier in CACHES
        }
        return {**tiers, "dropped": placement.dropped}
