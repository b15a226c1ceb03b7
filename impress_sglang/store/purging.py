"""What is to be forgotten at an operator's order."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from impress_sglang.storage.segment import Tokens
from impress_sglang.store.losses import Cause
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

Name = TypeVar("Name", bound=Hashable)
Job = TypeVar("Job")

# Limits of one step: segments that are removed, and segments that are looked at.
MOST_SEGMENTS = 64
MOST_LOOKS = 2048
MOST_JOBS = 8


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
    ) -> None:
        """Begin with nothing removed.

        Args:
            namespace: as the store names it; None: all namespaces.
            tokens: the prefix, int32 [n], n > 0, in a namespace; None: all of the namespace.
            older_than: remove only what was written so many seconds ago or earlier, and no pins.
        """
        assert tokens is None or (namespace is not None and len(tokens))
        self._namespace = namespace
        self._tokens = tokens
        self._before = None if older_than is None else time.time() - older_than
        # Segments whose age is still to be looked at.
        self._among: list[StoredSegment] = []
        self._begun = False
        self.left = True
        """Whether another step is needed."""

    def step(self, store: PrefixStore, most: int = MOST_SEGMENTS) -> Purged:
        """Remove some segments, in a time that hardly grows with how many there are.

        Files are unlinked in the background, in order with writes. Running writes are abandoned, or
        their files removed where it is too late for that. Pins of what is removed go as well, and
        so does everything in quarantine, whatever it is of.
        """
        if not self.left:
            return Purged()
        # Segments published since the last poll have other names, or are not known to be there.
        store.poll()
        first, self._begun = not self._begun, True
        writes, unpinned = list[StoredSegment](), 0
        place = _Place(store.tree, self._namespace, self._tokens)
        if self._before is not None:
            if first:
                self._among = list(store.tree.segments())
            going = self._next_old(store.tree, place, self._before, most)
            self.left = bool(self._among)
        else:
            going = self._next_stored(store.tree, most)
            if first:
                unpinned = store.pins.unpin(self._namespace, self._tokens)
            if first or not self.left:
                # All in the first step, as they read what is to be freed; newer ones in the last.
                writes = [own for own, _ in store.writes if place.has(own)]
        # Dependents first.
        going.sort(key=lambda own: -own.info.prefix_len)
        given_up = store.writes.discard([*writes, *going], Cause.PURGED)
        return Purged(
            segment_ids=tuple(own.segment_id for own in going),
            tokens=sum(own.info.num_tokens for own in going),
            bytes=sum(own.file_bytes for own in going),
            writes=given_up,
            unpinned=unpinned,
        )

    def _next_stored(self, tree: StoredTree, most: int) -> list[StoredSegment]:
        """The first segments; those of the step before are not there any more."""
        on_disk = (own for own in tree.below(self._namespace, self._tokens) if own.on_disk)
        going = list(itertools.islice(on_disk, most + 1))
        self.left = len(going) > most
        return going[:most]

    def _next_old(
        self, tree: StoredTree, place: _Place, before: float, most: int
    ) -> list[StoredSegment]:
        """Some segments that are old enough; each is looked at once, and not in later steps."""
        going = list[StoredSegment]()
        while self._among and len(going) < most and place.looks < MOST_LOOKS:
            own = self._among.pop()
            there = tree.get(own.segment_id) is own and own.on_disk
            if place.has(own) and there and own.written <= before:
                going.append(own)
        return going


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
