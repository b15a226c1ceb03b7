"""Stored prefixes of which a request may use a part: what is loaded, in slots of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from impress_sglang.config import AUTO
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.paper.service import PartPlan
from impress_sglang.plugin import request_tracker
from impress_sglang.plugin.admin import handle
from impress_sglang.serving.why import Reason
from tests.integration.paper_world import PaperWorld
from tests.integration.tree_world import check_slots, new_request, report_of
from tests.integration.worlds import NEW, OTHER, STORED, TOKENS, World
from tests.unit.waiting import wait_until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[PaperWorld]:
    world = PaperWorld(tmp_path, load="always", readahead=0.2)
    yield world
    world.close()


def test_a_prefix_that_is_used_is_the_last_to_be_removed(world: PaperWorld) -> None:
    """The quota removes what was used longest ago."""
    (segment,) = world.service.store.tree.segments()
    for _ in range(2):
        before = segment.hits, segment.last_access
        request = world.begin_load(world.ask("r"))
        assert request is not None
        world.load(request)
        world.forget("r")
        assert segment.hits == before[0] + 1 and segment.last_access > before[1]


def test_a_part_of_a_prefix_has_slots_of_its_own(world: PaperWorld) -> None:
    """An offset row."""
    req = world.ask("part", retention=0.25)
    request = world.begin_load(req)
    assert request is not None and req.host_hit_length == TOKENS // 4
    assert request.k == TOKENS // 4 and request.start == TOKENS - TOKENS // 4
    assert world.cache._private()[0] == TOKENS // 4
    assert request.report["used_tokens"] == request.report["loaded_tokens"] == TOKENS // 4
    assert request.report["shared_tokens"] == 0 and request.report["bits"] == 16.0
    world.load(request)
    assert not request.loading, "given back after the last layer"
    told = request.report
    assert told["layers_by_probe"] + told["layers_by_fallback"] == world.shape.num_layers
    assert told["bits_mean"] == 16.0


def test_the_report_of_a_retracted_request_counts_its_last_load(world: PaperWorld) -> None:
    req = world.ask("r")
    for _ in range(2):
        request = world.begin_load(req)
        assert request is not None
        told = request.report
        assert not told["probe_ms"] + told["load_ms"] + told["attention_ms"]
        world.load(request)
        assert told["probe_ms"] and told["load_ms"]
        told["attention_ms"] = 1.0
        assert told["layers_by_probe"] + told["layers_by_fallback"] == world.shape.num_layers
        world.cache.on_release(req, checkpointed=False)
        world.loads(req)


@pytest.mark.parametrize(("length", "saved"), [(15, 0), (16, 1)])
def test_a_prompt_is_saved_from_the_shortest_length_on(
    world: PaperWorld, length: int, saved: int
) -> None:
    world.prefill("p", OTHER[:length])
    assert len(world.cache._saves._saves) == saved


@pytest.mark.parametrize("kind", [PaperWorld, World], ids=["in the pass", "beside it"])
def test_slots_that_are_written_count_as_room(tmp_path: Path, kind: Any) -> None:
    """SGLang admits a prompt by its budget, and evicts only for what it has admitted."""
    world = kind(tmp_path, size=4 * TOKENS)
    world.pool.go_on.clear()
    world.prefill("a", range(2000, 2064))
    used = world.prefill("b", OTHER).last_node
    assert world.cache._saves.writing_tokens
    budget = world.allocator.create_prefill_budget(world.cache, num_mixed_decode_tokens=0)
    assert budget.remaining_total == TOKENS * 4
    check_slots(world.cache, world.allocator)
    lock = world.cache.lock(used)
    assert world.cache.evictable_size() == TOKENS
    assert world.cache.evict(EvictParams(num_tokens=2 * TOKENS)).num_tokens_evicted == TOKENS
    assert not world.cache._saves.writing_tokens, "given up"
    world.cache.unlock(lock)
    world.close()


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_a_request_is_ended_if_its_prefix_cannot_be_loaded(world: PaperWorld, part: float) -> None:
    """SGLang drops what its pass computes, nothing of it is kept, and the next one is computed."""
    req = world.ask("r", retention=part)
    request = world.begin_load(req)
    assert request is not None
    world.cache.finish_storage_prefetch_admission(req.cache_request_handle, 0, None)
    (segment,) = world.service.store.tree.segments()
    request.fail(SegmentUnreadable(segment.segment_id, "test"))
    world.cache.fail("r")
    for _ in range(world.shape.num_layers):
        request.end_layer()
    world.cache.checkpoint(req, up_to=len(req.origin_input_ids))
    req.to_finish = req.discard_output_reason
    req.update_finish_state(0)
    before = world.service.totals["requests"]
    world.cache.on_release(req, checkpointed=False)
    assert world.service.totals["requests"] == before + 1, "it is counted, and learnt from"
    report = report_of(req)
    assert report is not None and report["why"]["reason"] == Reason.DAMAGED
    assert not world.cache.live and not world.cache._private()[0]
    assert not world.ask("again", retention=part).host_hit_length


def test_a_request_that_sglang_ends_without_saying_so_is_forgotten(world: PaperWorld) -> None:
    """At the next pass, or when there is none."""
    req = world.ask("r")
    request = world.begin_load(req)
    assert request is not None
    world.load(request)
    req.to_finish = object()
    for queue, live in ([req], 1), ([], 0):
        world.cache._scheduler.waiting_queue = queue
        world.cache.on_release(req, checkpointed=False)
        world.cache.on_idle()
        assert world.cache.summary()["requests_live"] == live
    assert not world.cache._private()[0]


def test_a_request_does_without_what_cannot_be_opened(world: PaperWorld) -> None:
    req = world.ask("r")
    for path in world.service.config.ssd_path.glob("*/segments/*/*"):
        path.unlink()
    assert world.begin_load(req) is None
    assert not world.loads(req)
    world.cache.finish_storage_prefetch_admission(req.cache_request_handle, 0, None)
    report = report_of(req)
    assert report is not None and report["why"]["reason"] == Reason.NOT_OPENED


@pytest.mark.parametrize("refusal", [None, "a reason"])
def test_what_is_against_a_request_is_asked_once(
    world: PaperWorld, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(req: Any) -> str | None:
        asked.append(req.rid)
        return refusal

    monkeypatch.setattr(request_tracker, "serve_refusal", refuse)
    req = new_request("r", STORED)

    assert (world.loads(req) > 0) == (refusal is None)
    report = report_of(req)
    assert report is not None and report["not_served"] == refusal
    assert asked == ["r"]


def planned(world: PaperWorld) -> PartPlan:
    """How a request would use what is stored."""
    world.ask("asks")
    plan = world.cache._plans["asks"]
    assert plan.stop == TOKENS
    del world.cache._tracked["asks"]
    return plan


@pytest.fixture
def slow_reads(world: PaperWorld, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets reading take a second per byte, and computing so many seconds."""
    runtime = world.service
    monkeypatch.setattr(runtime.store.segments, "seconds_to_read", lambda count: count)
    computing = runtime.estimator.computing

    def compute_for(seconds: float) -> None:
        monkeypatch.setattr(computing, "seconds", lambda new, pairs: seconds)
        monkeypatch.setattr(computing, "bound", lambda new, pairs: (seconds, True))

    return compute_for


@pytest.mark.parametrize(("load", "loads"), [("faster", False), ("always", True)])
def test_what_takes_longer_to_read_is_computed(
    world: PaperWorld, load: str, loads: bool, slow_reads: Callable[[float], None]
) -> None:
    runtime = world.service
    slow_reads(runtime.store.segments.bytes_to_read(planned(world).match.spans, codes=False) * 0.9)
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
    runtime = world.service
    num_bytes = runtime.store.segments.bytes_to_read(planned(world).match.spans, codes=False)
    slow_reads((1.0 if hides else 0.5) * num_bytes)
    runtime.config = dataclasses.replace(runtime.config, retention=AUTO)

    estimate = planned(world).estimate

    assert (estimate.retention == 1.0) is hides


def told(world: PaperWorld, verb: str, **fields: Any) -> Any:
    return json.loads(handle(world.cache, json.dumps({"verb": verb} | fields)))


def test_orders_reach_what_is_resident_and_what_is_counted(world: PaperWorld) -> None:
    world.prefill("own", OTHER)
    world.service.store.writes.drain()
    world.cache.flush_pending_backups()
    done = told(world, "purge", input_ids=OTHER)
    assert (done["segments"], done["pool_tokens"], done["left"]) == (1, TOKENS, False)
    for wrong, expected in ((1, "failed"), (0, "ok")):
        world.service.store.quota.pending_bytes = wrong
        state = told(world, "check", begin=True)["integrity"]
        while state == "running":
            state = told(world, "check")["integrity"]
        assert state == expected


def test_other_weights_are_served_once_nothing_is_resident(
    world: PaperWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SGLang asks for the module of the build's accelerator, which a CPU machine lacks.
    monkeypatch.setattr(torch, "get_device_module", lambda device="cpu": torch.cpu)
    served, weights = world.service, world.cache.weights
    world.prefill("own", OTHER)
    weights.begin("a test")
    assert served.aside == "a test" and not world.cache._saves.writing_tokens
    world.identity = NEW
    weights.end(settled=True)
    assert served.aside == "a test" and not world.ask("r").host_hit_length
    world.forget("r")
    world.cache.reset()
    world.allocator.clear()
    wait_until(lambda: world.cache.flush_pending_backups() or served.in_use)
    assert served.identity == NEW and not len(world.service.store.tree)
