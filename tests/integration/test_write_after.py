"""Prompts are stored once others have asked for the same, and no more of them than that."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from impress_sglang.attention.rotation import KeyRotation
from impress_sglang.management import prefix_hashes
from impress_sglang.serving.blend_plan import BlendPlan
from impress_sglang.serving.blended_loading import BlendedLoading
from impress_sglang.serving.clocks import clock_for
from impress_sglang.serving.why import Reason
from tests.integration import test_weights
from tests.integration.test_weights import SHAPE, TOKENS, World, install_hooks


@pytest.fixture
def least() -> int:
    return 2


@pytest.fixture
def world(tmp_path: Path, least: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    install_hooks(monkeypatch)
    world = World(tmp_path, write_after=least)
    yield world
    world.runtime.close()


SHARED = [*range(1000, 1000 + TOKENS)]


def ask(
    world: World,
    rid: str,
    question: int,
    *,
    prompt: list[int] = SHARED,
    answer: list[int] | None = None,
    matches: int = 1,
    retracted: bool = False,
    namespace: str | None = None,
    **sampling: int,
) -> int:
    """How many tokens are stored after a request for a shared prompt and a question of its own."""
    tokens = array("q", [*prompt, *range(question, question + TOKENS)])
    (row,) = world.rows.alloc_rows(1)
    slots = world.allocator.alloc(len(tokens))
    assert slots is not None
    world.rows.req_to_token[row, : len(tokens)] = slots
    req = Req(rid, "", tokens, SamplingParams(**sampling), extra_key=namespace)
    req.full_untruncated_fill_ids = tokens
    req.kv = SimpleNamespace(req_pool_idx=row)
    for number in range(matches):
        if retracted and number:
            world.cache._forget(rid)
        key = RadixKey(tokens, req.extra_key, limit=len(tokens) - 1)
        world.cache.match_prefix(MatchPrefixParams(key=key, req=req))
    for save in world.cache.passes.begin_saves([rid], [len(tokens)]).values():
        save.open(SHAPE.num_layers)
    world.runtime.store.writes.drain()
    world.cache._saves._begun.pop(rid, None)
    req.output_ids = array("q", answer or [])
    world.cache._forget(rid)
    world.cache._saves.end(req)
    world.rows.free_slots.append(row)
    world.allocator.free(slots)
    return sum(segment.info.num_tokens for segment in world.runtime.store.tree.segments())


def test_what_two_ask_for_is_stored(world: World) -> None:
    """Questions that nobody asks again are not."""
    stored = [ask(world, f"r{number}", 2000 + 100 * number) for number in range(4)]
    assert stored == [0, TOKENS, TOKENS, TOKENS]
    assert world.stored(1000) == TOKENS
    assert not world.cache._saves._worth


@pytest.mark.parametrize("retracted", [False, True])
def test_others_do_not_count(world: World, retracted: bool) -> None:
    """Neither a request that is matched again, nor one of another namespace."""
    assert ask(world, "r", 2000, matches=3, retracted=retracted) == 0
    assert ask(world, "s", 2000, namespace="other") == 0
    assert ask(world, "t", 3000) == TOKENS


def test_samples_of_one_request_are_one(world: World) -> None:
    """SGLang computes its prompt first, without a token behind it."""
    for rid, new_tokens in (("r", 0), ("r-1", 8), ("r-2", 8)):
        assert ask(world, rid, 2000, n=2, max_new_tokens=new_tokens) == 0
    assert ask(world, "s", 2000) == 2 * TOKENS


def test_a_conversation_is_stored_one_turn_later(world: World) -> None:
    """All of it but the turn under way: the last answer was seen by whom it was given to."""
    answer = [*range(5000, 5000 + TOKENS)]
    assert ask(world, "r", 2000, answer=answer) == 0
    talk = [*SHARED, *range(2000, 2000 + TOKENS), *answer]
    assert ask(world, "s", 3000, prompt=talk) == len(talk)


def test_a_request_that_never_ran_leaves_nothing(world: World) -> None:
    req = Req("r", "", array("q", SHARED), SamplingParams())
    world.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", SHARED)), req=req))
    assert world.cache._saves._worth
    world.cache.release_aborted_request(req.cache_request_handle)
    assert not world.cache._saves._worth


@pytest.mark.parametrize("least", [1])
def test_without_counting_all_is_stored_at_once(world: World) -> None:
    assert ask(world, "r", 2000) == 2 * TOKENS


@pytest.fixture
def blends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """With room for longer prompts, whose text may be reused where it is no prefix."""
    install_hooks(monkeypatch)
    monkeypatch.setattr(test_weights, "TOKENS", 8 * TOKENS)
    # Which windows are counted is chosen by chance.
    chance = random.Random(1)
    fixed = SimpleNamespace(token_bytes=chance.randbytes, randbits=chance.getrandbits)
    monkeypatch.setattr(prefix_hashes, "secrets", fixed)
    world = World(tmp_path, write_after=2, blend=0.15, blend_min_tokens=200)
    world.runtime.blend_with(KeyRotation(lambda rows: torch.zeros(rows, 8), halves=True), 4096)
    yield world
    world.runtime.close()


def shuffled(*order: int) -> list[int]:
    """Documents in some order."""
    return [own for n in order for own in range(10_000 * n, 10_000 * n + 300)]


def test_documents_in_another_order_are_stored_once_and_reused(blends: World) -> None:
    """And prompts that nobody sends again are not, nor questions behind documents."""
    stored = [
        ask(blends, f"r{number}", 2000 + 100 * number, prompt=shuffled(*order))
        for number, order in enumerate([(1, 2, 3), (4, 5, 6), (3, 1, 2), (2, 1, 3), (6, 5, 4)])
    ]
    assert stored[:2] == [0, 0] and 800 < stored[2] <= 900
    assert stored[3] == stored[2] and 1600 < stored[4] <= 1800
    assert not blends.cache._saves.for_others

    tokens = array("q", shuffled(2, 3, 1))
    custom = {"impress_bits": 5.0, "impress_retention": 1.0}
    req = Req("r", "", tokens, SamplingParams(custom_params=custom))
    known = blends.cache._known.note(req)
    _, plan = blends.cache._plan(RadixKey(tokens, None, limit=len(tokens) - 1), 0, known)
    assert isinstance(plan, BlendPlan) and plan.reused > 700


def test_who_stores_documents_for_others_computes_them_exactly(blends: World) -> None:
    """Although some of them are stored, and could be reused."""
    for rid, order in (("a", (1,)), ("b", (1,)), ("c", (2, 3, 4, 1))):
        ask(blends, rid, 2000, prompt=shuffled(*order))
    tokens = array("q", shuffled(3, 4, 2, 1))
    sampling = SamplingParams(custom_params={"impress_bits": 5.0, "impress_retention": 1.0})
    req = Req("d", "", tokens, sampling)
    for expected in (True, False):
        key = RadixKey(tokens, None, limit=len(tokens) - 1)
        _, plan = blends.cache._plan(key, 0, blends.cache._known.note(req))
        assert isinstance(plan, BlendPlan) == expected
        blends.cache._saves.sight(req)
    assert 800 < (blends.cache._saves.seen("d") or 0) <= 900
    blends.cache.release_aborted_request(req.cache_request_handle)
    assert not blends.cache._saves.for_others


def test_nothing_is_computed_exactly_for_what_cannot_be_stored(
    blends: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rid, order in (("a", (1,)), ("b", (1,)), ("c", (2, 3, 4, 1))):
        ask(blends, rid, 2000, prompt=shuffled(*order))
    budget = type(blends.runtime.store._quota.budget)
    monkeypatch.setattr(budget, "is_spent", property(lambda own: True))
    asked, _ = matched(blends, shuffled(3, 4, 2, 1))
    assert not blends.cache._saves.for_others
    assert isinstance(blends.cache._known["r"].plan, BlendPlan)
    blends.cache.release_aborted_request(asked.req.cache_request_handle)


def matched(
    world: World, prompt: list[int], rid: str = "r"
) -> tuple[MatchPrefixParams, MatchResult]:
    """A request that accepts blending, and what SGLang finds for it."""
    tokens = array("q", prompt)
    sampling = SamplingParams(custom_params={"impress_bits": 5.0, "impress_retention": 1.0})
    req = Req(rid, "", tokens, sampling)
    req.full_untruncated_fill_ids = tokens
    asked = MatchPrefixParams(key=RadixKey(tokens, None, limit=len(tokens) - 1), req=req)
    match = world.cache.match_prefix(asked)
    req.last_node = match.last_device_node
    return asked, match


def test_who_could_not_open_a_blend_has_the_usual_plan(
    blends: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rid in ("a", "b"):
        ask(blends, rid, 2000, prompt=shuffled(1, 2))
    asked, match = matched(blends, shuffled(1, 3, 2))
    req = asked.req
    known, loaded = (
        blends.cache._known["r"],
        InitLoadBackParams(None, match.host_hit_length, req=req),
    )
    assert isinstance(known.plan, BlendPlan)
    with monkeypatch.context() as closed:
        closed.setattr(blends.runtime._opener, "open", lambda *_: None)
        assert blends.cache.init_load_back(loaded) is None and not known.declined
    blends.cache.match_prefix(asked)
    assert known.plan is not None and not isinstance(known.plan, BlendPlan)
    assert known.plan.stop > 250 and known.blend.why == (Reason.NOT_OPENED, "")
    blends.cache.release_aborted_request(req.cache_request_handle)


def test_what_was_found_in_a_store_ends_with_it(blends: World) -> None:
    for rid in ("a", "b"):
        ask(blends, rid, 2000, prompt=shuffled(1, 2))
    asked, _ = matched(blends, shuffled(2, 1))
    known = blends.cache._known["r"]
    assert known.blend.found is not None and isinstance(known.plan, BlendPlan)
    blends.cache.weights.begin("a test")
    assert known.blend.found is None and known.plan is None
    blends.cache.release_aborted_request(asked.req.cache_request_handle)


def test_who_finds_others_blending_does_so_in_the_next_pass(blends: World) -> None:
    for rid in ("a", "b"):
        ask(blends, rid, 2000, prompt=shuffled(1, 2))

    def admitted(rid: str) -> bool:
        asked, match = matched(blends, shuffled(2, 1), rid)
        assert isinstance(blends.cache._known[rid].plan, BlendPlan)
        loaded = InitLoadBackParams(None, match.host_hit_length, req=asked.req)
        return blends.cache.init_load_back(loaded) is not None

    assert admitted("r") and not admitted("s"), "how long that takes is not known yet"
    loading = blends.runtime.live["r"].loading
    assert isinstance(loading, BlendedLoading)
    loading.blended = True
    assert admitted("s")
    for request in list(blends.runtime.live):
        blends.runtime.release(request)


def test_what_a_blend_takes_is_learnt(blends: World) -> None:
    for rid in ("a", "b"):
        ask(blends, rid, 2000, prompt=shuffled(1, 2))
    asked, match = matched(blends, shuffled(2, 1))
    req = asked.req
    assert blends.cache.init_load_back(InitLoadBackParams(None, match.host_hit_length, req=req))
    runtime, request = blends.runtime, blends.runtime.live["r"]
    assert isinstance(request.loading, BlendedLoading)
    request.loading.blended, request.computed = True, 50.0
    request.time_loading(clock_for(torch.device("cpu")).stopwatch())
    with request.stopwatch or pytest.fail():
        time.sleep(0.01)
    for _ in range(SHAPE.num_layers):
        runtime.finish_layer(request)
    assert runtime.estimator.blending.observations == 1
    assert runtime.estimator.copying.observations == 0
    blends.cache.on_release(req, checkpointed=False)
