"""How long prefixes are stored: segments older than the limit are removed, used or not.

The age of a segment is that of its file, so it outlasts restarts and needs no record. From time to
time all files are looked at in the background. A segment to which a request gave its own time to
live goes after that time, recorded in its file, if it is not too old before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future

from impress_sglang.management.begun import Begun
from impress_sglang.management.losses import Cause
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import StoredSegment
from impress_sglang.storage.directory import WrittenBefore

logger = logging.getLogger(__name__)

# Time between two looks at all files: a tenth of the time to live, within these bounds.
_SHORTEST_S, _LONGEST_S = 1.0, 60.0
# The most removals at once.
_MOST_SEGMENTS = 64


class Expiry:
    """Removes expired segments; owned by the thread of the store that it is given."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`seconds`: how long prefixes are stored; 0: until room is needed."""
        self._seconds = seconds
        self._period = min(max(seconds / 10, _SHORTEST_S), _LONGEST_S)
        self._clock = clock
        self._wall_clock = wall_clock
        self._look_at = 0.0
        self._look: Future[WrittenBefore] | None = None
        # By age asked for and name of order: the look, and the count of reorderings before it.
        self._asked = Begun[tuple[float, str], tuple[Future[WrittenBefore], int]]()
        self._going: list[str] = []

    def poll(self, store: PrefixStore) -> None:
        """Start looks that are due, and remove segments that are too old; never waits."""
        if due := store.tree.uses.take_due(self._wall_clock(), _MOST_SEGMENTS):
            store.writes.discard(_upwards(due), Cause.EXPIRED)
        if not self._seconds:
            return
        if self._going:
            going, self._going = self._going[:_MOST_SEGMENTS], self._going[_MOST_SEGMENTS:]
            store.writes.discard(_stored(store, going), Cause.EXPIRED)
        elif self._look is not None and self._look.done():
            self._going, self._look = _found(self._look), None
        elif self._look is None and self._clock() >= self._look_at:
            self._look_at = self._clock() + self._period
            self._look = self._older(store, self._seconds)

    def older_than(self, store: PrefixStore, seconds: float, order: str = "") -> list[str] | None:
        """Names of segments written so many seconds ago or earlier; None while the look is running.

        Callers, told apart by `order`, ask again until there is an answer, remove these segments,
        and then call `end_asking`.

        Raises:
            OSError: the disk failed; the next call begins another look.
        """
        name = seconds, order
        if (asked := self._asked.get(name)) is None:
            replaced = store.tree.replaced
            asked = self._asked.begin(name, (self._older(store, seconds), replaced))
        look, _ = asked
        if not look.done():
            return None
        failure = look.exception() or look.result().failure
        if failure is not None:
            self._asked.end(name)
            raise failure
        return look.result().segment_ids

    def end_asking(self, store: PrefixStore, seconds: float, order: str = "") -> bool:
        """End a look; True if another one is needed, as segments got new names by reordering."""
        name = seconds, order
        _, replaced = self._asked.get(name) or (None, -1)
        self._asked.end(name)
        return replaced != store.tree.replaced

    def forget(self) -> None:
        """Forget all looks, because the store is another one."""
        self._asked.clear()
        self._look, self._going = None, []

    def _older(self, store: PrefixStore, seconds: float) -> Future[WrittenBefore]:
        return store.worker.written_before(self._wall_clock() - seconds)


def _found(look: Future[WrittenBefore]) -> list[str]:
    """The segments found by a look; the next look sees those that this one could not."""
    failure = CancelledError() if look.cancelled() else look.exception()
    if failure is not None:
        logger.warning("what is too old cannot be looked up now: %s", failure)
        return []
    if (failure := look.result().failure) is not None:
        logger.warning("how old some segments are cannot be looked up: %s", failure)
    return look.result().segment_ids


def _stored(store: PrefixStore, segment_ids: list[str]) -> list[StoredSegment]:
    """Those of the segments that are still on the disk."""
    found = [store.tree.get(segment_id) for segment_id in segment_ids]
    return _upwards(own for own in found if own is not None and own.on_disk)


def _upwards(segments: Iterable[StoredSegment]) -> list[StoredSegment]:
    """Segments ordered so that each comes before those that it builds on."""
    return sorted(segments, key=lambda own: -own.info.prefix_len)
