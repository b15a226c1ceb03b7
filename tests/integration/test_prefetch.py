"""What a request that waits is matched with, and what is read for it."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.integration import radix_cache
from impress_sglang.integration.passes import KnownRequest
from impress_sglang.options import AUTO
from impress_sglang.serving.admission import AdmissionPlan
from impress_sglang.serving.estimate import BITS
from tests.integration.worlds import SHAPE, STORED, TOKENS, World
from tests.unit.waiting import wait_until


@pytest.fixture
def options() -> dict[str, float]:
    return {"readahead": 0.2, "retention": 1.0}


@pytest.fixture
def world(world: World) -> World:
    """A store with a prompt, of which nothing is resident."""
    world.store_prompt(1000)
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


def planned(world: World, rid: str) -> AdmissionPlan:
    """How a request that asks for nothing would use what is stored."""
    req = world.request(rid, [*STORED, *range(5000, 5008)])
    _, plan = world.cache._plan(RadixKey(array("q", STORED), None), 0, KnownRequest(req))
    assert plan is not None and plan.stop == TOKENS
    return plan


@pytest.mark.parametrize(("layers", "bits"), [(0, 6.0), (1, 7.0), (2, 7.0)])
def test_auto_gives_bits_for_what_was_read_meanwhile(
    world: World, layers: int, bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base of some layers; it counts for whoever waits for the same, too."""
    runtime, forecast = world.runtime, world.runtime.store.forecast
    runtime.admission._config = dataclasses.replace(runtime.config, bits=AUTO)
    stored = forecast.coded_bytes(planned(world, "r").spans)
    # Computing takes as long as reading in 6.8 bits.
    seconds = stored.expected(6.8)
    monkeypatch.setattr(forecast, "seconds_to_read", lambda count: count)
    monkeypatch.setattr(runtime.estimator, "_compute_seconds", lambda before, new: seconds)
    monkeypatch.setattr(runtime.estimator.loading, "seconds", lambda *_: 0.0)
    runtime.estimator.note_forward(100, 5000, 0.1)
    if layers:
        runtime.prefetches.begin("r", planned(world, "r"))
        source = runtime.prefetches._waiting["r"].source
        source.lead = layers
        runtime.store.ahead.top_up()
        wait_until(lambda: not source.is_reading)
        assert source.next_ahead == layers and source.there == layers / SHAPE.num_layers

    for rid in ("r", "another"):
        estimate = planned(world, rid).estimate
        assert estimate.bits == bits
        # Who orders the queue takes off by itself what was read.
        assert estimate.io == pytest.approx(stored.expected(bits))
    hidden = [own for own in BITS if stored.expected(own, layers / 3) <= seconds]
    assert max(hidden, default=5.0) == bits
