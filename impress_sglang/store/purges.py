"""What an operator orders to be forgotten, in steps."""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from impress_sglang.storage.segment import Tokens
from impress_sglang.store.journal import decoded, encoded
from impress_sglang.store.losses import Cause
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

# The most segments that one step removes.
MOST_SEGMENTS = 64
MOST_JOBS = 8

Name = TypeVar("Name", bound=Hashable)
Job = TypeVar("Job")


class MultiStepJobs(dict[Name, Job]):
    """Jobs by the names of orders: whoever has given an order continues it until it is done.

    Callers do not say that they give up. So the oldest job is forgotten when there are too many,
    and a caller who continues it after all begins again.
    """

    def go_on(self, name: Name, begin: Callable[[], Job]) -> Job:
        """The job of this name, which begins if there is none."""
        if name not in self:
            if len(self) == MOST_JOBS:
                del self[next(iter(self))]
            self[name] = begin()
        return self[name]


class Purge:
    """Removes, in steps, what is stored of a prefix and of all that begins with it.

    Between two steps requests are served; what they store of the prefix is removed as well. Other
    servers of the model are told, and remove what they had stored of it by then.
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
        self._place, self._unpins = (namespace, tokens), older_than is None
        self._before = math.inf if older_than is None else time.time() - older_than
        # If this is a time: segments of before it that are still to be removed.
        self._old = collections.deque[StoredSegment]()
        self._begun = False
        self.left = True
        """Whether another step is needed."""

    @classmethod
    def told(cls, order: Mapping[str, Any]) -> Purge:
        """The order of another server, which named the time."""
        text = order["tokens"]
        purge = cls(order["namespace"], None if text is None else decoded(text))
        purge._before, purge._unpins = float(order["before"]), order["unpins"]
        return purge

    def step(self, store: Any, most: int = MOST_SEGMENTS) -> Counter[str]:
        """Remove some segments of a `PrefixStore`.

        Returns how many `segments`, `tokens` and `bytes` on SSD are gone, `writes` were abandoned,
        and prefixes `unpinned`.

        Only the first step for old ones looks at all that are stored.

        Files are unlinked in the background, in order with writes. Running writes are abandoned, or
        their files removed where it is too late for that. Pins of what is removed go as well, and
        so does everything in quarantine, whatever it is of.
        """
        if not self.left:
            return Counter()
        # Segments published since the last poll have other names, or are not known to be there.
        store.poll()
        if not self._begun:
            now, (namespace, tokens) = time.time(), self._place
            order = {
                "at": now,
                "before": min(self._before, now),
                "unpins": self._unpins,
                "namespace": namespace,
                "tokens": None if tokens is None else encoded(tokens),
            }
            store.tell(order)
        return self.obey(store, most)

    def obey(self, store: Any, most: int = MOST_SEGMENTS) -> Counter[str]:
        """Take a step that other servers are not told of, within a poll."""
        first, self._begun = not self._begun, True
        tree, place, before, old = store.tree, self._place, self._before, self._old
        writes, unpinned = list[StoredSegment](), 0
        if first:
            if self._unpins:
                unpinned = store.pins.unpin(*place, before)
            store.places.refuse_unplaced(*place, min(before, time.time()))
            if before < math.inf:
                old += (own for own in tree.below(*place) if own.written <= before)
        # Those of the step before are not there any more.
        found = (old.popleft() for _ in range(len(old)))
        if before == math.inf:
            found = tree.below(*place)
        there = (own for own in found if own.on_disk and tree.get(own.segment_id) is own)
        going, more = list(itertools.islice(there, most)), next(there, None)
        self.left = more is not None
        if more is not None and before < math.inf:
            old.appendleft(more)
        if self._unpins and (first or not self.left):
            # All in the first step, as they read what is to be freed; newer ones in the last. An
            # order may be heard again: what is newer than it stays.
            earlier = (own for own in store.writes if own.written <= before)
            writes = [own for own in earlier if is_in(own, tree, *place)]
        # Dependents first.
        going.sort(key=lambda own: -own.info.prefix_len)
        given_up = store.writes.discard([*writes, *going], Cause.PURGED)
        return Counter(
            segments=len(going),
            tokens=sum(len(own.info.prompt_tokens) for own in going),
            bytes=sum(own.file_bytes for own in going),
            writes=given_up,
            unpinned=unpinned,
        )


def is_in(
    segment: StoredSegment, tree: StoredTree, namespace: str | None, tokens: Tokens | None
) -> bool:
    """Whether a segment of the tree has the end of a prefix or tokens behind it; see `Purge`."""
    if namespace not in (None, segment.info.namespace):
        return False
    if namespace is None or tokens is None or not len(tokens):
        return True
    # Go up to the segment with the prefix's last token; no tokens are compared on the way.
    while segment.parent is not None and segment.info.prefix_len >= len(tokens):
        segment = segment.parent
    return segment in tree.ends(namespace, tokens)
