"""The order in which queued requests are admitted, by what is cached of each (CaR III-B1).

SGLang's policy orders the queue. In a window at the head of that order, among requests of equal
priority, requests that would make others wait change places with them: one that still has to be
read lets those that are ready pass. A request is not overtaken any more once it has waited for
others as long as it takes itself, nor more often than the window is long. So the mean falls and the
tail hardly rises (Nudge: Grosof, Yang, Scully, Harchol-Balter, SIGMETRICS 2021, where each is
overtaken once). No request is held back: SGLang admits those it can.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from impress_sglang.config import SHORTEST
from impress_sglang.cost import Estimate

WINDOW = 16


class Serving(NamedTuple):
    """What serving a waiting request takes, whether anything of it is cached, and the share of that
    which is left to read."""

    estimate: Estimate
    cached: bool
    unread: float = 0.0


@dataclasses.dataclass(slots=True)
class _Waiting:
    """How many requests overtook a waiting one, and how many seconds it waited for them."""

    overtaken: int = 0
    waited: float = 0.0


@dataclasses.dataclass(slots=True)
class _Place:
    """A request in the queue, of which the lowest rank comes first.

    It takes so many seconds. At most `passes` more requests may overtake it, and they may take
    `patience` seconds in all.
    """

    rank: tuple[float, ...]
    seconds: float
    passes: int
    patience: float


class QueueOrder:
    """Reorders the head of a waiting queue, and restores its order; one thread.

    A pass of the scheduler calls `restore`, SGLang's policy, and `arrange`, in this order.
    Of SGLang's requests it looks at `rid` and `priority`.
    """

    def __init__(
        self,
        schedule: str,
        look: Callable[[str], Serving | None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`schedule`: see `_place`; `look` says what serving an id takes, None if nobody knows.

        `clock` returns seconds.
        """
        self._schedule = schedule
        self._look = look
        self._clock = clock
        self._known = defaultdict[str, _Waiting](_Waiting)
        # If the window was reordered: SGLang's order of it, ours, and when that was.
        self._own: list[str] = []
        self._arranged: list[str] = []
        self._since = 0.0
        # Those of the window that left; one that comes back, if retracted, counts as a new one.
        self._gone: set[str] = set()

    def forget(self, rid: str) -> None:
        """Forget a request, which was admitted or is gone."""
        self._known.pop(rid, None)
        if rid in self._own:
            self._gone.add(rid)

    def restore(self, queue: list[Any]) -> None:
        """Put a queue back in the order in which SGLang left it, before it looks at it again."""
        if not self._own:
            return
        head = queue[:WINDOW]
        waiting = {request.rid for request in head} - self._gone
        place = {rid: number for number, rid in enumerate(self._own)}
        left: list[int] = []
        # By the clock, since estimates leave out what a pass takes besides its tokens.
        seconds = self._clock() - self._since
        for rid in self._arranged:
            if rid not in waiting:
                left.append(place.pop(rid))
            elif overtook := sum(number > place[rid] for number in left):
                self._known[rid].overtaken += overtook
                self._known[rid].waited += seconds
        # Requests that SGLang has added since come last.
        queue[:WINDOW] = sorted(head, key=lambda own: place.get(own.rid, WINDOW))
        self._own, self._arranged, self._gone = [], [], set()

    def arrange(self, queue: list[Any]) -> None:
        """Reorder the requests of the window."""
        head, arranged = queue[:WINDOW], list[Any]()
        for _, equals in itertools.groupby(head, key=lambda own: own.priority):
            arranged += self._arrange(list(equals))
        if arranged != head:
            self._own = [request.rid for request in head]
            self._arranged = [request.rid for request in arranged]
            self._since = self._clock()
            queue[:WINDOW] = arranged

    def _arrange(self, requests: list[Any]) -> list[Any]:
        """Requests of equal priority in the order in which they are to be admitted."""
        left = [(request, self._place(request.rid)) for request in requests]
        ranks = [place.rank for _, place in left]
        if ranks == sorted(ranks):
            return requests
        arranged = list[Any]()
        while left:
            # The lowest rank that all before it may wait for.
            first, patience = 0, math.inf
            for number, (_, place) in enumerate(left):
                if place.rank < left[first][1].rank and place.seconds <= patience:
                    first = number
                if not place.passes:
                    break
                patience = min(patience, place.patience)
            request, own = left.pop(first)
            for _, place in left[:first]:
                place.passes -= 1
                place.patience -= own.seconds
            arranged.append(request)
        return arranged

    def _place(self, rid: str) -> _Place:
        """The place of a request.

        `CLASSES`: what is cached is ready; nothing is cached; it still has to be read. `SHORTEST`:
        by seconds, but requests for which the engine would wait for the drive come after all
        others. They are read while the others are computed. If they went first, the engine would be
        idle for as long as it waits: near capacity that loses more than the order gains.
        """
        known, found = self._known[rid], self._look(rid)
        passes = WINDOW - known.overtaken
        if found is None:
            # It overtakes none, and none may overtake it.
            return _Place((math.inf,), 0.0, passes, 0.0)
        seconds = found.estimate.seconds(found.unread)
        waits = found.estimate.unhidden(found.unread) > 0.0
        rank: tuple[float, ...] = (2.0 * waits if found.cached else 1.0,)
        if self._schedule == SHORTEST:
            rank = waits, seconds
        return _Place(rank, seconds, passes, seconds - known.waited)
