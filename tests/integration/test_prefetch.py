"""What a request that waits is matched with, and what is read for it."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.options import AUTO
from impress_sglang.paper.admission import AdmissionPlan
from impress_sglang.paper.plugin import radix_cache
from impress_sglang.paper.plugin.passes import KnownRequest
from impress_sglang.plugin.reports import report_of
from tests.integration.worlds import SHAPE, STORED, TOKENS, World
from tests.unit.waiting import wait_until


@pytest.fixture
def options() -> dict[str, float]:
    return {"readahead": 0.2}


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
    report = report_of(req)
    assert report is not None and report["not_served"] == refusal
    assert asked == ["r"]
    world.cache.prefetch(req)
    assert ("r" in world.runtime.prefetches) == (refusal is None)


def planned(world: World, rid: str) -> AdmissionPlan:
    """How a request would use what is stored."""
    req = world.request(rid, [*STORED, *range(5000, 5008)])
    _, plan = world.cache._plan(RadixKey(array("q", STORED), None), 0, KnownRequest(req))
    assert plan is not None and plan.stop == TOKENS
    return plan


@pytest.fixture
def slow_reads(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets reading take a second per byte, and computing so many seconds."""
    runtime = world.runtime
    runtime.admission._config = dataclasses.replace(runtime.config, load="always")
    monkeypatch.setattr(runtime.store.forecast, "seconds_to_read", lambda count: count)
    computing = runtime.estimator.computing

    def compute_for(seconds: float) -> None:
        monkeypatch.setattr(computing, "seconds", lambda new, pairs: seconds)
        monkeypatch.setattr(computing, "bound", lambda new, pairs: (seconds, True))

    return compute_for


def read_layers(world: World, rid: str, layers: int) -> None:
    """Of what a request waits for these are read, and no more."""
    world.runtime.prefetches.begin(rid, planned(world, rid))
    source = world.runtime.prefetches._waiting[rid].source
    source.lead = layers
    world.runtime.store.ahead.top_up()
    wait_until(lambda: not source.is_reading)
    assert source.next_ahead == layers and source.there == layers / SHAPE.num_layers


@pytest.mark.parametrize(
    ("load", "waits", "loads"),
    [("faster", False, False), ("faster", True, True), ("always", False, True)],
)
def test_who_has_waited_for_reads_loads(
    world: World, load: str, waits: bool, loads: bool, slow_reads: Callable[[float], None]
) -> None:
    """Reading all of it would take longer than computing it, and what is left does not."""
    runtime = world.runtime
    runtime.admission._config = dataclasses.replace(runtime.config, load=load)
    req = world.request("r", [*STORED, *range(5000, 5008)], retention=1.0)
    slow_reads(1e12)
    if waits:
        world.cache.prefetch(req)
        wait_until(lambda: runtime.prefetches.unread("r") == 0)
        assert runtime.prefetches.unread("r", planned(world, "r")) == 1, "for a shorter question"
    slow_reads(runtime.store.forecast.stored_bytes(planned(world, "r").spans).expected(1.0) * 0.9)

    assert world.match(req).host_hit_length == loads * TOKENS
    assert ("r" in runtime.prefetches) == waits
    report = report_of(req)
    assert report is not None
    assert report["decision"] == ("load" if loads else "recompute")
    assert report["estimated_load_ms"] > report["estimated_recompute_ms"]


@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("layers", [0, 1])
def test_auto_gives_up_tokens_only_if_reading_does_not_hide(
    world: World, hides: bool, layers: int, slow_reads: Callable[[float], None]
) -> None:
    """What was read while the request waited need not be read any more."""
    plan = planned(world, "r")
    runtime, there = world.runtime, layers / SHAPE.num_layers
    num_bytes = runtime.store.forecast.exact_bytes(plan.spans)
    slow_reads(num_bytes)
    if layers:
        read_layers(world, "r", layers)
    slow_reads((1.0 if hides else 0.99) * num_bytes * (1 - there))
    config = dataclasses.replace(runtime.config, retention=AUTO, load="always")
    runtime.config = runtime.admission._config = config

    estimate = planned(world, "r").estimate

    assert estimate.retention == (1.0 if hides else 0.25)
    # Who orders the queue takes off by itself what was read.
    assert estimate.io == pytest.approx(num_bytes)
