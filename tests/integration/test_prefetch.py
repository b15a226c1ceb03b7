"""What a request that waits is matched with, and what is read for it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from impress_sglang.integration import radix_cache
from tests.integration.test_weights import SHAPE, TOKENS, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A store with a prompt, of which nothing is resident."""
    world = World(tmp_path)
    world.prefill("stored", 1000).open(SHAPE.num_layers)
    world.runtime.store.writes.drain()
    del world.cache._saves._begun["stored"]
    world.flush()
    world.runtime.store.ahead.set_waste_budget(0.2)
    yield world
    world.runtime.prefetches.drop_all()
    world.cache.check_integrity()
    world.runtime.close()


def _asks_for_log_probabilities(start: int) -> Req:
    tokens = array("q", range(1000, 1000 + TOKENS + 8))
    req = Req("r", "", tokens, SamplingParams(), return_logprob=True)
    req.logprob_start_len = start
    return req


@pytest.mark.parametrize(("start", "is_read"), [(-1, True), (TOKENS, True), (0, False)])
def test_only_what_can_be_matched_is_read(world: World, start: int, is_read: bool) -> None:
    """Tokens whose log-probabilities are asked for are computed, wherever they are stored."""
    world.cache.prefetch(_asks_for_log_probabilities(start))
    assert ("r" in world.runtime.prefetches) is is_read


@pytest.mark.parametrize("refusal", [None, "a reason"])
def test_what_is_against_a_request_is_asked_once(
    world: World, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(req: Req) -> str | None:
        asked.append(req.rid)
        return refusal

    monkeypatch.setattr(radix_cache, "serve_refusal", refuse)
    tokens = array("q", range(1000, 1000 + TOKENS))
    req = Req("r", "", tokens, SamplingParams())

    match = world.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None), req=req))

    assert (match.host_hit_length > 0) == (refusal is None)
    assert req.customized_info["impress"][0]["not_served"] == refusal
    assert asked == ["r"]
    world.cache.prefetch(req)
    assert ("r" in world.runtime.prefetches) == (refusal is None)
