"""How long prefixes are stored: what is older than it may be is removed, used or not.

The age of a segment is that of its file, so it outlasts restarts and needs no record. Files are
looked at in the background, all of them now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from impress_sglang.management.losses import Cause
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import StoredSegment

Look: TypeAlias = "Future[dict[str, float]]"
# Between two looks at all files: a tenth of the time that prefixes are stored, within these.
_SHORTEST_S, _LONGEST_S = 1.0, 60.0
# Removed at once.
_MOST_SEGMENTS = 256


class Expiry:
    """Owned by the thread of the store that it is given."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Prefixes are stored for so many seconds; 0: until room is needed."""
        self._seconds = seconds
        self._period = min(max(seconds / 10, _SHORTEST_S), _LONGEST_S)
        self._clock = clock
        self._wall_clock = wall_clock
        self._look_at = 0.0
        self._look: Look | None = None
        self._asked: Look | None = None
        self._asked_at = 0.0
        self._going: list[str] = []

    def poll(self, store: PrefixStore) -> None:
        """Begin what is due, and remove what is too old; never waits."""
        if not self._seconds:
            return
        if self._going:
            going, self._going = self._going[:_MOST_SEGMENTS], self._going[_MOST_SEGMENTS:]
            store.writes.discard(_stored(store, going), Cause.EXPIRED)
        elif self._look is not None and self._look.done():
            self._going = self._older(self._look, self._seconds)
            self._look = None
        elif self._look is None and self._clock() >= self._look_at:
            self._look_at = self._clock() + self._period
            self._look = store.writes.written_at()

    def older_than(self, store: PrefixStore, seconds: float) -> list[str] | None:
        """Names of segments that were written so long ago; None while that is being looked up.

        Who asks goes on asking until there is an answer, and then says `end_asking`.
        """
        if self._asked is None or self._clock() - self._asked_at > _LONGEST_S:
            self._asked, self._asked_at = store.writes.written_at(), self._clock()
        return self._older(self._asked, seconds) if self._asked.done() else None

    def end_asking(self) -> None:
        """The next one to ask wants another look."""
        self._asked = None

    def _older(self, look: Look, seconds: float) -> list[str]:
        """None of them where the disk could not be asked, which the next look may change."""
        if look.cancelled() or look.exception() is not None:
            return []
        latest = self._wall_clock() - seconds
        return [segment_id for segment_id, written in look.result().items() if written <= latest]


def _stored(store: PrefixStore, segment_ids: list[str]) -> list[StoredSegment]:
    """Those that are still there, what builds on others before them."""
    found = [store.tree.get(segment_id) for segment_id in segment_ids]
    stored = [own for own in found if own is not None and own.on_disk]
    return sorted(stored, key=lambda own: -own.info.prefix_len)
