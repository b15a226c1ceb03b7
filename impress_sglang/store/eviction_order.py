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
NEVER_USED = -1


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
        self._expiring: list[tuple[float, int, StoredSegment]] = []

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
        self._insert(segment)
        segment.expires_at = expires_at = self.expiry_of(segment)
        if expires_at < math.inf:
            if len(self._expiring) > 2 * len(self):
                # Otherwise segments that were removed before they expired would stay until then.
                self._expiring = [entry for entry in self._expiring if entry[2] in self]
                heapq.heapify(self._expiring)
            heapq.heappush(self._expiring, (expires_at, id(segment), segment))
        self.update_levels(segment.parent)
        if segment.last_access == NEVER_USED and not segment.num_dependents:
            for order in self._orders_of(segment):
                order.move_to_end(segment, last=False)
        elif segment.last_access <= 0:
            self.count_use(segment)

    def expiry_of(self, segment: StoredSegment) -> float:
        expires, ttl = segment.info.expires or math.inf, self._ttl or math.inf
        return min(expires, segment.written + ttl)

    def remove(self, segment: StoredSegment) -> None:
        if segment in self:
            self._discard(segment)
        self._changed.pop(segment, None)

    def count_use(self, segment: StoredSegment) -> None:
        self.now += 1
        ancestor: StoredSegment | None = segment
        while ancestor is not None:
            ancestor.last_access = self.now
            # A segment may have been removed since the match.
            if ancestor in self:
                for order in self._orders_of(ancestor):
                    order.move_to_end(ancestor)
                self._changed[ancestor] = None
            ancestor = ancestor.parent

    def update_levels(self, segment: StoredSegment | None) -> None:
        """Update the levels of a segment and its ancestors, after its dependents changed."""
        while segment is not None and (level := segment.effective_level) is not segment.level:
            parent, present = segment.parent, segment in self
            if parent is not None:
                parent.dependents[segment.level] -= 1
                parent.dependents[level] += 1
            # Lost segments are not in the order.
            if present:
                self._discard(segment)
            segment.level = level
            if present:
                self._insert(segment)
            segment = parent

    def _orders_of(self, segment: StoredSegment) -> list[OrderedDict[StoredSegment, None]]:
        return [self._orders[name, segment.level] for name in (None, segment.info.namespace)]

    def _insert(self, segment: StoredSegment) -> None:
        for order in self._orders_of(segment):
            order[segment] = None

    def _discard(self, segment: StoredSegment) -> None:
        for name in (None, segment.info.namespace):
            order = self._orders[name, segment.level]
            del order[segment]
            if not order:
                del self._orders[name, segment.level]

    def mark_changed(self, segment: StoredSegment) -> None:
        """Mark a segment as changed, because its id or its parent has."""
        if segment in self:
            self._changed[segment] = None

    def take_changed(self, max_segments: int) -> list[StoredSegment]:
        """Return, once, at most `max_segments` segments that have changed."""
        segments = list(itertools.islice(self._changed, max_segments))
        for segment in segments:
            del self._changed[segment]
        return segments

    def take_expired(self, now: float, max_segments: int) -> list[StoredSegment]:
        """Return, once, at most `max_segments` segments that expired by `now` (`time.time`)."""
        segments: list[StoredSegment] = []
        while self._expiring and self._expiring[0][0] <= now and len(segments) < max_segments:
            segment = heapq.heappop(self._expiring)[2]
            if segment in self:
                segments.append(segment)
        return segments

    def sort(self) -> None:
        """Sort the segments of an earlier process by its uses of them."""
        upwards = sorted(self, key=lambda segment: -segment.info.prefix_len)
        for segment in upwards:
            parent = segment.parent
            if parent is not None and parent.last_access < segment.last_access:
                parent.last_access = segment.last_access
        self._orders.clear()
        # A stable sort: segments stay before their ancestors.
        for segment in sorted(upwards, key=lambda segment: segment.last_access):
            self._insert(segment)

    def check(self, segment: StoredSegment) -> None:
        """Check the place of a segment of the tree, in constant time."""
        present, parent = segment in self, segment.parent
        assert present != segment.lost
        assert segment.level is segment.effective_level
        assert present == (segment in self._orders.get((segment.info.namespace, segment.level), ()))
        if parent is not None:
            assert parent.level >= segment.level and parent.dependents[segment.level] > 0
            assert parent not in self or parent.last_access >= segment.last_access
