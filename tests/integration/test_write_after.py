"""Prompts are stored once others have asked for the same, and no more of them than that."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.serving.clocks import clock_for
from impress_sglang.serving.paper.blend_plan import BlendPlan
from impress_sglang.serving.paper.blended_loading import BlendedLoading
from impress_sglang.serving.why import Reason
from tests.integration import worlds

WISHES = {"bits": 6.0, "retention": 1.0}


@pytest.fixture
def options() -> dict[str, int]:
    return {"write_after": 2}


def test_what_two_ask_for_is_stored(world: worlds.World) -> None:
    """Questions that nobody asks again are not."""
    stored = [world.compute(f"r{number}", 2000 + 100 * number) for number in range(4)]
    assert stored == [0, worlds.TOKENS, worlds.TOKENS, worlds.TOKENS]
    assert world.stored(1000) == worlds.TOKENS
    assert not world.cache._saves._worth


@pytest.mark.parametrize("retracted", [False, True])
def test_others_do_not_count(world: worlds.World, retracted: bool) -> None:
    """Neither a request that is matched again, nor one of another namespace."""
    assert world.compute("r", 2000, matches=3, retracted=retracted) == 0
    assert world.compute("s", 2000, namespace="other") == 0
    assert world.compute("t", 3000) == worlds.TOKENS


def test_samples_of_one_request_are_one(world: worlds.World) -> None:
    """SGLang computes its prompt first, without a token behind it."""
    for rid, new_tokens in (("r", 0), ("r-1", 8), ("r-2", 8)):
        assert world.compute(rid, 2000, sampling={"n": 2, "max_new_tokens": new_tokens}) == 0
    assert world.compute("s", 2000) == 2 * worlds.TOKENS


def test_a_conversation_is_stored_one_turn_later(world: worlds.World) -> None:
    """All of it but the turn under way: the last answer was seen by whom it was given to."""
    answer = [*range(5000, 5000 + worlds.TOKENS)]
    assert world.compute("r", 2000, answer=answer) == 0
    talk = [*worlds.STORED, *range(2000, 2000 + worlds.TOKENS), *answer]
    assert world.compute("s", 3000, prompt=talk) == len(talk)


def test_a_request_that_never_ran_leaves_nothing(world: worlds.World) -> None:
    req = world.request("r", worlds.STORED)
    world.match(req)
    assert world.cache._saves._worth
    world.cache.release_aborted_request(req.cache_request_handle)
    assert not world.cache._saves._worth


@pytest.mark.parametrize("options", [{"write_after": 1}])
def test_without_counting_all_is_stored_at_once(world: worlds.World) -> None:
    assert world.compute("r", 2000) == 2 * worlds.TOKENS


@pytest.fixture
def blends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[worlds.World]:
    """With room for longer prompts, whose text may be reused where it is no prefix."""
    worlds.install_hooks(monkeypatch)
    world = worlds.blending_world(tmp_path, size=2048, write_after=2)
    yield world
    world.close()


def test_documents_in_another_order_are_stored_once_and_reused(blends: worlds.World) -> None:
    """And prompts that nobody sends again are not, nor questions behind documents."""
    stored = [
        blends.compute(f"r{number}", 2000 + 100 * number, prompt=worlds.shuffled(*order))
        for number, order in enumerate([(1, 2, 3), (4, 5, 6), (3, 1, 2), (2, 1, 3), (6, 5, 4)])
    ]
    assert stored[:2] == [0, 0] and 800 < stored[2] <= 900
    assert stored[3] == stored[2] and 1600 < stored[4] <= 1800
    assert not blends.cache._saves.for_others

    order = worlds.shuffled(2, 3, 1)
    plan = planned(blends, blends.request("r", order, **WISHES))
    assert isinstance(plan, BlendPlan) and plan.reused > 700
    assert planned(blends, blends.request("s", order, namespace="another", **WISHES)) is None


def planned(world: worlds.World, req: Any) -> Any:
    tokens, known = req.origin_input_ids, world.cache._known.note(req)
    return world.cache._plan(RadixKey(tokens, req.extra_key, limit=len(tokens) - 1), 0, known)[1]


def test_who_stores_documents_for_others_computes_them_exactly(blends: worlds.World) -> None:
    """Although some of them are stored, and could be reused."""
    compute_documents(blends, (1,), (1,), (2, 3, 4, 1))
    req = blends.request("d", worlds.shuffled(3, 4, 2, 1), **WISHES)
    for expected in (True, False):
        assert isinstance(planned(blends, req), BlendPlan) == expected
        blends.cache._saves.sight(req)
    assert 800 < (blends.cache._saves.seen("d") or 0) <= 900
    blends.cache.release_aborted_request(req.cache_request_handle)
    assert not blends.cache._saves.for_others


def test_nothing_is_computed_exactly_for_what_cannot_be_stored(
    blends: worlds.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_documents(blends, (1,), (1,), (2, 3, 4, 1))
    budget = type(blends.runtime.store._quota.budget)
    monkeypatch.setattr(budget, "is_spent", property(lambda own: True))
    req = matched(blends, worlds.shuffled(3, 4, 2, 1))
    assert not blends.cache._saves.for_others
    assert isinstance(blends.cache._known["r"].plan, BlendPlan)
    blends.cache.release_aborted_request(req.cache_request_handle)


def compute_documents(world: worlds.World, *orders: Sequence[int]) -> None:
    for number, order in enumerate(orders):
        world.compute(f"before-{number}", 2000, prompt=worlds.shuffled(*order))


def matched(world: worlds.World, prompt: list[int], rid: str = "r") -> Any:
    """A request that accepts blending, and plans it."""
    req = world.request(rid, prompt, **WISHES)
    world.match(req)
    assert isinstance(world.cache._known[rid].plan, BlendPlan)
    return req


def test_who_could_not_open_a_blend_has_the_usual_plan(
    blends: worlds.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_documents(blends, (1, 2), (1, 2))
    req = matched(blends, worlds.shuffled(1, 3, 2))
    known = blends.cache._known["r"]
    with monkeypatch.context() as closed:
        closed.setattr(blends.runtime._opener, "open", lambda *_: None)
        assert blends.admit(req) is None and not known.declined
    blends.match(req)
    assert known.plan is not None and not isinstance(known.plan, BlendPlan)
    assert known.plan.stop > 250 and known.blend.why == (Reason.NOT_OPENED, "")
    blends.cache.release_aborted_request(req.cache_request_handle)


def test_what_was_found_in_a_store_ends_with_it(blends: worlds.World) -> None:
    compute_documents(blends, (1, 2), (1, 2))
    req = matched(blends, worlds.shuffled(2, 1))
    known = blends.cache._known["r"]
    assert known.blend.found is not None
    blends.cache.weights.begin("a test")
    assert known.blend.found is None and known.plan is None
    blends.cache.release_aborted_request(req.cache_request_handle)


def test_who_finds_others_blending_does_so_in_the_next_pass(blends: worlds.World) -> None:
    compute_documents(blends, (1, 2), (1, 2))

    def admitted(rid: str) -> bool:
        return blends.admit(matched(blends, worlds.shuffled(2, 1), rid)) is not None

    assert admitted("r") and not admitted("s"), "how long that takes is not known yet"
    loading = blends.runtime.live["r"].loading
    assert isinstance(loading, BlendedLoading)
    loading.blended = True
    assert admitted("s")


def test_what_a_blend_takes_is_learnt(blends: worlds.World) -> None:
    compute_documents(blends, (1, 2), (1, 2))
    req = matched(blends, worlds.shuffled(2, 1))
    runtime, request = blends.runtime, blends.admit(req)
    assert request is not None and isinstance(request.loading, BlendedLoading)
    runtime.estimator.note_forward(100, 5050.0, 0.01)
    request.loading.blended, request.computed = True, 50.0
    request.time_loading(clock_for(torch.device("cpu")).stopwatch())
    with request.stopwatch or pytest.fail():
        time.sleep(0.01)
    for _ in range(worlds.SHAPE.num_layers):
        runtime.finish_layer(request)
    assert runtime.estimator.blending.observations == 1
    assert runtime.estimator.copying.observations == 0
    blends.cache.on_release(req, checkpointed=False)
