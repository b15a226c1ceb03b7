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
import numpy.typing as npt
import torch

from impress_sglang.loops.types import Floats
from impress_sglang.tiers.fence import CopyStream, Fence
from impress_sglang.tiers.moves import ChunkMover, LoadedChunks
from impress_sglang.tiers.page_copies import make_copier
from impress_sglang.tiers.placement import (
    CACHES,
    Access,
    Placement,
    Tier,
    check_members,
    touch_tables,
)
from impress_sglang.tiers.rules import Ids, ReplacementRule
from impress_sglang.tiers.slab import PageShape, Slab
from impress_sglang.tiers.staging import Staging


@dataclasses.dataclass(slots=True)
class CopyStats:
    """Bytes of whole chunks that were copied between tiers since start."""

    promoted_bytes: int = 0
    demoted_bytes: int = 0


class ChunkCache:
    """The device and the host cache of one kind of chunks."""

    def __init__(
        self,
        page: PageShape,
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
        self.page = page
        self.copies = CopyStats()
        device_pages = device_bytes // self.page.page_bytes
        host_pages = host_bytes // self.page.page_bytes
        self.placement = Placement(
            rule,
            device_pages=device_pages,
            host_pages=host_pages,
            max_chunk_pages=max_chunk_pages,
        )
        touch_tables(self.placement)
        pin = device.type == "cuda"
        device_slab = Slab(self.page, device_pages, device, option="--impress-device-gb", pin=False)
        cpu = torch.device("cpu")
        host_slab = Slab(self.page, host_pages, cpu, option="--impress-host-gb", pin=pin)
        self.slabs: dict[int, Slab] = {Tier.DEVICE: device_slab, Tier.HOST: host_slab}
        """The memory from which cached chunks are read, by tier."""
        self.copy_stream = CopyStream(device)
        """Moves chunks; readers on the device call `join` before and `note_reading` after."""
        self.staging = Staging(device)
        """Where addresses of chunks are left for kernels."""
        self.copier = make_copier(self.page, device, self.staging)
        """Copies pages from and to the slabs."""
        self._mover = ChunkMover(self.page, self.slabs, self.copy_stream, self.copier)

    def emptied(self, rule: ReplacementRule) -> ChunkCache:
        """An empty cache that takes over the memory; this one must not be read any more."""
        self._synchronize()
        taken = copy.copy(self)
        taken.copies = CopyStats()
        taken.placement = self.placement.emptied(rule)
        self.slabs = {}
        return taken

    def begins(self, memory_address: int = 0) -> Ids:
        """Where frames of each tier begin in memory, int64 [tiers]; those of SSD are in memory."""
        host, device = (self.slabs[tier].address for tier in (Tier.HOST, Tier.DEVICE))
        return np.array([memory_address, host, device])

    def attach(self, chunk_pages: npt.NDArray[np.uint16]) -> int:
        """Take ids for new chunks with these numbers of pages; returns the first id."""
        return self.placement.attach(chunk_pages)

    def detach(self, base: int, count: int) -> None:
        """Forget chunks."""
        self.placement.detach(base, count)

    def expect(self, firsts: Ids, turns: Ids) -> None:
        """Note that requests wait for runs of neighbouring chunks, with the same turns in each run.

        `firsts` int64 [runs], the first id of each; `turns` int64 [chunks of a run], as for
        `AwaitedLast.expect`.
        """
        ids = firsts[:, None] + np.arange(len(turns))
        self.placement.expect(ids.reshape(-1), np.tile(turns, len(firsts)))

    def access(self, ids: Ids, shares: Floats) -> Access:
        """See `Placement.access`; every access must be settled or abandoned before the next."""
        return self.placement.access(ids, shares)

    def settle(self, access: Access, loaded: Sequence[LoadedChunks]) -> Fence | None:
        """Carry out the moves; `loaded` has each kept chunk once.

        Returns:
            A fence before which `loaded` must not change; None if there was nothing to move.
        """
        moves, size = access.moves, self.page.page_bytes
        if not len(moves):
            return None
        pages = moves.pages_moved()
        self.copies.promoted_bytes += int(pages[:, Tier.DEVICE].sum()) * size
        self.copies.demoted_bytes += int(pages[Tier.DEVICE, Tier.HOST]) * size
        return self._mover.move(moves, loaded)

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
            **dataclasses.asdict(self.placement.stats),
            **dataclasses.asdict(self.copies),
            "management_bytes": self.placement.num_bytes,
        }

    def check_integrity(self) -> None:
        """Check pages, tiers and heaps.

        Raises:
            AssertionError: they do not agree, which is a bug.
        """
        self.placement.check_integrity()

    def check_some(self, tier: Tier, first: int, most: int) -> bool:
        """Check some of the chunks of a tier; see `check_members`."""
        return check_members(self.placement, tier, first, most)

    def _tier_summary(self, tier: Tier) -> dict[str, float | None]:
        size = self.page.page_bytes
        return {
            "capacity_bytes": self.placement.capacity[tier] * size,
            "used_bytes": self.placement.used_pages(tier) * size,
            "chunks": self.placement.cached_chunks(tier),
            "evicted_score": self.placement.evicted_scores.get(tier),
        }
