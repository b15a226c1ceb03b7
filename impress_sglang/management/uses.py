"""In which order segments go: when they were used, which the next start should know, or are due."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator

from impress_sglang.management.stored import StoredSegment


class Uses:
    """Segments that have a file or will have one, least recently used first.

    A use of a segment is one of all that it builds on, so each stands before these: who looks for
    something to evict that nothing builds on finds it in front, however many there are.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[StoredSegment, None] = OrderedDict()
        # The same for each namespace.
        self._orders: dict[str, OrderedDict[StoredSegment, None]] = defaultdict(OrderedDict)
        self._changed: dict[StoredSegment, None] = {}
        self.now = 0
        """Uses so far; `last_access` of a segment is one of them."""
        # When segments have to go, and a number by which equals are told apart.
        self._due: list[tuple[int, int, StoredSegment]] = []
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[StoredSegment]:
        return iter(self._order)

    def __reversed__(self) -> Iterator[StoredSegment]:
        return reversed(self._order)

    def of(self, namespace: str) -> Iterator[StoredSegment]:
        """Those of a namespace, in the same order; what builds on a segment is in its namespace."""
        return iter(self._orders.get(namespace, ()))

    def go_on_from(self, last_access: int) -> None:
        """Whatever is used from now on is used after that."""
        self.now = max(self.now, last_access)

    def add(self, segment: StoredSegment) -> None:
        """A segment is in the tree; unless it comes from an earlier process, that is a use."""
        self._order[segment] = None
        self._orders[segment.info.namespace][segment] = None
        if segment.info.expires:
            self._note_due(segment)
        if not segment.last_access:
            self.note(segment)

    def remove(self, segment: StoredSegment) -> None:
        """A segment is gone."""
        if segment in self._order:
            del self._order[segment]
            own = self._orders[segment.info.namespace]
            del own[segment]
            if not own:
                del self._orders[segment.info.namespace]
        self._changed.pop(segment, None)

    def note(self, segment: StoredSegment) -> None:
        """A segment is used, and what it builds on."""
        self.now += 1
        for own in _path_up(segment):
            own.last_access = self.now
            # A hole, or what is gone since it was matched, is in no order.
            if own in self._order:
                self._order.move_to_end(own)
                self._orders[own.info.namespace].move_to_end(own)
                self._changed[own] = None

    def change(self, segment: StoredSegment) -> None:
        """A segment has another name, or builds on another one."""
        if segment in self._order:
            self._changed[segment] = None

    def take_changed(self, most: int) -> list[StoredSegment]:
        """Some of those of which something has changed since they were last taken."""
        taken = list(itertools.islice(self._changed, most))
        for segment in taken:
            del self._changed[segment]
        return taken

    def take_due(self, now: float, most: int) -> list[StoredSegment]:
        """Some of those that had to go by then; `now` as of `time.time`."""
        taken: list[StoredSegment] = []
        while self._due and self._due[0][0] <= now and len(taken) < most:
            segment = heapq.heappop(self._due)[2]
            if segment in self._order:
                taken.append(segment)
        return taken

    def _note_due(self, segment: StoredSegment) -> None:
        if len(self._due) > 2 * len(self._order):
            # What has left before its time would stay until then.
            self._due = [due for due in self._due if due[2] in self._order]
            heapq.heapify(self._due)
        heapq.heappush(self._due, (segment.info.expires, next(self._numbers), segment))

    def sort(self) -> None:
        """Put segments of an earlier process in the order in which it used them."""
        ordered = sorted(self._order, key=lambda segment: -segment.info.prefix_len)
        for segment in ordered:
            above = segment.parent
            if above is not None and above.last_access < segment.last_access:
                above.last_access = segment.last_access
        # Of equals those with more tokens before them stay in front.
        ordered.sort(key=lambda segment: segment.last_access)
        for segment in ordered:
            self._order.move_to_end(segment)
            self._orders[segment.info.namespace].move_to_end(segment)

    def check_integrity(self, segments: Iterable[StoredSegment]) -> None:
        """Compare with these, which have a file or will have one.

        Raises:
            AssertionError: they differ, or the order is wrong, which is a bug.
        """
        places = {segment: place for place, segment in enumerate(self._order)}
        assert places.keys() == set(segments) and self._changed.keys() <= places.keys()
        assert sum(map(len, self._orders.values())) == len(places)
        for namespace, order in self._orders.items():
            own_places = [places[segment] for segment in order]
            assert own_places and own_places == sorted(own_places)
            assert all(segment.info.namespace == namespace for segment in order)
        for segment, place in places.items():
            for own in _path_up(segment):
                assert own not in places or places[own] >= place
                assert own not in places or own.last_access >= segment.last_access


def _path_up(segment: StoredSegment) -> Iterator[StoredSegment]:
    """A segment, what it builds on, and so on."""
    own: StoredSegment | None = segment
    while own is not None:
        yield own
        own = own.parent
