"""Who changes places in the waiting queue, and how often somebody is overtaken."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.config import CLASSES, SHORTEST
from impress_sglang.cost import Estimate
from impress_sglang.serving.scheduling import REORDER_WINDOW, QueueOrder, Serving

# What serving takes, and whether anything is cached.
QUICK = Serving(Estimate(1.0, 0.0, 0.01, None), True)
READY = Serving(Estimate(1.0, 0.0, 0.25, None), True)
UNKNOWN = Serving(Estimate(1.0, 0.0, 1.0, None), False)
HIDDEN = Serving(Estimate(1.0, 0.2, 0.3, None), True)
SLOW = Serving(Estimate(1.0, 4.0, 0.4, None), True)
SLOWER = Serving(Estimate(1.0, 9.0, 0.2, None), True)
STATES = {"ready": READY, "unknown": UNKNOWN, "hidden": HIDDEN, "slow": SLOW, "slower": SLOWER}


@dataclasses.dataclass(frozen=True, eq=False)
class Waiting:
    rid: str
    priority: int | None = None


def make_order(schedule: str, unread: float = 1.0, **others: Serving) -> QueueOrder:
    """`others` are those whose names begin so."""
    states = STATES | others

    def look(rid: str) -> Serving | None:
        found = states.get(rid.split("-")[0])
        return None if found is None else found._replace(unread_fraction=unread)

    return QueueOrder(schedule, look)


def arranged(order: QueueOrder, *rids: str) -> list[str]:
    queue = [Waiting(rid) for rid in rids]
    order.arrange(queue)
    return [request.rid for request in queue]


def test_who_comes_back_has_overtaken_anew() -> None:
    """SGLang takes requests back that it has admitted; nobody lets them pass for ever."""
    order, passed = make_order(SHORTEST, quick=QUICK), 0
    for _ in range(3 * REORDER_WINDOW):
        passed += arranged(order, "unknown", "quick")[0] == "quick"
        order.forget("quick")
    assert 0 < passed <= REORDER_WINDOW


@pytest.mark.parametrize(
    ("schedule", "unread", "queue", "expected"),
    [
        # Those of one rank keep their order.
        (CLASSES, 1.0, "slower slow unknown hidden ready", "hidden ready unknown slower slow"),
        (SHORTEST, 1.0, "slower slow unknown hidden ready", "ready hidden unknown slow slower"),
        # What was read meanwhile is ready.
        (CLASSES, 1.0, "slow unknown", "unknown slow"),
        (CLASSES, 0.1, "slow unknown", "slow unknown"),
        # Nobody is put first for whom the engine would wait, however soon it would be served: it
        # is read while others are computed. Nor does anybody overtake it for that.
        (SHORTEST, 1.0, "unknown short", "unknown short"),
        (SHORTEST, 0.5, "unknown short", "short unknown"),
        *((SHORTEST, unread, "short unknown", "short unknown") for unread in (1.0, 0.5)),
        # No more go before a request than it could wait for, of those that are admitted in one
        # pass, which nobody has timed yet.
        (
            *(SHORTEST, 1.0, "unknown ready-0 ready-1 ready-2 ready-3 ready-4"),
            "ready-0 ready-1 ready-2 ready-3 unknown ready-4",
        ),
    ],
)
def test_who_goes_first(schedule: str, unread: float, queue: str, expected: str) -> None:
    order = make_order(schedule, unread, short=Serving(Estimate(1.0, 0.1, 0.05, None), True))
    assert arranged(order, *queue.split()) == expected.split()


@pytest.mark.parametrize("kept", [True, False], ids=["arrival", "by SGLang in each pass"])
@pytest.mark.parametrize(("other", "times"), [(QUICK, REORDER_WINDOW), (READY, 4)])
def test_who_was_overtaken_as_long_as_allowed_is_next(
    other: Serving, times: int, kept: bool
) -> None:
    """As often as the window is long, or for as long as it takes; whoever orders the queue."""
    order = make_order(SHORTEST, other=other)
    arrived = queue = [Waiting("unknown")]
    for number in range(times + 1):
        arrived.append(Waiting(f"other-{number}"))
        queue = queue if kept else [*arrived]
        for _ in range(2):
            order.arrange(queue)
        arrived.remove(gone := queue[0])
        assert gone.rid == (f"other-{number}" if number < times else "unknown")
        order.forget(gone.rid)


class World:
    """A queue, and who overtook whom in it; who is retracted comes as another one."""

    def __init__(self, schedule: str, unread: float, priorities: int, rng: random.Random) -> None:
        self.states = dict[str, Serving]()
        self.order = QueueOrder(schedule, self.states.get)
        self.queue: list[Waiting] = []
        # What each takes, if it was looked at.
        self.seconds = dict[str, float]()
        self.overtaken = defaultdict[Waiting, set[Waiting]](set)
        self._unread, self._priorities, self._rng, self._count = unread, priorities, rng, 0

    def add(self) -> None:
        rng, self._count = self._rng, self._count + 1
        request = Waiting(f"r{self._count}", rng.randrange(self._priorities))
        self.queue.append(request)
        if rng.random() < 0.9:
            state = rng.choice([*STATES.values(), QUICK])._replace(unread_fraction=self._unread)
            self.states[request.rid] = state
            self.seconds[request.rid] = state.estimate.seconds(self._unread)

    def step(self, policy: str, admits: int) -> None:
        # SGLang's policy, whichever it is.
        if policy == "priority":
            self.queue.sort(key=lambda request: request.priority or 0)
        elif policy == "shuffles":
            self._rng.shuffle(self.queue)
        before = [*self.queue]
        self.order.arrange(self.queue)
        assert Counter(self.queue) == Counter(before)
        assert self.queue[REORDER_WINDOW:] == before[REORDER_WINDOW:]
        for place, req in enumerate(self.queue):
            for other in {*self.queue[:place]} - {*before[: before.index(req)]}:
                assert other.priority == req.priority and {req.rid, other.rid} <= {*self.seconds}
                self.overtaken[req].add(other)
                assert len(self.overtaken[req]) <= REORDER_WINDOW
                seconds = sum(self.seconds[passed.rid] for passed in self.overtaken[req])
                assert seconds <= self.seconds[req.rid] + 1e-9
        # Some are passed over, as where an adapter is not loaded; others are aborted.
        able = [request for request in self.queue if self._rng.random() < 0.8]
        gone = {*able[:admits], *(request for request in self.queue if self._rng.random() < 0.02)}
        for request in gone:
            self.order.forget(request.rid)
            self.queue.remove(request)
            if self._rng.random() < 0.2:
                self.queue.append(dataclasses.replace(request))


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
    world = World(schedule, unread, priorities, random.Random(seed))
    for arrivals, admits in steps:
        for _ in range(arrivals):
            world.add()
        world.step(policy, admits)
