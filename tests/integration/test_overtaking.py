"""Requests behind one that waits for another request's pass are admitted, and leave its room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult

from impress_sglang.integration.paper.overtaking import let_others_pass
from tests.integration.worlds import STORED, World

NEW = 8


@pytest.fixture
def waiting(world: World) -> list[Any]:
    """Two requests that are held back, because a third one brings their prefix."""
    world.store_prompt(1000)
    sampling, wanted = {"max_new_tokens": NEW}, {"retention": 1.0, "bits": "exact"}
    reqs = [world.request(rid, [*STORED, 7, 8], sampling=sampling, **wanted) for rid in "abc"]
    admitted = [world.match(req) and world.admit(req) for req in reqs]
    assert admitted[0] is not None and admitted[1:] == [None, None]
    return reqs[1:]


def make_adder(tree_cache: Any, limit: int | None = None, running: int = 1) -> Any:
    """As SGLang's, with as many requests in a pass at most, and room for four in all."""
    return SimpleNamespace(
        tree_cache=tree_cache,
        memory_budget=SimpleNamespace(total_offset=100),
        prefill_max_requests=limit,
        running_batch=SimpleNamespace(reqs=[None] * running),
        max_running_requests=4,
    )


@pytest.mark.parametrize(
    ("limit", "running", "left"), [(None, 1, 1), (None, 3, 0), (1, 1, 1), (2, 1, 1), (1, 2, 0)]
)
def test_who_waits_keeps_its_room(
    world: World, waiting: list[Any], limit: int | None, running: int, left: int
) -> None:
    """Slots for what its prefix lacks, and a row; who waits is in no pass, which may be limited."""
    adder = make_adder(world.cache, limit, running)
    for req in waiting:
        assert let_others_pass(AddReqResult.OTHER, adder, req) == AddReqResult.CONTINUE
    assert adder.memory_budget.total_offset == 100 + 2 * (2 + NEW)
    assert adder.prefill_max_requests == left


def test_no_room_ends_the_pass_and_not_all_passes(world: World, waiting: list[Any]) -> None:
    """Otherwise who waits would not be looked at again before a running request ends."""
    adder, other = make_adder(world.cache), world.request("other", [*range(9)])
    assert let_others_pass(AddReqResult.NO_TOKEN, adder, other) == AddReqResult.OTHER
    for req in waiting:
        world.cache.release_aborted_request(req.cache_request_handle)
    assert let_others_pass(AddReqResult.NO_TOKEN, adder, other) == AddReqResult.NO_TOKEN


def test_all_else_is_left_to_sglang(world: World, waiting: list[Any]) -> None:
    other = world.request("other", [*range(9)])
    for cache, req in ((world.cache, other), (object(), waiting[0])):
        adder = make_adder(cache)
        for result in (AddReqResult.CONTINUE, AddReqResult.OTHER):
            assert let_others_pass(result, adder, req) == result
        assert adder == make_adder(cache)
