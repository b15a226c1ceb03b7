"""What a request that waits is matched with, and what is read for it."""

from __future__ import annotations

from typing import Any

import pytest

from impress_sglang.integration import radix_cache
from tests.integration.worlds import STORED, TOKENS, World


@pytest.fixture
def world(world: World) -> World:
    """A store with a prompt, of which nothing is resident."""
    world.store_prompt(1000)
    world.runtime.store.ahead.set_waste_budget(0.2)
    return world


@pytest.mark.parametrize(("start", "is_read"), [(-1, True), (TOKENS, True), (0, False)])
def test_only_what_can_be_matched_is_read(world: World, start: int, is_read: bool) -> None:
    """Tokens whose log-probabilities are asked for are computed, wherever they are stored."""
    req = world.request("r", [*STORED, *range(8)])
    req.return_logprob, req.logprob_start_len = True, start
    world.cache.prefetch(req)
    assert ("r" in world.runtime.prefetches) is is_read


@pytest.mark.parametrize("refusal", [None, "a reason"])
def test_what_is_against_a_request_is_asked_once(
    world: World, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(req: Any) -> str | None:
        asked.append(req.rid)
        return refusal

    monkeypatch.setattr(radix_cache, "serve_refusal", refuse)
    req = world.request("r", STORED)

    assert (world.match(req).host_hit_length > 0) == (refusal is None)
    assert req.customized_info["impress"][0]["not_served"] == refusal
    assert asked == ["r"]
    world.cache.prefetch(req)
    assert ("r" in world.runtime.prefetches) == (refusal is None)
