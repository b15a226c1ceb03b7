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


def ask(world: World, rid: str, question: int, matches: int = 1, namespace: str = "") -> int:
    """How many tokens are stored of a request for a shared prompt and a question of its own."""
    tokens = array("q", [*range(1000, 1000 + TOKENS), *range(question, question + TOKENS)])
    (row,) = world.rows.alloc_rows(1)
    slots = world.allocator.alloc(len(tokens))
    assert slots is not None
    world.rows.req_to_token[row, : len(tokens)] = slots
    req = Req(rid, "", tokens, SamplingParams(), extra_key=namespace or None)
    req.full_untruncated_fill_ids = tokens
    req.kv = SimpleNamespace(req_pool_idx=row)
    for _ in range(matches):
        key = RadixKey(tokens, req.extra_key, limit=len(tokens) - 1)
        world.cache.match_prefix(MatchPrefixParams(key=key, req=req))
    for save in world.cache.passes.begin_saves([rid], [len(tokens)]).values():
        save.open(SHAPE.num_layers)
    world.runtime.store.writes.drain()
    world.cache._saves._begun.pop(rid, None)
    world.cache._forget(rid)
    world.rows.free_slots.append(row)
    world.allocator.free(slots)
    return sum(segment.info.num_tokens for segment in world.runtime.store.tree.segments())


def test_what_two_ask_for_is_stored(world: World) -> None:
    """Questions that nobody asks again are not."""
    stored = [ask(world, f"r{number}", 2000 + 100 * number) for number in range(4)]
    assert stored == [0, TOKENS, TOKENS, TOKENS]
    assert world.stored(1000) == TOKENS
    assert not world.cache._saves._worth


def test_others_do_not_count(world: World) -> None:
    """Neither a request that is matched again, nor one of another namespace."""
    assert ask(world, "r", 2000, matches=3) == ask(world, "s", 2000, namespace="other") == 0
    assert ask(world, "t", 3000) == TOKENS


@pytest.mark.parametrize("least", [1])
def test_without_counting_all_is_stored_at_once(world: World) -> None:
    assert ask(world, "r", 2000) == 2 * TOKENS
