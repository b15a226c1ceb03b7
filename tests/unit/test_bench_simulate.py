"""The simulator of `bench simulate`: by hand where a hand can do it, by properties elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies.eviction import BASES, Hierarchy, make_policy
from bench.policies.sessions import TALKS, Item, Request, Sessions, Shared
from bench.policies.simulation import ORDERS, Rates, Simulation, summarize
from impress_sglang.serving.scheduling import WINDOW

# A token a millisecond to compute, and half of it to bring from the host; ten times that from SSD.
RATES = Rates(
    prefill_tokens_per_s=1000,
    decode_ms=10,
    batch=2,
    h2d_gbps=2.0,
    ssd_gbps=0.2,
    bytes_per_token=1_000_000,
)
PREFIX = 100
SIZE = PREFIX * RATES.bytes_per_token
REAL = [name for name in BASES if name != "belady"]
AHEAD = [f"{window}+{base}" for window in ("window", "queue") for base in REAL]

traces = st.lists(st.integers(0, 7), min_size=1, max_size=60)


class Listed:
    """Requests one by one: (prefix, arrival), of one size each."""

    def __init__(self, asked: Sequence[tuple[int, float]], answer: int = 1) -> None:
        items: dict[int, Item] = {}
        last: dict[int, Request] = {}
        self._requests = []
        for number, arrival in asked:
            item = items.setdefault(number, Item(number))
            request = Request(item, arrival, PREFIX, 10, answer, PREFIX)
            if number in last:
                last[number].next_use = arrival
            last[number] = request
            self._requests.append(request)

    def first(self) -> Iterator[Request]:
        return iter(self._requests)

    def after(self, request: Request, now: float) -> Request | None:
        return None


class Checked(Hierarchy):
    """No byte is lost or counted twice."""

    def put(self, item: Item, size: int, level: int, now: float) -> None:
        self.items = {*getattr(self, "items", ()), item}
        super().put(item, size, level, now)
        for tier in self.tiers:
            own = [other for other in self.items if other.level == tier.level]
            assert sum(other.bytes for other in own) == tier.bytes <= tier.capacity
            held = [other for other in own if other.held]
            assert not held or tier.name == "host"


def simulation(
    name: str, workload: Listed | Shared | Sessions, *, host: float = 2, ssd: float = 2, **how
):
    capacities = [("host", host * SIZE), ("ssd", ssd * SIZE)]
    hierarchy = Checked(capacities, make_policy(name, (host + ssd) * SIZE))
    return Simulation(RATES, hierarchy, workload, **how)


def hits(name: str, trace: Sequence[int], **how: float) -> int:
    """Of requests that come long after one another."""
    workload = Listed([(number, 100.0 * place) for place, number in enumerate(trace)])
    return sum(request.source is not None for request in simulation(name, workload, **how).run())


def test_times_of_three_requests() -> None:
    workload = Listed([(0, 0.0), (1, 0.05), (0, 0.06)], answer=3)
    first, second, third = simulation("lru", workload).run()
    # 110 tokens are computed, then the next request waits for the engine.
    assert first.first_token == pytest.approx(0.11)
    assert (second.admitted, second.first_token) == pytest.approx((0.11, 0.22))
    # The batch is full: two steps until the first ends, then 10 tokens beside 100 from the host.
    assert (third.admitted, third.first_token) == pytest.approx((0.24, 0.29))
    assert [request.source for request in (first, second, third)] == [None, None, "host"]
    assert [request.behind for request in (first, second, third)] == [0, 1, 0]


@pytest.mark.parametrize(("fetch", "seconds"), [(False, 0.5), (True, 0.39)])
def test_times_of_a_prefix_on_ssd(fetch: bool, seconds: float) -> None:
    """It is read in 0.5 s, of which 0.11 s may pass while another request is computed."""
    workload = Listed([(0, 0.0), (1, 1.0), (2, 2.0), (3, 10.0), (0, 10.0)])
    own = simulation("lru", workload, fetch=fetch)
    last = own.run()[-1]
    assert last.source == "ssd"
    assert last.first_token - last.admitted == pytest.approx(seconds)
    assert own.ssd_bytes == SIZE


@given(trace=traces, host=st.integers(1, 3), ssd=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_nothing_has_more_hits_than_belady(trace: list[int], host: int, ssd: int) -> None:
    best = hits("belady", trace, host=host, ssd=ssd)
    assert all(hits(name, trace, host=host, ssd=ssd) <= best for name in REAL)


@given(trace=traces)
@settings(max_examples=30, deadline=None)
def test_look_ahead_is_its_base_without_a_queue(trace: list[int]) -> None:
    for name in AHEAD:
        assert hits(name, trace) == hits(name.partition("+")[2], trace)


@given(trace=traces, depth=st.sampled_from((0, 3, math.inf)))
@settings(max_examples=30, deadline=None)
def test_bytes_are_conserved_with_a_queue(trace: list[int], depth: float) -> None:
    for name in [*AHEAD, "belady"]:
        workload = Listed([(number, 0.03 * place) for place, number in enumerate(trace)], answer=4)
        served = simulation(name, workload, host=4, depth=depth).run()
        assert len(served) == len(trace)


@given(trace=traces)
@settings(max_examples=30, deadline=None)
def test_the_whole_queue_is_as_good_as_belady(trace: list[int]) -> None:
    """All requests wait from the beginning, so that the queue is the future."""
    found = []
    for name in ("queue+lru", "belady"):
        workload = Listed([(number, 1e-9 * place) for place, number in enumerate(trace)])
        served = simulation(name, workload, fetch=False).run()
        found.append(sum(request.source is not None for request in served))
    assert found[0] == found[1]


@given(
    trace=st.lists(st.integers(0, 30), min_size=40, max_size=120),
    order=st.sampled_from(ORDERS),
    gap=st.sampled_from((0.0, 0.05, 0.1)),
)
@settings(max_examples=40, deadline=None)
def test_nobody_is_overtaken_more_often_than_the_window(
    trace: list[int], order: str, gap: float
) -> None:
    workload = Listed([(number, gap * place) for place, number in enumerate(trace)])
    served = simulation("queue+score", workload, host=4, ssd=20, order=order).run()
    places = [request.position for request in served]
    for place, own in enumerate(places):
        overtaking = sum(other > own for other in places[:place])
        assert overtaking == served[place].overtaken <= WINDOW
        assert order != "fcfs" or not overtaking


@pytest.mark.parametrize(
    ("order", "expected"),
    [("fcfs", [0, 3, 1]), ("classes", [1, 3, 0]), ("estimate", [3, 1, 0]), ("shortest", [1, 3, 0])],
)
def test_orders(order: str, expected: list[int]) -> None:
    """While 2 is computed come 0, which is on SSD, 3, which nobody knows, and 1, a resident."""
    asked = [(0, 0.0), (5, 1.0), (4, 2.0), (1, 3.0), (2, 9.0), (0, 9.01), (3, 9.02), (1, 9.03)]
    hierarchy = Hierarchy([("device", 3 * SIZE), ("ssd", 9 * SIZE)], make_policy("lru", 0))
    served = Simulation(RATES, hierarchy, Listed(asked), order=order).run()
    assert [request.item.number for request in served[5:]] == expected


def test_a_window_ends_where_its_bytes_fill_the_caches() -> None:
    policy = make_policy("window+lru", 2.5 * SIZE)
    requests = [Request(Item(number), 0.0, PREFIX, 1, 1, PREFIX) for number in (0, 1, 2)]
    requests.insert(1, Request(requests[0].item, 0.0, PREFIX, 1, 1, PREFIX))
    for position, request in enumerate(requests):
        request.position, request.queued = position, True
        request.item.waiting.append(request)
        policy.wait(request, SIZE)
    # The second request for item 0 takes no room.
    assert [request.inside for request in requests] == [True, True, True, False]
    keys = [policy.key(request.item) for request in requests]
    assert keys[3] < keys[2] < keys[0]
    for request in requests[:2]:
        request.queued = False
        request.item.waiting.remove(request)
        policy.leave(request, SIZE)
    assert requests[3].inside
    assert policy.key(requests[0].item) < policy.key(requests[3].item)


def test_one_seed_gives_one_result() -> None:
    def figures(seed: int) -> dict[str, object]:
        talk = TALKS["sharegpt"]
        own = simulation("queue+lru", Sessions(talk, 40, 2.0, 1.0, 4096, seed), host=60, ssd=90)
        return summarize(own, own.run(), 10)

    assert figures(1) == figures(1) != figures(2)


@pytest.mark.parametrize(
    ("name", "turns", "longer"), [("sharegpt", 5.75, 0.47), ("mtbench101", 3.03, 0)]
)
def test_sessions_are_as_published(name: str, turns: float, longer: float) -> None:
    """Their turns in the mean, and the share with more than 2,048 tokens."""
    workload = Sessions(TALKS[name], 4000, 1.0, 1.0, 1 << 20)
    requests, lengths = 0, []
    for first in workload.first():
        request: Request | None = first
        while request:
            requests, length = requests + 1, request.kept
            request = workload.after(request, 0.0)
        lengths.append(length)
    assert requests / 4000 == pytest.approx(turns, rel=0.03)
    assert sum(length > 2048 for length in lengths) / 4000 == pytest.approx(longer, abs=0.02)
