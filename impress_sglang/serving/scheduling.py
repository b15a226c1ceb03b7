"""The order in which queued requests are admitted, by what is cached of each (CaR III-B1).

In a window at the head of the queue, in the order of SGLang's policy, requests of equal priority
that would delay others change places with them: one that still has to be read lets ready requests
pass. A request lets others pass for as long as it takes itself, and no more of them than the
window is long. So the mean falls and the tail hardly rises (Nudge: Grosof, Yang, Scully,
Harchol-Balter, SIGMETRICS 2021, where each is overtaken once). No request is held back: SGLang
admits those it can.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from impress_sglang.config import SHORTEST
from impress_sglang.cost import Estimate

REORDER_WINDOW = 16


class Serving(NamedTuple):
    """Estimated times of a waiting request, whether any of its tokens are cached, and the share of
    these that is not read yet."""

    estimate: Estimate
    has_cached_tokens: bool
    unread_fraction: float = 0.0


@dataclasses.dataclass(slots=True)
class _Place:
    """A request in the queue; lower ranks come first.

    Serving it takes `seconds`. `passed`: seconds of each request that overtook it, by its number.
    """

    number: int
    rank: tuple[float, ...]
    seconds: float
    passed: dict[int, float]

    def may_be_passed_by(self, other: _Place) -> bool:
        """Whether it lets another request pass."""
        passed = self.passed | {other.number: other.seconds}
        within = len(passed) <= REORDER_WINDOW and sum(passed.values()) <= self.seconds
        return self.rank > other.rank and within


class QueueOrder:
    """Reorders the head of a waiting queue; uses only `rid` and `priority` of SGLang's requests.

    It does not matter whether SGLang undoes the order before the next pass.
    """

    def __init__(self, schedule: str, look: Callable[[str], Serving | None]) -> None:
        """`schedule`: see `_place`; `look` returns the times of a request id, None if unknown."""
        self._schedule = schedule
        self._serving_of = look
        self._arrivals = itertools.count()
        self._places = dict[str, tuple[int, dict[int, float]]]()

    def forget(self, rid: str) -> None:
        """Forget a request that was admitted or has ended; a retracted one counts as new."""
        self._places.pop(rid, None)

    def arrange(self, queue: list[Any]) -> None:
        """Reorder the requests of the window."""
        arranged: list[tuple[Any, _Place]] = []
        for request in queue[:REORDER_WINDOW]:
            entry, place = self._place(request.rid), len(arranged)
            while place:
                before, other = arranged[place - 1]
                if before.priority != request.priority or not other.may_be_passed_by(entry):
                    break
                place -= 1
            for _, other in arranged[place:]:
                other.passed[entry.number] = entry.seconds
            arranged.insert(place, (request, entry))
        queue[:REORDER_WINDOW] = [request for request, _ in arranged]

    def _place(self, rid: str) -> _Place:
        """Compute the place of a request.

        `CLASSES`: first requests whose cached tokens are ready, then those without cached tokens,
        then those that still have to be read. `SHORTEST`:
        by seconds, but requests for which the engine would wait for the drive come after all
        others. They are read while the others are computed. If they went first, the engine would be
        idle for as long as it waits: near capacity that loses more than the order gains.
        """
        cost = self._serving_of(rid)
        number, passed = self._places.setdefault(rid, (next(self._arrivals), {}))
        if cost is None:
            # It overtakes none, and none may overtake it.
            return _Place(number, (math.inf,), -1.0, passed)
        seconds = cost.estimate.seconds(cost.unread_fraction)
        waits = cost.estimate.unhidden(cost.unread_fraction) > 0.0
        rank: tuple[float, ...] = (2.0 * waits if cost.has_cached_tokens else 1.0,)
        if self._schedule == SHORTEST:
            rank = waits, seconds
        return _Place(number, rank, seconds, passed)
