"""Prompts are stored once others have asked for the same, and no more of them than that."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

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
