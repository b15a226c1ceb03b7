"""What the waiting queue will use, and in which order: it leaves memory and disk last.

Two papers ask the queue what to keep: a window at its head that is not evicted, from whose end
memory is given up first (AttentionStore 3.3.2), and a count of the requests that refer to a cache
(CaR III-B3). Here each request has a turn; what waits goes after all that nobody waits for, and the
farthest turn first. The window needs no end of its own: what is beyond it goes before what is in.

Who evicts asks: the tree cache and `residents` for slots, `tiers.rules` for pages of the caches,
`quota` for files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from impress_sglang.management.stored import StoredSpan

LAST_TURN = 2**52
"""Of who is in no order yet: behind everybody."""

AwaitedRange: TypeAlias = tuple[int, int, int]
"""First and last token, exclusive, of a segment, and the turn of the next request for them."""


class LookAhead:
    """Stored tokens that requests wait for, by segment; one thread."""

    def __init__(self, *, tells: bool = True) -> None:
        """`tells`: somebody calls `take_changed`."""
        self._tells = tells
        # By segment and by request: the first and the last token, exclusive, that it waits for.
        self._awaited: dict[str, dict[str, tuple[int, int]]] = {}
        self._segments_of: dict[str, set[str]] = {}
        self._turns: dict[str, int] = {}
        self._next_turn = 0
        # Segments whose ranges are others than `take_changed` has told.
        self._changed: set[str] = set()

    def __contains__(self, segment_id: str) -> bool:
        """Whether a request waits for tokens of a segment."""
        return segment_id in self._awaited

    def wait(self, rid: str, spans: Sequence[StoredSpan]) -> None:
        """A request that waits will use these tokens, and no others, wherever they are.

        They may be loaded or move while it waits, so tokens are what is noted.
        """
        self.stop_waiting(rid)
        for span in spans:
            waiting = self._awaited.setdefault(span.segment.segment_id, {})
            start, stop = waiting.get(rid, (span.start, span.stop))
            waiting[rid] = min(start, span.start), max(stop, span.stop)
        if spans:
            self._segments_of[rid] = {span.segment.segment_id for span in spans}
            self._note_change(self._segments_of[rid])

    def stop_waiting(self, rid: str) -> None:
        """A request is admitted, or gone."""
        for segment_id in self._segments_of.pop(rid, ()):
            waiting = self._awaited[segment_id]
            del waiting[rid]
            if not waiting:
                del self._awaited[segment_id]
            self._note_change({segment_id})

    def order(self, rids: Sequence[str]) -> None:
        """Requests wait in this order now.

        Those who keep their order keep their turns, so that a queue that only moves on costs
        nothing but this look at it.
        """
        known, last, turns = self._turns, -1, dict[str, int]()
        for rid in rids:
            turn = known.get(rid, -1)
            if turn <= last:
                turn = max(self._next_turn, last + 1)
                self._next_turn = turn + 1
                self._note_change(self._segments_of.get(rid, ()))
            turns[rid] = last = turn
        self._turns = turns

    def turn(self, rid: str) -> int:
        """When it is a request's turn; lower is sooner."""
        return self._turns.get(rid, LAST_TURN)

    def next_turn(self, segment_id: str, start: int, stop: int) -> int | None:
        """When it is the turn of the first that waits for some of these tokens, None: nobody."""
        waiting = self._awaited.get(segment_id, {})
        return min(
            (self.turn(rid) for rid, own in waiting.items() if own[0] < stop and start < own[1]),
            default=None,
        )

    def take_changed(self) -> list[tuple[str, list[AwaitedRange]]]:
        """Segments for which other tokens, or other requests, wait than at the last call.

        Of each the ranges that are awaited, the latest turn first; none if nobody waits any more.
        """
        changed, self._changed = self._changed, set()
        return [(segment_id, self._ranges(segment_id)) for segment_id in changed]

    def clear(self) -> None:
        """Nobody waits."""
        self._note_change(self._awaited)
        self._awaited.clear()
        self._segments_of.clear()
        self._turns.clear()

    def check_integrity(self) -> None:
        """See that both sides say the same.

        Raises:
            AssertionError: they do not, which is a bug.
        """
        waiting = {(rid, name) for name, rids in self._awaited.items() for rid in rids}
        assert waiting == {(rid, name) for rid, own in self._segments_of.items() for name in own}

    def _note_change(self, segment_ids: Iterable[str]) -> None:
        if self._tells:
            self._changed.update(segment_ids)

    def _ranges(self, segment_id: str) -> list[AwaitedRange]:
        # Requests for a shared prefix wait for the same tokens of it.
        first: dict[tuple[int, int], int] = {}
        for rid, own in self._awaited.get(segment_id, {}).items():
            first[own] = min(first.get(own, LAST_TURN), self.turn(rid))
        ranges = [(start, stop, turn) for (start, stop), turn in first.items()]
        return sorted(ranges, key=lambda own: -own[2])
