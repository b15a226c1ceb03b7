"""Stored tokens that queued requests will use, and in what order: these are evicted last.

Two papers consult the queue: AttentionStore (3.3.2) has a window at its head that is not evicted,
and frees memory from the end of the window first; CaR (III-B3) counts the requests that refer to a
cache. Here each request has a turn, and awaited tokens are evicted after all others, latest turn
first. So no window needs to be set, as tokens beyond it would be evicted before those in it.

`tiers.rules` uses this for pages of the caches, `quota` for files.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from impress_sglang.store.stored import StoredSpan
from impress_sglang.threads import locked
from impress_sglang.tiers.rules import LAST_TURN, NOT_AWAITED

# Turns between two consecutive requests, for requests that come between them later.
_GAP = 1024
# The turns before it are for requests that overtake all others.
_FIRST_TURN = 2**40

AwaitedRange: TypeAlias = tuple[int, int, int]
"""Tokens [first, last) of a segment, and the turn of the next request for them."""

_Range: TypeAlias = tuple[int, int]


class LookAhead:
    """Stored tokens that requests wait for, by segment id, which outlasts a store.

    Thread: the scheduler's; any for `ranges`.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._lock = threading.RLock()
        # By segment, the awaited ranges of its tokens, and the requests that wait for each.
        self._awaited: dict[str, dict[_Range, set[str]]] = {}
        self._ranges_of: dict[str, dict[str, _Range]] = {}
        self._turns: dict[str, int] = {}
        self._next_turn = _FIRST_TURN
        self._changed: set[str] = set()

    def __contains__(self, segment_id: str) -> bool:
        return segment_id in self._awaited

    @property
    def has_waiting(self) -> bool:
        return bool(self._ranges_of)

    @locked
    def set_expected(self, rid: str, spans: Sequence[StoredSpan]) -> None:
        """Set the tokens that a waiting request will use.

        They may be loaded or moved while it waits, so their place is not recorded.
        """
        ranges: dict[str, _Range] = {}
        for span in spans if self._enabled else ():
            name = span.segment.segment_id
            start, stop = ranges.get(name, (span.start, span.stop))
            ranges[name] = min(start, span.start), max(stop, span.stop)
        # Some of SGLang's policies match all requests before each pass.
        if ranges == self._ranges_of.get(rid, {}):
            return
        self.stop_waiting(rid)
        for segment_id, token_range in ranges.items():
            waiting = self._awaited.setdefault(segment_id, {})
            # A request without a turn comes after others for the same tokens, so nothing changes.
            if rid in self._turns or token_range not in waiting:
                self._changed.add(segment_id)
            waiting.setdefault(token_range, set()).add(rid)
        if ranges:
            self._ranges_of[rid] = ranges

    @locked
    def stop_waiting(self, rid: str) -> None:
        for segment_id, token_range in self._ranges_of.pop(rid, {}).items():
            waiting = self._awaited[segment_id]
            waiting[token_range].remove(rid)
            if not waiting[token_range]:
                del waiting[token_range]
            if not waiting:
                del self._awaited[segment_id]
            self._changed.add(segment_id)

    @locked
    def replace(self, old_id: str, new_id: str) -> None:
        """Let requests wait for a segment that has replaced another one with the same tokens."""
        if (waiting := self._awaited.pop(old_id, None)) is not None:
            for rid in itertools.chain.from_iterable(waiting.values()):
                self._ranges_of[rid][new_id] = self._ranges_of[rid].pop(old_id)
            self._awaited[new_id] = waiting
            self._changed |= {old_id, new_id}

    @locked
    def set_queue(self, rids: Sequence[str]) -> None:
        """Set the waiting requests, in the order of the queue.

        While the queue only advances, no turn changes, and this takes time linear in its length. A
        request that overtakes others gets a new turn; if a request falls back, those that pass it
        get new turns.
        """
        # SGLang does not report the admission of a request without any prefix.
        for rid in self._ranges_of.keys() - set(rids):
            self.stop_waiting(rid)
        old_turns = [self._turns.get(rid, -1) for rid in rids]
        turns, next_turn = dict[str, int](), LAST_TURN
        # All requests from here on are new.
        num_known = max((index + 1 for index, turn in enumerate(old_turns) if turn >= 0), default=0)
        for index in reversed(range(num_known)):
            turn = old_turns[index]
            if not 0 <= turn < next_turn:
                turn = next_turn - 1
                self._changed.update(self._ranges_of.get(rids[index], ()))
            turns[rids[index]] = next_turn = turn
        for rid in rids[num_known:]:
            turns[rid] = self._next_turn
            self._next_turn += _GAP
            self._changed.update(self._ranges_of.get(rid, ()))
        self._turns = turns

    def turn(self, rid: str) -> int:
        """Return the turn of a request, lower for sooner; requests without one come last."""
        return self._turns.get(rid, LAST_TURN)

    @locked
    def ranges(self, segment_id: str) -> list[AwaitedRange]:
        """Return the awaited ranges of a segment, latest turn first."""
        waiting = self._awaited.get(segment_id, {}).items()
        ranges = ((*awaited, min(map(self.turn, rids))) for awaited, rids in waiting)
        return sorted(ranges, key=lambda awaited: -awaited[2])

    @locked
    def take_changed(self) -> set[str]:
        """Return, once, the segments whose ranges or turns may have changed."""
        changed, self._changed = self._changed, set()
        return changed


def turns_of(
    num_chunks: int, chunk_tokens: int, ranges: Sequence[AwaitedRange]
) -> npt.NDArray[np.int64]:
    """Return the turn at which each chunk is needed next, int64 [num_chunks]; -1: not awaited."""
    turns = np.full(num_chunks, NOT_AWAITED)
    for start, stop, turn in ranges:
        turns[start // chunk_tokens : -(-stop // chunk_tokens)] = turn
    return turns
