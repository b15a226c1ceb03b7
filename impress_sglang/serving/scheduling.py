"""The order in which queued requests are admitted, by what is cached of each (CaR III-B1).

In a window at the head of the queue, as SGLang's policy has ordered it, requests of equal priority
that would make others wait change places with them: one that still has to be read lets those that
are ready pass. A request lets others pass for as long as it takes itself, and no more of them than
the window is long. So the mean falls and the tail hardly rises (Nudge: Grosof, Yang, Scully,
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

WINDOW = 16


class Serving(NamedTuple):
    """What serving a waiting request takes, whether anything of it is cached, and the share of that
    which is left to read."""

    estimate: Estimate
    cached: bool
    unread: float = 0.0


@dataclasses.dataclass(slots=True)
class _Place:
    """A request in the queue, of which the lowest rank comes first.

    Serving it takes `seconds`. `passed`: seconds of each request that overtook it, by its number.
    """

    number: int
    rank: tuple[float, ...]
    seconds: float
    passed: dict[int, float]

    def lets(self, other: _Place) -> bool:
        """Whether it lets another one pass."""
        passed = self.passed | {other.number: other.seconds}
        within = len(passed) <= WINDOW and sum(passed.values()) <= self.seconds
        return self.rank > other.rank and within


class QueueOrder:
    """Reorders the head of a waiting queue; of SGLang's requests it looks at `rid` and `priority`.

    It reorders what it finds: whether SGLang undoes that before the next pass does not matter.
    """

    def __init__(self, schedule: str, look: Callable[[str], Serving | None]) -> None:
        """`schedule`: see `_place`; `look` says what serving an id takes, None if nobody knows."""
        self._schedule = schedule
        self._look = look
        self._arrivals = itertools.count()
        self._known = dict[str, tuple[int, dict[int, float]]]()

    def forget(self, rid: str) -> None:
        """Forget a request, which was admitted or is gone; one that comes back is a new one."""
        self._known.pop(rid, None)

    def arrange(self, queue: list[Any]) -> None:
        """Reorder the requests of the window."""
        arranged: list[tuple[Any, _Place]] = []
        for request in queue[:WINDOW]:
            entry, place = self._place(request.rid), len(arranged)
            while place:
                before, other = arranged[place - 1]
                if before.priority != request.priority or not other.lets(entry):
                    break
                place -= 1
            for _, other in arranged[place:]:
                other.passed[entry.number] = entry.seconds
            arranged.insert(place, (request, entry))
        queue[:WINDOW] = [request for request, _ in arranged]

    def _place(self, rid: str) -> _Place:
        """The place of a request.

        `CLASSES`: what is cached is ready; nothing is cached; it still has to be read. `SHORTEST`:
        by seconds, but requests for which the engine would wait for the drive come after all
        others. They are read while the others are computed. If they went first, the engine would be
        idle for as long as it waits: near capacity that loses more than the order gains.
        """
        cost = self._look(rid)
        number, passed = self._known.setdefault(rid, (next(self._arrivals), {}))
        if cost is None:
            # It overtakes none, and none may overtake it.
            return _Place(number, (math.inf,), -1.0, passed)
        seconds = cost.estimate.seconds(cost.unread)
        waits = cost.estimate.unhidden(cost.unread) > 0.0
        rank: tuple[float, ...] = (2.0 * waits if cost.cached else 1.0,)
        if self._schedule == SHORTEST:
            rank = waits, seconds
        return _Place(number, rank, seconds, passed)
