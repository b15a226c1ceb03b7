"""In which order segments go: by their last use, recorded for the next start, or by expiry."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from impress_sglang.storage.segment import Priority
from impress_sglang.store.stored import StoredSegment

# The last access of a segment whose coming is no use of it, nor of what it builds on.
LEAST = -1


class EvictionOrder:
    """Segments that have a file or will have one: lowest level first, then least recently used.

    A use of a segment is also a use of all that it builds on, and these have no lower level. So a
    segment comes before those that it builds on, and a search for one to evict that nothing builds
    on finds it in front, however many there are.
    """

    def __init__(self, ttl: float = 0.0) -> None:
        """`ttl`: in how many seconds segments expire that have no shorter time; 0: never."""
        self._ttl = ttl
        # By namespace, None for all of them, and by level.
        self._orders: dict[tuple[str | None, Priority], OrderedDict[StoredSegment, None]] = (
            defaultdict(OrderedDict)
        )
        self._changed: dict[StoredSegment, None] = {}
        self.now = 0
        """Number of uses so far; the `last_access` of a segment is such a number."""
        # When segments expire, with a number of each that breaks ties.
        self._due: list[tuple[float, int, StoredSegment]] = []

    def __iter__(self) -> Iterator[StoredSegment]:
        return self.of(None)

    def __contains__(self, segment: StoredSegment) -> bool:
        return segment in self._orders.get((None, segment.level), ())

    def __len__(self) -> int:
        return sum(len(self._orders.get((None, priority), ())) for priority in Priority)

    def latest(self) -> Iterator[StoredSegment]:
        """All segments, most recently used first, whatever their level."""
        orders = (
            reversed(self._orders.get((None, priority), {})) for priority in reversed(Priority)
        )
        return heapq.merge(*orders, key=lambda segment: -segment.last_access)

    def of(self, namespace: str | None) -> Iterator[StoredSegment]:
        """Segments of a namespace, in the same order; dependents are in the same namespace."""
        orders = (self._orders.get((namespace, priority), ()) for priority in Priority)
        return itertools.chain.from_iterable(orders)

    def add(self, segment: StoredSegment) -> None:
        """Add a segment of the tree; unless it is from an earlier process, that is a use."""
        self._join(segment)
        expires, every = segment.info.expires or math.inf, self._ttl or math.inf
        segment.due = due = min(expires, segment.written + every)
        if due < math.inf:
            if len(self._due) > 2 * len(self):
                # Segments that left before they expired would otherwise stay here until then.
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
        """Remove a segment, if it is there."""
        if segment in self:
            self._leave(segment)
        self._changed.pop(segment, None)

    def note(self, segment: StoredSegment) -> None:
        """Count a use of a segment and of all that it builds on."""
        self.now += 1
        used: StoredSegment | None = segment
        while used is not None:
            used.last_access = self.now
            # A segment gone since the match is nowhere.
            if used in self:
                for order in self._orders_of(used):
                    order.move_to_end(used)
                self._changed[used] = None
            used = used.parent

    def settle(self, segment: StoredSegment | None) -> None:
        """Update the levels of a segment and of those above it, after its dependents changed."""
        while segment is not None and (level := segment.own_level) is not segment.level:
            above, there = segment.parent, segment in self
            if above is not None:
                above.dependents[segment.level] -= 1
                above.dependents[level] += 1
            # A hole has no place.
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
        """Note that a segment has another name, or builds on another one."""
        if segment in self:
            self._changed[segment] = None

    def take_changed(self, most: int) -> list[StoredSegment]:
        """At most `most` segments that have changed since they were last taken."""
        taken = list(itertools.islice(self._changed, most))
        for segment in taken:
            del self._changed[segment]
        return taken

    def take_due(self, now: float, most: int) -> list[StoredSegment]:
        """At most `most` segments that have expired; `now` is a time of `time.time`."""
        taken: list[StoredSegment] = []
        while self._due and self._due[0][0] <= now and len(taken) < most:
            segment = heapq.heappop(self._due)[2]
            if segment in self:
                taken.append(segment)
        return taken

    def sort(self) -> None:
        """Put segments of an earlier process into the order in which it used them."""
        upwards = sorted(self, key=lambda segment: -segment.info.prefix_len)
        for segment in upwards:
            above = segment.parent
            if above is not None and above.last_access < segment.last_access:
                above.last_access = segment.last_access
        self._orders.clear()
        # Among equals, those that build on others stay in front.
        for segment in sorted(upwards, key=lambda segment: segment.last_access):
            self._join(segment)

    def check(self, segment: StoredSegment) -> None:
        """Check that a segment of the tree has its place, in constant time."""
        there, above = segment in self, segment.parent
        assert there != segment.lost
        assert segment.level is segment.own_level
        assert there == (segment in self._orders.get((segment.info.namespace, segment.level), ()))
        if above is not None:
            assert above.level >= segment.level and above.dependents[segment.level] > 0
            assert above not in self or above.last_access >= segment.last_access
