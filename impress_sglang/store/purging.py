"""What is to be forgotten: at an operator's order, or because it is too old.

The age of a segment is that of its file, so it outlasts restarts and needs no record; files are
looked at in the background. A segment to which a request gave its own time to live goes after that
time, recorded in its file, if it is not too old before.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from impress_sglang.storage.directory import WrittenBefore
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.losses import Cause
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

logger = logging.getLogger(__name__)
Name = TypeVar("Name", bound=Hashable)
Job = TypeVar("Job")

# Limits of one step: segments that are removed, and segments that are looked at.
MOST_SEGMENTS = 64
MOST_LOOKS = 2048
MOST_JOBS = 8
# Time between two looks at all files: a tenth of the time to live, within these bounds.
_SHORTEST_S, _LONGEST_S = 1.0, 60.0


class MultiStepJobs(Generic[Name, Job]):
    """Jobs by the names of orders: whoever has given an order continues it until it is done.

    Callers do not say that they give up. So the oldest job is forgotten when there are too many,
    and a caller who continues it after all begins again.
    """

    def __init__(self) -> None:
        """Begin with no jobs."""
        self._jobs: dict[Name, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def go_on(self, name: Name, begin: Callable[[], Job]) -> Job:
        """The job of this name, which begins if there is none."""
        if name not in self._jobs:
            if len(self._jobs) == MOST_JOBS:
                del self._jobs[next(iter(self._jobs))]
            self._jobs[name] = begin()
        return self._jobs[name]

    def end(self, name: Name) -> None:
        """End the job of this name; no error if it was forgotten."""
        self._jobs.pop(name, None)

    def clear(self) -> None:
        """Forget all jobs."""
        self._jobs.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class Purged:
    """What one step has removed; `bytes` are on SSD, `writes` were abandoned."""

    segment_ids: tuple[str, ...] = ()
    tokens: int = 0
    bytes: int = 0
    writes: int = 0
    unpinned: int = 0


class Purge:
    """Removes, in steps, what is stored of a prefix and of all that begins with it.

    Between two steps requests are served; what they store of the prefix is removed as well.
    """

    def __init__(
        self,
        namespace: str | None = None,
        tokens: Tokens | None = None,
        older_than: float | None = None,
        cause: Cause = Cause.PURGED,
    ) -> None:
        """Begin with nothing removed.

        Args:
            namespace: as the store names it; None: all namespaces.
            tokens: the prefix, int32 [n], n > 0, in a namespace; None: all of the namespace.
            older_than: remove only what was written so many seconds ago or earlier, and no pins.
            cause: why; unless that is an order, files of unknown age are only logged.
        """
        assert tokens is None or (namespace is not None and len(tokens))
        self._namespace = namespace
        self._tokens = tokens
        self._seconds = older_than
        self._cause = cause
        self._look: Future[WrittenBefore] | None = None
        # Segments that are old enough, and the count of reorderings before the look at their files.
        self._among: list[str] = []
        self._replaced = -1
        self._begun = False
        self.left = True
        """Whether another step is needed."""

    def step(self, store: PrefixStore, most: int = MOST_SEGMENTS) -> Purged:
        """Remove some segments, in a time that does not grow with how many there are.

        Files are unlinked in the background, in order with writes. Running writes are abandoned, or
        their files removed where it is too late for that. Pins of what is removed go as well, and
        so does everything in quarantine, whatever it is of.

        Raises:
            OSError: the disk does not say how old segments are.
        """
        if not self.left:
            return Purged()
        # Segments published since the last poll have other names, or are not known to be there.
        store.poll()
        first, self._begun = not self._begun, True
        writes, unpinned = list[StoredSegment](), 0
        if self._seconds is not None:
            if not self._among and not self._looked(store, self._seconds):
                return Purged()
            going = self._next_named(store.tree, self._among, most)
            # Reordered segments have other names; expiry finds them when it looks again.
            missed = self._cause is Cause.PURGED and self._replaced != store.tree.replaced
            self.left = bool(self._among) or missed
        else:
            going = self._next_stored(store.tree, most)
            if first:
                unpinned = store.pins.unpin(self._namespace, self._tokens)
            if first or not self.left:
                # All in the first step, as they read what is to be freed; newer ones in the last.
                place = _Place(store.tree, self._namespace, self._tokens)
                writes = [own for own, _ in store.writes if place.has(own)]
        # Dependents first.
        going.sort(key=lambda own: -own.info.prefix_len)
        given_up = store.writes.discard([*writes, *going], self._cause)
        return Purged(
            segment_ids=tuple(own.segment_id for own in going),
            tokens=sum(own.info.num_tokens for own in going),
            bytes=sum(own.file_bytes for own in going),
            writes=given_up,
            unpinned=unpinned,
        )

    def _looked(self, store: PrefixStore, seconds: float) -> bool:
        """Whether the look at the ages of all files, which this begins, has ended."""
        if self._look is None:
            self._replaced = store.tree.replaced
            self._look = store.worker.written_before(time.time() - seconds)
        if not self._look.done():
            return False
        look, self._look = self._look, None
        if (failure := look.exception() or look.result().failure) is not None:
            if self._cause is Cause.PURGED:
                raise failure
            logger.warning("how old some segments are cannot be looked up: %s", failure)
        self._among = [] if look.exception() else look.result().segment_ids
        return True

    def _next_stored(self, tree: StoredTree, most: int) -> list[StoredSegment]:
        """The first segments; those of the step before are not there any more."""
        going = list[StoredSegment]()
        for segment in tree.below(self._namespace, self._tokens):
            if segment.on_disk:
                if len(going) == most:
                    return going
                going.append(segment)
        self.left = False
        return going

    def _next_named(self, tree: StoredTree, names: list[str], most: int) -> list[StoredSegment]:
        """Some of the named segments; each name is looked at once, and not again in later steps."""
        going, place = list[StoredSegment](), _Place(tree, self._namespace, self._tokens)
        for _ in range(min(len(names), MOST_LOOKS)):
            segment = tree.get(names.pop())
            if segment is not None and segment.on_disk and place.has(segment):
                going.append(segment)
            if len(going) == most or place.looks >= MOST_LOOKS:
                break
        return going


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
        self._purge: Purge | None = None

    def poll(self, store: PrefixStore) -> None:
        """Start looks that are due, and remove segments that are too old; never waits."""
        if due := store.tree.order.take_due(self._wall_clock(), MOST_SEGMENTS):
            due.sort(key=lambda own: -own.info.prefix_len)
            store.writes.discard(due, Cause.EXPIRED)
        if self._seconds and self._purge is None and self._clock() >= self._look_at:
            self._look_at = self._clock() + self._period
            self._purge = Purge(older_than=self._seconds, cause=Cause.EXPIRED)
        if self._purge is not None:
            self._purge.step(store)
            self._purge = self._purge if self._purge.left else None

    def forget(self) -> None:
        """Forget what was found, because the store is another one."""
        self._purge = None


class _Place:
    """A prefix or a namespace, as the tree is now."""

    def __init__(self, tree: StoredTree, namespace: str | None, tokens: Tokens | None) -> None:
        self._namespace = namespace
        self._length, self._ends = 0, set[StoredSegment]()
        if namespace is not None and tokens is not None:
            self._length, self._ends = len(tokens), tree.ends(namespace, tokens)
        self.looks = 0
        """Number of looks at segments so far."""

    def has(self, segment: StoredSegment) -> bool:
        """Whether a segment of the tree has the end of the prefix or tokens behind it."""
        self.looks += 1
        if self._namespace not in (None, segment.info.namespace):
            return False
        # Go up to the segment with the prefix's last token; no tokens are compared on the way.
        while segment.parent is not None and segment.info.prefix_len >= self._length > 0:
            segment = segment.parent
            self.looks += 1
        return not self._length or segment in self._ends
