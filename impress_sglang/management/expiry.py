"""How long prefixes are stored: what is older than it may be is removed, used or not.

The age of a segment is that of its file, so it outlasts restarts and needs no record. Files are
looked at in the background, all of them now and then. What a request has given a time of its own
goes then, if it is not too old before; that time is in its file.
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

# Between two looks at all files: a tenth of the time that prefixes are stored, within these.
_SHORTEST_S, _LONGEST_S = 1.0, 60.0
# Removals at once.
_MOST_SEGMENTS = 64


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
        self._look: Future[WrittenBefore] | None = None
        # By the age that somebody has asked for: the look, and what was reordered before it.
        self._asked = Begun[tuple[float, str], tuple[Future[WrittenBefore], int]]()
        self._going: list[str] = []

    def poll(self, store: PrefixStore) -> None:
        """Begin what is due, and remove what is too old; never waits."""
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
        """Names of segments that were written so long ago; None while that is being looked up.

        Who asks, by the name of an order, goes on asking until there is an answer, removes these,
        and then says `end_asking`.

        Raises:
            OSError: the disk cannot be asked; the next one to ask has it asked again.
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
        """Whether another look is needed: what was reordered since that one has another name."""
        name = seconds, order
        _, replaced = self._asked.get(name) or (None, -1)
        self._asked.end(name)
        return replaced != store.tree.replaced

    def forget(self) -> None:
        """The store is another one."""
        self._asked.clear()
        self._look, self._going = None, []

    def _older(self, store: PrefixStore, seconds: float) -> Future[WrittenBefore]:
        return store.writes.written_before(self._wall_clock() - seconds)


def _found(look: Future[WrittenBefore]) -> list[str]:
    """What could be looked at; the rest at the next look."""
    failure = CancelledError() if look.cancelled() else look.exception()
    if failure is not None:
        logger.warning("what is too old cannot be looked up now: %s", failure)
        return []
    if (failure := look.result().failure) is not None:
        logger.warning("how old some segments are cannot be looked up: %s", failure)
    return look.result().segment_ids


def _stored(store: PrefixStore, segment_ids: list[str]) -> list[StoredSegment]:
    """Those that are still there."""
    found = [store.tree.get(segment_id) for segment_id in segment_ids]
    return _upwards(own for own in found if own is not None and own.on_disk)


def _upwards(segments: Iterable[StoredSegment]) -> list[StoredSegment]:
    """What builds on others before them."""
    return sorted(segments, key=lambda own: -own.info.prefix_len)
