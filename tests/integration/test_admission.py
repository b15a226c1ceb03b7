"""What a request is matched with, and how much of it is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from impress_sglang.options import AUTO
from impress_sglang.plugin import known
from impress_sglang.serving.load_planner import LoadPlan
from tests.integration.paper_world import PaperWorld
from tests.integration.tree_world import report_of
from tests.integration.worlds import STORED, TOKENS


@pytest.fixture
def world(tmp_path: Path) -> Iterator[PaperWorld]:
    world = PaperWorld(tmp_path, readahead=0.2)
    yield world
    world.close()


@pytest.mark.parametrize("refusal", [None, "a reason"])
def test_what_is_against_a_request_is_asked_once(
    world: PaperWorld, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(req: Any) -> str | None:
        asked.append(req.rid)
        return refusal

    monkeypatch.setattr(known, "serve_refusal", refuse)
    req = world.request("r", STORED)

    assert (world.match(req).host_hit_length > 0) == (refusal is None)
    report = report_of(req)
    assert report is not None and report["not_served"] == refusal
    assert asked == ["r"]


def planned(world: PaperWorld) -> LoadPlan:
    """How a request would use what is stored."""
    world.ask("asks")
    plan = world.cache._plans["asks"]
    assert plan.stop == TOKENS
    del world.cache._known["asks"]
    return plan


@pytest.fixture
def slow_reads(world: PaperWorld, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets reading take a second per byte, and computing so many seconds."""
    runtime = world.runtime
    runtime.config = dataclasses.replace(runtime.config, load="always")
    monkeypatch.setattr(runtime.store.forecast, "seconds_to_read", lambda count: count)
    computing = runtime.estimator.computing

    def compute_for(seconds: float) -> None:
        monkeypatch.setattr(computing, "seconds", lambda new, pairs: seconds)
        monkeypatch.setattr(computing, "bound", lambda new, pairs: (seconds, True))

    return compute_for


@pytest.mark.parametrize(("load", "loads"), [("faster", False), ("always", True)])
def test_what_takes_longer_to_read_is_computed(
    world: PaperWorld, load: str, loads: bool, slow_reads: Callable[[float], None]
) -> None:
    runtime = world.runtime
    slow_reads(runtime.store.forecast.bytes_to_read(planned(world).spans, codes=False) * 0.9)
    runtime.config = dataclasses.replace(runtime.config, load=load)
    req = world.ask("r", retention=1.0)

    assert req.host_hit_length == loads * TOKENS
    report = report_of(req)
    assert report is not None
    assert report["decision"] == ("load" if loads else "recompute")
    assert report["estimated_load_ms"] > report["estimated_recompute_ms"]


@pytest.mark.parametrize("hides", [True, False])
def test_auto_gives_up_tokens_only_if_reading_does_not_hide(
    world: PaperWorld, hides: bool, slow_reads: Callable[[float], None]
) -> None:
    runtime = world.runtime
    num_bytes = runtime.store.forecast.bytes_to_read(planned(world).spans, codes=False)
    slow_reads((1.0 if hides else 0.5) * num_bytes)
    config = dataclasses.replace(runtime.config, retention=AUTO, load="always")
    runtime.config = config

    estimate = planned(world).estimate

    assert (estimate.retention == 1.0) is hides
