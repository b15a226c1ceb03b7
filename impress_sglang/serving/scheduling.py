"""The order in which queued requests are admitted, by what is cached of each (CaR III-B1).

SGLang's policy says who comes first. At the head of its order, in a window and among requests of
equal priority, those change places that would make others wait: a request that still has to be read
lets pass what is ready. Nobody is overtaken more often than the window is long, and nobody is held
back: whom SGLang can admit it admits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from impress_sglang.options import CLASSES, ESTIMATE, SHORTEST
from impress_sglang.serving.estimate import Estimate

WINDOW = 16
# Of the scheduler's time, for looking again at what is cached of those in the window.
LOOK_SHARE = 0.01


class Queued(Protocol):
    """A request of SGLang's that waits."""

    @property
    def rid(self) -> str:
        """Its id."""

    @property
    def priority(self) -> int | None:
        """Its class; who is in another one is not overtaken."""


_T = TypeVar("_T", bound=Queued)


@dataclasses.dataclass(frozen=True, slots=True)
class CacheState:
    """What is cached of a waiting request: whether anything is, and what the rest takes."""

    cached: bool
    estimate: Estimate


def _class(state: CacheState, unread: float) -> float:
    """0: what is cached is ready; 1: nothing is cached; 2: it still has to be read."""
    if not state.cached:
        return 1.0
    return 2.0 * (state.estimate.unhidden(unread) > 0.0)


RANKS: dict[str, Callable[[CacheState, float], float]] = {
    CLASSES: _class,
    ESTIMATE: lambda state, unread: state.estimate.unhidden(unread),
    SHORTEST: lambda state, unread: state.estimate.seconds(unread),
}
"""Who has the lowest comes first; by the state, and the share of its reading that is left."""


class QueueOrder:
    """Changes places at the head of a waiting queue, and changes them back; one thread.

    A pass of the scheduler calls `restore`, SGLang's policy, `look` and `arrange`.
    """

    def __init__(
        self,
        schedule: str,
        unread: Callable[[str], float],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`schedule` is one of `options.SCHEDULES`; `unread` tells what is left to read of a rid.

        `clock` tells seconds.
        """
        self._rank = RANKS.get(schedule)
        self._unread = unread
        self._clock = clock
        self._window = WINDOW if self._rank else 0
        self._states: dict[str, CacheState] = {}
        # When each state was noted, in passes, and when the next one may be.
        self._noted: dict[str, int] = {}
        self._pass = 0
        self._next_look = -math.inf
        self._overtaken: dict[str, int] = {}
        # If places were changed: SGLang's order of the window, and ours.
        self._own: list[str] = []
        self._arranged: list[str] = []

    @property
    def enabled(self) -> bool:
        """Whether anybody changes places."""
        return self._rank is not None

    def note(self, rid: str, state: CacheState) -> None:
        """What is cached of a request that waits."""
        self._states[rid] = state
        self._noted[rid] = self._pass

    def forget(self, rid: str) -> None:
        """A request is admitted, or gone."""
        self._states.pop(rid, None)
        self._noted.pop(rid, None)
        self._overtaken.pop(rid, None)

    def restore(self, queue: list[_T]) -> None:
        """Put a queue back in the order in which SGLang left it, before it looks at it again."""
        self._pass += 1
        if not self._own:
            return
        head = queue[: self._window]
        waiting = {request.rid for request in head}
        place = {rid: number for number, rid in enumerate(self._own)}
        left: list[str] = []
        for rid in self._arranged:
            if rid not in waiting:
                left.append(rid)
                continue
            passed = sum(place[other] > place[rid] for other in left)
            if passed:
                self._overtaken[rid] = self._overtaken.get(rid, 0) + passed
        # What SGLang has added since is behind.
        queue[: self._window] = sorted(head, key=lambda own: place.get(own.rid, self._window))
        self._own = []

    def look(self, queue: Sequence[_T], look_at: Callable[[_T], None]) -> None:
        """Let `look_at` note again what is cached of the request whose state is oldest."""
        began = self._clock()
        if began < self._next_look or not self._window or not queue:
            return
        head = queue[: self._window]
        oldest = min(head, key=lambda own: self._noted.get(own.rid, -1))
        if self._noted.get(oldest.rid) != self._pass:
            look_at(oldest)
            self._next_look = began + (self._clock() - began) / LOOK_SHARE

    def arrange(self, queue: list[_T]) -> None:
        """Let requests of the window change places."""
        head, arranged = queue[: self._window], list[_T]()
        for _, equals in itertools.groupby(head, key=lambda own: own.priority):
            arranged += self._arrange(list(equals))
        if arranged != head:
            self._own = [request.rid for request in head]
            self._arranged = [request.rid for request in arranged]
            queue[: self._window] = arranged

    def _arrange(self, requests: list[_T]) -> list[_T]:
        """Requests by their ranks, but none behind more others than may still overtake it."""
        ranks = [self._rank_of(request.rid) for request in requests]
        if ranks == sorted(ranks):
            return requests
        allowed = [self._window - self._overtaken.get(own.rid, 0) for own in requests]
        left, arranged = list(range(len(requests))), list[_T]()
        while left:
            # Who may not be overtaken holds up all behind.
            last = next((own for own in left if allowed[own] <= 0), left[-1])
            first = min((own for own in left if own <= last), key=lambda own: ranks[own])
            for own in left:
                if own == first:
                    break
                allowed[own] -= 1
            left.remove(first)
            arranged.append(requests[first])
        return arranged

    def _rank_of(self, rid: str) -> float:
        state = self._states.get(rid)
        assert self._rank is not None
        # Who was not looked at overtakes nobody.
        return math.inf if state is None else self._rank(state, self._unread(rid))
