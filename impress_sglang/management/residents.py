"""Which stored tokens are in slots in codes: found by segment, shared, and given up when idle.

Owned by one thread. Parts were read from stored segments and are found by segment alone, so that a
request gets one only where the store would have given it the same KVs.

SGLang's pool hands out and takes back slots in pages, and a row has its tokens in them in order.
So parts that are shared are whole pages of a row. A page with tokens of two segments is not shared:
each request has these tokens in a page of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from impress_sglang.management.lookahead import LookAhead
from impress_sglang.management.stored import StoredSpan
from impress_sglang.transfer.resident import PartUse, ResidentPart

Age: TypeAlias = tuple[bool, int, float]


def age_of(turn: int | None, last_access: float) -> Age:
    """Eviction order, lowest first: what nobody waits for, then the latest turn, then the oldest.

    `last_access` is a time of `time.monotonic`, as in SGLang's tree.
    """
    return turn is not None, -(turn or 0), last_access


@dataclasses.dataclass(frozen=True, slots=True)
class Cover:
    """Some tokens of a stored prefix, and the resident part with all of them, if there is one.

    `alone`: they share their pages with tokens of another segment.
    """

    span: StoredSpan
    part: ResidentPart | None
    alone: bool = False


class ResidentParts:
    """The parts that requests may share, and those that only one request uses."""

    def __init__(
        self,
        free: Callable[[Tensor], None],
        page_size: int = 1,
        lookahead: LookAhead | None = None,
    ) -> None:
        """`free` gives slots back, int64 [n], in whole pages; `lookahead` knows who waits."""
        self._free = free
        self._page_size = page_size
        self._shared: dict[str, list[ResidentPart]] = {}
        self._parts: set[ResidentPart] = set()
        self.lookahead = lookahead or LookAhead()

    def __iter__(self) -> Iterator[ResidentPart]:
        return iter(self._parts)

    @property
    def used_tokens(self) -> int:
        """Number of tokens in parts that requests use."""
        return sum(len(part) for part in self._parts if part.users)

    @property
    def idle_tokens(self) -> int:
        """Number of tokens in parts that no request uses now."""
        return sum(len(part) for part in self._parts if not part.users)

    def cover(self, spans: Sequence[StoredSpan], first: int = 0) -> list[Cover]:
        """Consecutive spans, cut where resident parts and pages begin and end.

        The first token of the first span is token `first` of a row, where a page begins.
        """
        covers = []
        for span, alone in self._in_pages(spans, first):
            if alone:
                covers.append(Cover(span, None, alone=True))
                continue
            segment, at = span.segment, span.start
            for part in self._shared.get(segment.segment_id, ()):
                if part.stop <= at or part.start >= span.stop:
                    continue
                if at < part.start:
                    covers.append(Cover(StoredSpan(segment, at, part.start), None))
                    at = part.start
                end = min(part.stop, span.stop)
                covers.append(Cover(StoredSpan(segment, at, end), part))
                at = end
            if at < span.stop:
                covers.append(Cover(StoredSpan(segment, at, span.stop), None))
        return covers

    def _in_pages(
        self, spans: Sequence[StoredSpan], first: int
    ) -> Iterator[tuple[StoredSpan, bool]]:
        """The parts of spans: in whole pages (False), or sharing pages with neighbours (True)."""
        size, at = self._page_size, first
        assert first % size == 0
        for span in _joined(spans):
            # Where the whole pages begin and end in the segment.
            low = span.start + -at % size
            at += len(span)
            high = span.stop - at % size
            if low >= high:
                yield span, True
                continue
            for start, stop in ((span.start, low), (low, high), (high, span.stop)):
                if start < stop:
                    yield StoredSpan(span.segment, start, stop), start != low

    def add(self, part: ResidentPart) -> None:
        """Add a part that is about to be loaded and overlaps no other one of its segment."""
        self._parts.add(part)
        if part.alone:
            return
        own = self._shared.setdefault(part.segment_id, [])
        own.append(part)
        own.sort(key=lambda other: other.start)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(own))

    def cut_idle(self, spans: Sequence[StoredSpan], first: int = 0) -> None:
        """Cut unused parts where consecutive spans begin or end inside them.

        `first` as for `cover`.
        """
        for cover in self.cover(spans, first):
            part, span = cover.part, cover.span
            if part is None or part.users or part.load is not None:
                continue
            if span.stop < part.stop:
                self.add(part.cut(span.stop))
            if part.start < span.start:
                self.add(part.cut(span.start))

    def use(self, uses: Sequence[PartUse]) -> None:
        """Let one more request use these parts."""
        now = time.monotonic()
        for use in uses:
            use.part.users += 1
            use.part.last_access = now

    def leave(self, uses: Sequence[PartUse]) -> None:
        """End a request's use of these parts; those that nobody can use any more are freed."""
        now, useless = time.monotonic(), list[ResidentPart]()
        for use in uses:
            part = use.part
            part.users -= 1
            part.last_access = now
            if not part.users and (part.alone or part.broken or not part.loaded):
                useless.append(part)
        self._drop(useless)

    def hide(self, part: ResidentPart) -> None:
        """Let nobody else use a part, which was not read correctly or is out of date."""
        part.broken = True
        self._unshare(part)
        if not part.users and part in self._parts:
            self._drop([part])

    def hide_segment(self, segment_id: str) -> int:
        """Let nobody else use parts of a segment; returns how many slots are freed at once.

        Requests that use a part go on; it is freed when the last of them ends.
        """
        freed = 0
        for part in list(self._shared.get(segment_id, ())):
            if part.users:
                part.alone = True
                self._unshare(part)
            else:
                freed += self.evict(part)
        return freed

    def hide_all(self) -> None:
        """Hide all parts: their KVs are of other weights than those stored from now on."""
        for part in list(self._parts):
            self.hide(part)

    def forget_all(self) -> None:
        """Forget all parts, whose slots belong to others now; no request uses or awaits one."""
        assert not any(part.users for part in self._parts)
        self._shared.clear()
        self._parts.clear()
        self.lookahead.clear()

    def age(self, part: ResidentPart) -> Age:
        """The age of a part; the lowest goes first."""
        turn = self.lookahead.next_turn(part.segment_id, part.start, part.stop)
        return age_of(turn, part.last_access)

    def oldest(self) -> ResidentPart | None:
        """The unused part with the lowest age, if there is one."""
        return min((part for part in self._parts if not part.users), key=self.age, default=None)

    def evict(self, part: ResidentPart) -> int:
        """Free an unused part; returns how many slots it had."""
        assert not part.users
        self.hide(part)
        return len(part)

    def _drop(self, parts: Sequence[ResidentPart]) -> None:
        """Free parts; those with slots in the same page must be freed together."""
        for part in parts:
            self._parts.remove(part)
            # Its slots no longer belong to it.
            part.load = None
            self._unshare(part)
        if parts:
            self._free(torch.cat([part.slots for part in parts]))

    def _unshare(self, part: ResidentPart) -> None:
        """Take a part out of those that can be found, if it is there."""
        own = self._shared.get(part.segment_id, [])
        if part in own:
            own.remove(part)
            if not own:
                del self._shared[part.segment_id]

    def check_integrity(self) -> None:
        """Check that parts are where they should be.

        Raises:
            AssertionError: they are not, which is a bug.
        """
        for segment_id, own in self._shared.items():
            assert own and all(part.segment_id == segment_id for part in own)
            assert all(part in self._parts and not part.broken for part in own)
            assert not any(part.alone or len(part) % self._page_size for part in own)
            assert all(a.stop <= b.start for a, b in itertools.pairwise(own))
        for part in self._parts:
            useful = part.loaded and not part.broken and not part.alone
            assert part.users >= 0 and (part.users or useful)
        self.lookahead.check_integrity()


def _joined(spans: Sequence[StoredSpan]) -> Iterator[StoredSpan]:
    """Consecutive spans, with adjacent ones of a segment joined."""
    waiting: StoredSpan | None = None
    for span in spans:
        if waiting is not None and waiting.segment is span.segment and waiting.stop == span.start:
            waiting = StoredSpan(span.segment, waiting.start, span.stop)
            continue
        if waiting is not None:
            yield waiting
        waiting = span
    if waiting is not None:
        yield waiting
