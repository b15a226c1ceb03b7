"""What waiting requests will use of the pool outlasts what nobody waits for, as in SGLang.

The scheduling policy, which refreshes what waits, is SGLang's own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import WAITING_PREFIX_REFRESH_INTERVAL, SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome, EvictParams

from tests.integration.worlds import TOKENS, World

WANTED, POPULAR = 1000, 2000
"""First tokens of prefixes: somebody waits for one, and the other one was used more often."""


class Queue:
    """A waiting queue, SGLang's scheduling policy, and a tree cache of ours."""

    def __init__(self, world: World, order: str = "fcfs") -> None:
        self.world, self.cache = world, world.cache
        self.policy = SchedulePolicy(order, world.cache, False, False, False)
        self.waiting: list[Req] = []

    def resident(self, first: int, times: int = 0, length: int = TOKENS) -> None:
        """A prefix is computed and, later, used some times."""
        self.world.make_resident(range(first, first + length))
        for number in range(times):
            req = self.request(f"{first}-{number}", first, length)
            self.world.match(req)
            self.abort(req)

    def request(self, rid: str, first: int, length: int = TOKENS) -> Req:
        tokens = [*range(first, first + length), 9]
        return self.world.request(rid, tokens, retention=1.0)

    def add(self, rid: str, first: int, length: int = TOKENS) -> Req:
        """A request begins to wait."""
        return self.enqueue(self.request(rid, first, length))

    def enqueue(self, req: Req) -> Req:
        self.cache.prefetch(req)
        self.waiting.append(req)
        return req

    def schedule(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            self.policy.calc_priority(self.waiting)

    def evict(self, num_tokens: int = TOKENS) -> None:
        self.cache.evict(EvictParams(num_tokens=num_tokens))

    def left(self, first: int, length: int = TOKENS) -> int:
        """How many tokens of a prefix are resident; nothing is refreshed by that."""
        node, tokens = self.cache.root_node, array("q", range(first, first + length))
        left = 0
        while left < length and (child := node.children.get(tokens[left])) is not None:
            left, node = left + len(child.key), child
        return left

    def admit(self, req: Req) -> None:
        req.init_next_round_input(self.cache)
        self.cache.prefix_device_indices(req)

    def abort(self, req: Req) -> None:
        self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)

    def release(self, req: Req) -> None:
        self.cache.on_release(req, checkpointed=False)


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration as in a server."""
    memory = SimpleNamespace(radix_eviction_policy="lru")
    monkeypatch.setattr(schedule_policy, "get_memory", lambda: memory)
    disagg = SimpleNamespace(disaggregation_mode="null")
    monkeypatch.setattr(schedule_policy, "get_disagg", lambda: disagg)


@pytest.fixture
def order() -> str:
    return "fcfs"


@pytest.fixture
def options() -> dict[str, str]:
    return {"load": "always"}


@pytest.fixture
def queue(world: World, order: str) -> Queue:
    return Queue(world, order)


@pytest.mark.parametrize("order", ["fcfs", "lpm"])
@pytest.mark.parametrize("options", [{"policy": "as+h2o+lru"}, {"policy": "paper"}])
@pytest.mark.parametrize("halves", [False, True])
def test_what_somebody_waits_for_outlasts_what_is_popular(queue: Queue, halves: bool) -> None:
    """Policy `as+h2o+lru` evicts as SGLang does.

    Another prompt may leave the prefix half-way, after it was matched.
    """
    queue.resident(WANTED)
    queue.resident(POPULAR, times=3)
    queue.add("waits", WANTED)
    queue.schedule()
    if halves:
        queue.resident(WANTED, length=40)
    queue.evict()

    assert queue.left(WANTED) == TOKENS and not queue.left(POPULAR)


def test_what_waits_behind_the_head_and_is_computed_meanwhile(queue: Queue) -> None:
    """Only SGLang's refresh finds it: nobody matches such a request before it is its turn."""
    queue.add("head", POPULAR + 500)
    queue.add("waits", WANTED)
    queue.schedule()
    queue.resident(WANTED)
    queue.resident(POPULAR, times=3)
    queue.schedule(WAITING_PREFIX_REFRESH_INTERVAL)
    queue.evict()

    assert queue.left(WANTED) == TOKENS and not queue.left(POPULAR)


@pytest.mark.parametrize("end", [Queue.admit, Queue.abort, Queue.release])
def test_it_ends_with_the_waiting(queue: Queue, end: Callable[[Queue, Req], None]) -> None:
    """What an admitted request uses is locked; after it the score decides again."""
    queue.resident(WANTED)
    queue.resident(POPULAR, times=3)
    first, second = queue.add("first", WANTED), queue.add("second", WANTED)
    queue.schedule()
    end(queue, first)
    queue.cache.check_integrity()
    queue.evict(1)
    assert queue.left(WANTED) == TOKENS and not queue.left(POPULAR), "another one waits for it"

    queue.resident(POPULAR, times=3)
    end(queue, second)
    queue.evict(1)
    assert queue.left(POPULAR) == TOKENS and not queue.left(WANTED)


def test_it_is_evicted_last_and_not_never(queue: Queue) -> None:
    """The head of the queue keeps its prefix longest; whoever runs can have the whole pool."""
    queue.resident(POPULAR, times=3)
    queue.resident(WANTED)
    queue.resident(POPULAR + 500, times=1)
    queue.add("head", WANTED)
    queue.add("tail", POPULAR)
    queue.schedule()
    for left in ((TOKENS, TOKENS, 0), (TOKENS, 0, 0), (0, 0, 0)):
        queue.evict()
        assert tuple(map(queue.left, (WANTED, POPULAR, POPULAR + 500))) == left
        queue.cache.check_integrity()
    assert queue.world.allocator.available_size() == queue.world.allocator.size


@pytest.mark.parametrize("options", [{"lookahead": "on"}, {"lookahead": "off"}])
def test_the_tail_of_the_queue_gives_its_prefix_up_first(
    queue: Queue, options: dict[str, str]
) -> None:
    """Also where the queue was ordered anew, and SGLang has refreshed nothing since.

    Without look-ahead the latest refresh decides, which was in the order of arrival.
    """
    queue.resident(WANTED)
    queue.resident(POPULAR)
    queue.add("first", WANTED)
    queue.add("second", POPULAR)
    queue.schedule()
    queue.waiting.reverse()
    queue.schedule()
    queue.evict(1)

    left = queue.left(WANTED), queue.left(POPULAR)
    assert left == ((0, TOKENS) if options["lookahead"] == "on" else (TOKENS, 0))
