"""Orders segments for eviction, by last use, and for expiry; last uses outlast restarts."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from impress_sglang.storage.segment import Priority
from impress_sglang.store.stored import StoredSegment

# `last_access` of a segment whose addition is not a use of it, nor of its ancestors.
LEAST = -1


class EvictionOrder:
    """Segments that have a file or will have one: lowest level first, then least recently used.

    A use of a segment is also a use of its ancestors, and these have no lower level. So a segment
    precedes its ancestors, and a search for an evictable segment without dependents finds it in
    front, for any number of segments.
    """

    def __init__(self, ttl: float = 0.0) -> None:
        """`ttl`: seconds after which all segments expire, unless they do earlier; 0: never."""
        self._ttl = ttl
        # By namespace, None for all namespaces, and by level.
        self._orders: dict[tuple[str | None, Priority], OrderedDict[StoredSegment, None]] = (
            defaultdict(OrderedDict)
        )
        self._changed: dict[StoredSegment, None] = {}
        self.now = 0
        """Number of uses so far, the clock of `last_access`."""
        # Heap of times of expiry, and a number per segment that breaks ties.
        self._due: list[tuple[float, int, StoredSegment]] = []

    def __iter__(self) -> Iterator[StoredSegment]:
        return self.of(None)

    def __contains__(self, segment: StoredSegment) -> bool:
        return segment in self._orders.get((None, segment.level), ())

    def __len__(self) -> int:
        return sum(len(self._orders.get((None, priority), ())) for priority in Priority)

    def latest(self) -> Iterator[StoredSegment]:
        """Return all segments of any level, most recently used first."""
        orders = (
            reversed(self._orders.get((None, priority), {})) for priority in reversed(Priority)
        )
        return heapq.merge(*orders, key=lambda segment: -segment.last_access)

    def of(self, namespace: str | None) -> Iterator[StoredSegment]:
        """Return segments of a namespace in eviction order; their dependents have the same one."""
        orders = (self._orders.get((namespace, priority), ()) for priority in Priority)
        return itertools.chain.from_iterable(orders)

    def add(self, segment: StoredSegment) -> None:
        """Add a segment of the tree; unless an earlier process has stored it, this is a use."""
        self._join(segment)
        expires, every = segment.info.expires or math.inf, self._ttl or math.inf
        segment.due = due = min(expires, segment.written + every)
        if due < math.inf:
            if len(self._due) > 2 * len(self):
                # Otherwise segments that were removed before they expired would stay until then.
                self._due = [entry for entry in self._due if entry[2] in self]
                heapq.heapify(self._due)
            heapq.heappush(self._due, (due, id(segment), segment))
        self.settle(segment.parent)
        if segment.last_access == LEAST and not segment.num_dependents:
            for order in self._orders_of(segment):
                order.move_to_end(segment, last=False)
        elif segment.last_access <= 0:
            self.note(segment)

    def remove(self, segment: StoredSegment) -> None:
        if segment in self:
            self._leave(segment)
        self._changed.pop(segment, None)

    def note(self, segment: StoredSegment) -> None:
        """Count a use of a segment and of its ancestors."""
        self.now += 1
        used: StoredSegment | None = segment
        while used is not None:
            used.last_access = self.now
            # A segment may have been removed since the match.
            if used in self:
                for order in self._orders_of(used):
                    order.move_to_end(used)
                self._changed[used] = None
            used = used.parent

    def settle(self, segment: StoredSegment | None) -> None:
        """Update the levels of a segment and its ancestors, after its dependents changed."""
        while segment is not None and (level := segment.own_level) is not segment.level:
            above, there = segment.parent, segment in self
            if above is not None:
                above.dependents[segment.level] -= 1
                above.dependents[level] += 1
            # Lost segments are not in the order.
            if there:
                self._leave(segment)
            segment.level = level
            if there:
                self._join(segment)
            segment = above

    def _orders_of(self, segment: StoredSegment) -> list[OrderedDict[StoredSegment, None]]:
        return [self._orders[name, segment.level] for name in (None, segment.info.namespace)]

    def _join(self, segment: StoredSegment) -> None:
        for order in self._orders_of(segment):
            order[segment] = None

    def _leave(self, segment: StoredSegment) -> None:
        for name in (None, segment.info.namespace):
            order = self._orders[name, segment.level]
            del order[segment]
            if not order:
                del self._orders[name, segment.level]

    def change(self, segment: StoredSegment) -> None:
        """Mark a segment as changed, because its id or its parent has."""
        if segment in self:
            self._changed[segment] = None

    def take_changed(self, most: int) -> list[StoredSegment]:
        """Return, once, at most `most` segments that have changed."""
        taken = list(itertools.islice(self._changed, most))
        for segment in taken:
            del self._changed[segment]
        return taken

    def take_due(self, now: float, most: int) -> list[StoredSegment]:
        """Return, once, at most `most` segments that have expired at `now`, of `time.time`."""
        taken: list[StoredSegment] = []
        while self._due and self._due[0][0] <= now and len(taken) < most:
            segment = heapq.heappop(self._due)[2]
            if segment in self:
                taken.append(segment)
        return taken

    def sort(self) -> None:
        """Sort the segments of an earlier process by its uses of them."""
        upwards = sorted(self, key=lambda segment: -segment.info.prefix_len)
        for segment in upwards:
            above = segment.parent
            if above is not None and above.last_access < segment.last_access:
                above.last_access = segment.last_access
        self._orders.clear()
        # A stable sort: segments stay before their ancestors.
        for segment in sorted(upwards, key=lambda segment: segment.last_access):
            self._join(segment)

    def check(self, segment: StoredSegment) -> None:
        """Check the place of a segment of the tree, in constant time."""
        there, above = segment in self, segment.parent
        assert there != segment.lost
        assert segment.level is segment.own_level
        assert there == (segment in self._orders.get((segment.info.namespace, segment.level), ()))
        if above is not None:
            assert above.level >= segment.level and above.dependents[segment.level] > 0
            assert above not in self or above.last_access >= segment.last_access
