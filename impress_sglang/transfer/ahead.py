"""Decides which layers of which requests are read before they ask, within memory and a budget.

Stage: load. Reading ahead changes when bytes are read, never which tokens a layer uses. Sources are
served in this order: of the running requests the one that has least read ahead of its current
layer, then waiting requests, in the order of the queue. Probe columns and what a whole prefix needs
are certain; of other blocks the likeliest are read, and what was read in vain is bounded by
`waste_budget`, a share of what was wanted.
"""

from __future__ import annotations

from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.stored_source import StoredSource

# Before anything was wanted, so much may be read in vain.
FIRST_ALLOWANCE_BYTES = 4 << 20


class ReadAhead:
    """Decides what is read ahead; one thread."""

    def __init__(self, pool: BufferPool, waste_budget: float) -> None:
        """`waste_budget` is 0 or more; 0 turns reading ahead off."""
        self._pool = pool
        self.waste_budget = waste_budget
        """May be changed; reads under way go on."""
        self._live: list[StoredSource] = []
        self._waiting: list[StoredSource] = []
        # Totals of sources that have left.
        self._ahead_bytes = 0
        self._used_bytes = 0
        self._wanted_bytes = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is read ahead."""
        return self.waste_budget > 0

    def join(self, source: StoredSource) -> None:
        """Note that a request begins to use a source, which may have waited until now."""
        self._waiting = [own for own in self._waiting if own is not source]
        self._live.append(source)
        self.top_up()

    def wait(self, source: StoredSource, lead: int) -> None:
        """Add the source of a waiting request: read `lead` of its first layers, at least one."""
        source.lead = lead
        self._waiting.append(source)
        self.top_up()

    def leave(self, source: StoredSource) -> None:
        """Remove a source that is closed; its counters are final."""
        self._waiting = [own for own in self._waiting if own is not source]
        self._live = [own for own in self._live if own is not source]
        stats = source.stats
        self._ahead_bytes += stats.ahead_bytes
        self._used_bytes += stats.ahead_used_bytes
        self._wanted_bytes += stats.ssd_bytes - stats.ahead_bytes + stats.ahead_used_bytes

    def top_up(self) -> None:
        """Begin to read the next layers, as long as there is room."""
        if not self.enabled:
            return
        waste_budget = self.waste_budget if self._within_budget() else 0.0
        while (source := self._next_live()) is not None:
            if not self._has_room(source):
                return
            source.read_ahead(waste_budget)
        for source in self._waiting:
            while source.wants_more:
                if not self._has_room(source):
                    return
                source.read_ahead(waste_budget)

    def _next_live(self) -> StoredSource | None:
        unread = [own for own in self._live if own.next_ahead < own.num_layers]
        return min(unread, key=lambda own: own.next_ahead - own.layer, default=None)

    def _has_room(self, source: StoredSource) -> bool:
        """Whether a layer fits beside the next layer of any running request not yet read ahead."""
        lacking = (
            own.layer_bytes
            for own in self._live
            if own is not source and own.next_ahead == own.layer + 1 < own.num_layers
        )
        return self._pool.has_room(source.layer_bytes + max(lacking, default=0))

    def _within_budget(self) -> bool:
        in_vain = self._ahead_bytes - self._used_bytes
        return in_vain <= self.waste_budget * self._wanted_bytes + FIRST_ALLOWANCE_BYTES
