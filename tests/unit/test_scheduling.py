"""Who changes places in the waiting queue, and how often somebody is overtaken."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.config import CLASSES, SHORTEST
from impress_sglang.cost import Estimate
from impress_sglang.serving.scheduling import WINDOW, QueueOrder, Serving

# What serving takes, and whether anything is cached.
QUICK = Serving(Estimate(1.0, 0.0, 0.01, None), True)
READY = Serving(Estimate(1.0, 0.0, 0.25, None), True)
UNKNOWN = Serving(Estimate(1.0, 0.0, 1.0, None), False)
HIDDEN = Serving(Estimate(1.0, 0.2, 0.3, None), True)
SLOW = Serving(Estimate(1.0, 4.0, 0.4, None), True)
SLOWER = Serving(Estimate(1.0, 9.0, 0.2, None), True)
STATES = {"ready": READY, "unknown": UNKNOWN, "hidden": HIDDEN, "slow": SLOW, "slower": SLOWER}


@dataclasses.dataclass(frozen=True)
class Waiting:
    rid: str
    priority: int | None = None


def make_order(
    schedule: str,
    unread: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
    **others: Serving,
) -> QueueOrder:
    """`others` are those whose names begin so."""
    states = STATES | others

    def look(rid: str) -> Serving | None:
        found = states.get(rid.split("-")[0])
        return None if found is None else found._replace(unread=unread)

    return QueueOrder(schedule, look, clock=clock)


def arranged(order: QueueOrder, *rids: str) -> list[str]:
    queue = [Waiting(rid) for rid in rids]
    order.restore(queue)
    order.arrange(queue)
    return [own.rid for own in queue]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (CLASSES, ["hidden", "ready", "unknown", "slower", "slow"]),
        (SHORTEST, ["ready", "hidden", "unknown", "slow", "slower"]),
    ],
)
def test_who_goes_first(schedule: str, expected: list[str]) -> None:
    """Those of one rank keep their order."""
    order = make_order(schedule)
    assert arranged(order, "slower", "slow", "unknown", "hidden", "ready") == expected


def test_what_was_read_meanwhile_is_ready() -> None:
    assert arranged(make_order(CLASSES), "slow", "unknown") == ["unknown", "slow"]
    assert arranged(make_order(CLASSES, unread=0.1), "slow", "unknown") == ["slow", "unknown"]


def test_nobody_is_put_first_for_whom_the_engine_would_wait() -> None:
    """However soon it would be served: it is read while others are computed."""
    short = Serving(Estimate(1.0, 0.1, 0.05, None), True)
    for unread, first in ((1.0, "unknown"), (0.5, "short")):
        order = make_order(SHORTEST, unread, short=short)
        assert arranged(order, "unknown", "short")[0] == first
        # Who waits longer than it takes itself is not overtaken for that either.
        assert arranged(order, "short", "unknown")[0] == "short"


@pytest.mark.parametrize(
    ("first", "seconds", "times"),
    [("slow", 0.0, WINDOW), ("slow", 0.25, WINDOW), ("unknown", 0.25, 4)],
)
def test_who_was_overtaken_as_long_as_allowed_is_next(
    first: str, seconds: float, times: int
) -> None:
    """As often as the window is long, or for as long as it takes; by the clock."""
    now = 0.0
    order = make_order(SHORTEST, clock=lambda: now, other=QUICK)
    queue = [Waiting(first)]
    for number in range(times + 1):
        queue.append(Waiting(f"other-{number}"))
        order.restore(queue)
        order.arrange(queue)
        assert queue.pop(0).rid == (f"other-{number}" if number < times else first)
        now += seconds


def test_no_more_go_before_a_request_than_it_could_wait_for() -> None:
    """Of those that are admitted in one pass, which nobody has timed yet."""
    order = make_order(SHORTEST)
    rids = ["unknown", *(f"ready-{number}" for number in range(5))]
    assert arranged(order, *rids) == [*rids[1:5], "unknown", "ready-4"]


class World:
    """A queue as SGLang keeps it, beside the same one that nobody rearranges."""

    def __init__(self, schedule: str, unread: float, priorities: int, rng: random.Random) -> None:
        self.now = 0.0
        self.states = dict[str, Serving]()
        self.order = QueueOrder(schedule, self.states.get, clock=lambda: self.now)
        self.queue: list[Waiting] = []
        self.alone: list[Waiting] = []
        # What each takes, if it was looked at; each time that others overtook it, how many did and
        # how long their pass took.
        self.seconds = dict[str, float]()
        self.overtaken = defaultdict[str, list[tuple[int, float]]](list)
        self._unread = unread
        self._priorities = priorities
        self._rng = rng
        self._count = 0

    def add(self) -> None:
        rng, self._count = self._rng, self._count + 1
        own = Waiting(f"r{self._count}", rng.randrange(self._priorities))
        self.queue.append(own)
        self.alone.append(own)
        if rng.random() < 0.9:
            state = rng.choice([*STATES.values(), QUICK])._replace(unread=self._unread)
            self.states[own.rid] = state
            self.seconds[own.rid] = state.estimate.seconds(self._unread)

    def step(self, policy: str, admits: int) -> None:
        self.order.restore(self.queue)
        assert self.queue == self.alone
        # SGLang's policy, whichever it is.
        if policy == "priority":
            self.alone.sort(key=lambda own: own.priority or 0)
        elif policy == "shuffles":
            self._rng.shuffle(self.alone)
        self.queue[:] = self.alone
        self.order.arrange(self.queue)
        assert Counter(self.queue) == Counter(self.alone)
        seconds = self._rng.choice([0.0, 0.2, 2.0])
        # Some are passed over, as where an adapter is not loaded; others are aborted.
        able = [own for own in self.queue if self._rng.random() < 0.8]
        gone = {*able[:admits], *(own for own in self.queue if self._rng.random() < 0.02)}
        for place, own in enumerate(self.queue):
            if own in gone:
                self.order.forget(own.rid)
                continue
            behind = self.alone[self.alone.index(own) :]
            passed = [other for other in self.queue[:place] if other in gone and other in behind]
            assert all(other.priority == own.priority for other in passed)
            assert all(other.rid in self.seconds for other in passed)
            if passed:
                self.overtaken[own.rid].append((len(passed), seconds))
        self.queue = [own for own in self.queue if own not in gone]
        self.alone = [own for own in self.alone if own not in gone]
        self.now += seconds
        # Some are retracted, and have the same id.
        for own in gone:
            if self._rng.random() < 0.2:
                self.overtaken.pop(own.rid, None)
                self.queue.append(own)
                self.alone.append(own)


@given(
    schedule=st.sampled_from([CLASSES, SHORTEST]),
    policy=st.sampled_from(["fcfs", "priority", "shuffles"]),
    priorities=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5)), max_size=40),
    unread=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 99),
)
def test_nobody_is_overtaken_more_often_or_for_longer_than_allowed(
    schedule: str,
    policy: str,
    priorities: int,
    steps: list[tuple[int, int]],
    unread: float,
    seed: int,
) -> None:
    """And SGLang always finds its queue as it left it."""
    world = World(schedule, unread, priorities, random.Random(seed))
    for arrivals, admits in steps:
        for _ in range(arrivals):
            world.add()
        world.step(policy, admits)
        for rid, others in world.overtaken.items():
            assert sum(count for count, _ in others) <= WINDOW
            # When the last ones went before it, it had waited for no longer.
            waited = sum(seconds for _, seconds in others[:-1])
            assert waited <= world.seconds.get(rid, 0.0) + 1e-9
