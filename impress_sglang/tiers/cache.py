"""The two chunk caches: placement of chunks and the slabs that hold their bytes.

Stage: load. The order of a read is fixed: `access` decides; rows are taken from where chunks were
*before* that; then `settle` carries the moves out, with the bytes that were read from SSD. Between
`access` and `settle` no page changes, so rows and moves see the same bytes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops.types import Floats, Indices
from impress_sglang.tiers.fence import CopyStream, Fence
from impress_sglang.tiers.page_copies import make_copier
from impress_sglang.tiers.placement import CACHES, Access, Moves, Placement, Tier
from impress_sglang.tiers.rules import Ids, ReplacementRule
from impress_sglang.tiers.slab import Slab
from impress_sglang.tiers.staging import Staging


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedChunks:
    """Chunks that were read from SSD into one memory, uint8 on the CPU.

    `chunks` int64 [n] are their ids, distinct; `starts` int64 [n] the byte where each begins. From
    there on its pages follow one after another; the memory also covers the unused rest of a last
    page, with any content.
    """

    memory: Tensor
    chunks: Indices
    starts: Indices


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
        """Allocate both slabs, for chunks of at most `max_chunk_pages` pages.

        Raises:
            ConfigError: there is not enough memory.
        """
        self.device = device
        self._page_bytes = page_bytes
        # Of whole chunks that were copied between tiers since start.
        self._promoted_bytes = self._demoted_bytes = 0
        self._max_chunk_pages = max_chunk_pages
        device_pages = device_bytes // page_bytes
        host_pages = host_bytes // page_bytes
        self.placement = Placement(
            rule,
            device_pages=device_pages,
            host_pages=host_pages,
            max_chunk_pages=max_chunk_pages,
        )
        cpu, pin = torch.device("cpu"), device.type == "cuda"
        self.slabs: dict[int, Slab] = {
            Tier.DEVICE: Slab(
                page_bytes, device_pages, device, option="--impress-device-gb", pin=False
            ),
            Tier.HOST: Slab(page_bytes, host_pages, cpu, option="--impress-host-gb", pin=pin),
        }
        """The memory from which cached chunks are read, by tier."""
        self.copy_stream = CopyStream(device)
        """Moves chunks; readers on the device call `join` before and `note_reading` after."""
        self.staging = Staging(device)
        """Where addresses of chunks are left for kernels."""
        self.copier = make_copier(page_bytes, device, self.staging)
        """Copies pages from and to the slabs."""

    def emptied(self, rule: ReplacementRule) -> ChunkCache:
        """An empty cache that takes over the memory; this one must not be read any more."""
        self._synchronize()
        taken = copy.copy(self)
        taken._promoted_bytes = taken._demoted_bytes = 0
        sizes = self.placement.capacity
        taken.placement = Placement(
            rule,
            device_pages=sizes[Tier.DEVICE],
            host_pages=sizes[Tier.HOST],
            max_chunk_pages=self._max_chunk_pages,
        )
        self.slabs = {}
        return taken

    def begins(self, memory_address: int = 0) -> Ids:
        """Where frames of each tier begin in memory, int64 [tiers]; those of SSD are in memory."""
        host, device = (self.slabs[tier].address for tier in (Tier.HOST, Tier.DEVICE))
        return np.array([memory_address, host, device])

    def expect(self, firsts: Ids, turns: Ids) -> None:
        """Note that requests wait for runs of neighbouring chunks, with the same turns in each run.

        `firsts` int64 [runs], the first id of each; `turns` int64 [chunks of a run], as for
        `ReplacementRule.expect`.
        """
        ids = firsts[:, None] + np.arange(len(turns))
        self.placement.expect(ids.reshape(-1), np.tile(turns, len(firsts)))

    def access(self, ids: Ids, shares: Floats) -> Access:
        """See `Placement.access`; every access must be settled or abandoned before the next."""
        return self.placement.access(ids, shares)

    def settle(self, access: Access, loaded: Sequence[LoadedChunks]) -> Fence | None:
        """Carry out the moves; `loaded` has each kept chunk once. Waits for nothing.

        On a GPU chunks move concurrently with the model, on a stream of their own.

        Returns:
            A fence before which `loaded` must not change; None if there was nothing to move.
        """
        moves, size = access.moves, self._page_bytes
        if not len(moves):
            return None
        pages = moves.pages_moved()
        self._promoted_bytes += int(pages[:, Tier.DEVICE].sum()) * size
        self._demoted_bytes += int(pages[Tier.DEVICE, Tier.HOST]) * size
        sources, targets = self._addresses(moves, loaded)
        cached = np.flatnonzero(np.repeat(moves.sources != Tier.SSD, moves.counts))
        with self.copy_stream.after_reading():
            if len(cached) and np.isin(targets, sources[cached]).any():
                # Pages that are both source and target are set aside first.
                aside = torch.empty(len(cached), size, dtype=torch.uint8, device=self.device)
                kept = np.arange(len(cached)) * size + aside.data_ptr()
                self.copier.copy(sources[cached], kept)
                sources[cached] = kept
            return self.copier.copy(sources, targets)

    def _addresses(self, moves: Moves, loaded: Sequence[LoadedChunks]) -> tuple[Indices, Indices]:
        """Where the pages of chunks are and where they go, int64 [pages], chunk after chunk."""
        begins, places = self.begins(), np.arange(moves.target_pages.shape[1])
        on_ssd = (moves.sources == Tier.SSD)[:, None]
        sources = np.where(on_ssd, places, moves.source_pages) * self._page_bytes
        sources += (begins[moves.sources] + _starts(moves, loaded))[:, None]
        targets = moves.target_pages.astype(np.int64) * self._page_bytes
        targets += begins[moves.targets][:, None]
        used = places < moves.counts[:, None]
        return sources[used], targets[used]

    def abandon(self, access: Access) -> None:
        """Give up an access whose read failed: chunks that were to move are in no cache then."""
        self.placement.drop(access.moves.chunks)

    def close(self) -> None:
        """Free the memory; nothing can be read or placed any more."""
        self._synchronize()
        self.slabs.clear()

    def _synchronize(self) -> None:
        """Wait for the device, because kernels on any stream may still be reading."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def summary(self) -> dict[str, object]:
        """Sizes and counters for the statistics page."""
        return {
            **{tier.name.lower(): self._tier_summary(tier) for tier in CACHES},
            **self.placement.moved(),
            "promoted_bytes": self._promoted_bytes,
            "demoted_bytes": self._demoted_bytes,
            "management_bytes": self.placement.num_bytes,
        }

    def _tier_summary(self, tier: Tier) -> dict[str, float | None]:
        size = self._page_bytes
        return {
            "capacity_bytes": self.placement.capacity[tier] * size,
            "used_bytes": self.placement.used_pages(tier) * size,
            "chunks": self.placement.cached_chunks(tier),
            "evicted_score": self.placement.evicted_scores.get(tier),
        }


def _starts(moves: Moves, loaded: Sequence[LoadedChunks]) -> Indices:
    """Where chunks that were read begin in memory, int64 [moves]; 0 for those from a cache."""
    starts, order = np.zeros(len(moves), np.int64), np.argsort(moves.chunks)
    for part in loaded:
        place = order[np.searchsorted(moves.chunks, part.chunks, sorter=order)]
        assert np.array_equal(moves.chunks[place], part.chunks) and not moves.sources[place].any()
        starts[place] = part.memory.data_ptr() + part.starts
    return starts
