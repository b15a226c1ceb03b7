"""Decides which layers of which requests are read ahead, within a memory limit.

This changes when bytes are read, never which tokens a layer uses. The running request with the
fewest layers read ahead of its current layer comes first, then waiting ones in queue order.
"""

from __future__ import annotations

from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.sources import StoredSource


class ReadAhead:
    """Decides what is read ahead; one thread."""

    def __init__(self, pool: BufferPool, *, enabled: bool) -> None:
        self._pool = pool
        self.enabled = enabled
        """Whether to read ahead at all."""
        # Whether a request uses the source already, or only waits for it.
        self._live: dict[StoredSource, bool] = {}

    def add_running(self, source: StoredSource) -> None:
        """Add the source of a running request; it may have been waiting until now."""
        self.remove(source)
        self._live[source] = True
        self.top_up()

    def add_waiting(self, source: StoredSource) -> None:
        """Add the source of a waiting request."""
        self._live[source] = False
        self.top_up()

    def remove(self, source: StoredSource) -> None:
        """Remove a source that is closed."""
        self._live.pop(source, None)

    def top_up(self) -> None:
        """Begin to read the next layers, as long as there is room."""
        while (source := self._next()) is not None and self.enabled and self._has_room(source):
            source.read_ahead()

    def _next(self) -> StoredSource | None:
        unread = [other for other in self._live if other.next_ahead < other.num_layers]
        live = [other for other in unread if self._live[other]]
        return min(
            live or unread[:1], key=lambda other: other.next_ahead - other.layer, default=None
        )

    def _has_room(self, source: StoredSource) -> bool:
        """Whether a layer fits beside the next layer of any running request not yet read ahead."""
        lacking = (
            other.layer_bytes
            for other, live in self._live.items()
            if live
            and other is not source
            and other.next_ahead == other.layer + 1 < other.num_layers
        )
        return self._pool.has_room(source.layer_bytes + max(lacking, default=0))
