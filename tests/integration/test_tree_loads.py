"""What a load leaves in SGLang's tree: an ordinary prefix of its class, for all that ask SGLang."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.observability import trace

from impress_sglang.plugin import early_admission, prefix_loads, request_tracker, tree_nodes
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.request_tracker import namespace_of
from impress_sglang.serving.load_jobs import JobState, LoadJob
from impress_sglang.storage.layout import KVShape
from tests.integration.tiny_model import draw
from tests.integration.tree_world import TreeWorld

PREFIX = 320
EXACT: dict[str, Any] = {"bits": "exact"}


STORED = [*draw(1, PREFIX), *range(8)]
ASKED = [*STORED[:PREFIX], *draw(2, 20)]


@pytest.fixture
def world(tmp_path: Path, page_size: int) -> Iterator[TreeWorld]:
    """A prompt is stored, and nothing is resident."""
    world = TreeWorld(tmp_path, page_size)
    world.run("first", STORED)
    world.flush()
    world.cache.take_events()
    yield world
    world.close()


def block_hashes(events: list[Any], kind: str) -> list[int]:
    """Of what SGLang's events of one kind tell."""
    named = [event for event in events if type(event).__name__ == kind]
    return [block_hash for event in named for block_hash in event.block_hashes]


def test_who_needs_more_joins_and_then_loads_its_rest(world: TreeWorld, page_size: int) -> None:
    long = [*STORED[:PREFIX], *draw(7, 160)]
    world.run("long", [*long, 1], store=True)
    world.flush()
    waiting = [world.request("short", ASKED), world.request("joins", [*long, 2])]
    world.poll()
    told = [world.serve(req) for req in waiting]
    assert [report["loaded_tokens"] for report in told] == [PREFIX, 160]
    assert [report["shared_tokens"] for report in told] == [0, PREFIX]
    assert [report["why"]["reason"] for report in told] == ["loaded", "loaded"]


@pytest.mark.parametrize("early", [False, True])
def test_what_is_loaded_again_is_reported_once(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch, early: bool, page_size: int
) -> None:
    """A part that another's job loaded is evicted while its own job waits for room."""
    long = [*STORED[:PREFIX], *draw(7, 160)]
    world.run("long", [*long, 1], store=True)
    world.flush()
    short, joins = world.request("short", ASKED), world.request("joins", [*long, 2])
    world.poll()
    taken = world.allocator.alloc(world.allocator.available_size())
    world.settle(short)
    (job,) = world.jobs.jobs
    assert job.state is JobState.WAITING and job.start == PREFIX
    world.jobs.make_room(lambda: 1)
    world.cache.evict(EvictParams(num_tokens=10**6))
    world.allocator.free(taken)
    world.abort(short)
    if early:
        _, job = nearly_done(world, monkeypatch, joins)
        assert not world.waits(joins)
        world.cache.loads._loader._end(job, JobState.LOADED)
    told = world.serve(joins)
    assert told["loaded_tokens"] == told["prefix_tokens"] == len(long)
    assert told["shared_tokens"] == 0 and told["tokens"]["computed"] == 1


def test_others_are_told_of_what_was_loaded_and_evicted(world: TreeWorld, page_size: int) -> None:
    """Routers follow SGLang's KV events."""
    world.run("loaded", ASKED)
    stored = block_hashes(world.cache.take_events(), "BlockStored")
    assert len(stored) >= PREFIX // page_size
    world.cache.evict(EvictParams(num_tokens=len(ASKED)))
    assert sorted(block_hashes(world.cache.take_events(), "BlockRemoved")) == sorted(stored)


def test_chunks_of_an_admitted_request_are_awaited_by_nobody(world: TreeWorld) -> None:
    """The last ones may be read during its pass, and stay in the caches by their scores."""
    req = world.request("admitted", ASKED)
    world.settle(req)
    assert not world.service.lookahead.take_changed() and world.service.lookahead.has_waiting
    world.admit(req)
    assert not world.service.lookahead.take_changed(), "the caches know"
    world.compute(req)
    world.end(req)


class Drafting(TreeWorld):
    """The last layer is a draft's: the KVs of a slot are made of the next token."""

    def shape_with(self, layers: PoolLayers) -> KVShape:
        layers.draft_offset = 1
        return super().shape_with(layers)

    def compute(self, req: Any) -> None:
        super().compute(req)
        first, tokens = req.kv.cache_protected_len, req.origin_input_ids
        slots = self.rows.req_to_token[req.kv.req_pool_idx, first : len(tokens)].long()
        following = torch.tensor([*tokens[first + 1 :], 0], dtype=torch.float32)
        for kvs in self.pool.keys[-1], self.pool.values[-1]:
            kvs[slots] = following[:, None, None].expand_as(kvs[slots])


@pytest.mark.parametrize(
    ("kind", "eagle"),
    [(TreeWorld, False), (Drafting, False), (Drafting, True)],
    ids=["no drafts", "drafts", "pairs of tokens"],
)
def test_exact_kvs_are_those_that_were_computed(
    tmp_path: Path, page_size: int, kind: type[TreeWorld], eagle: bool
) -> None:
    """Also where stored prompts part. With drafts only those slots are loaded whose next token is
    stored, too."""
    world, beyond = kind(tmp_path, page_size, eagle=eagle, bits="exact"), int(kind is Drafting)
    prompt = draw(3, PREFIX + 101)
    fork = [*prompt[:PREFIX], (prompt[PREFIX] + 1) % 50, *draw(4, 100)]
    for name, asked, common in (("first", prompt, 0), ("fork", fork, PREFIX - beyond)):
        told, computed = world.run_for_kvs(name, asked)
        assert told["loaded_tokens"] == common // page_size * page_size
        for again in range(2):
            world.flush()
            told, loaded = world.run_for_kvs(f"{name} {again}", asked)
            whole = (len(asked) - 1 - beyond) // page_size * page_size
            assert (told["path"], told["loaded_tokens"]) == ("ssd", whole)
            world.assert_same_kvs(loaded, computed, whole)
            world.check_slots()
        assert world.run(f"{name} at once", asked)["path"] == "device"
        world.flush()
    world.close()


@pytest.mark.parametrize("eagle", [False, True])
def test_a_purge_reaches_the_tree(tmp_path: Path, page_size: int, eagle: bool) -> None:
    """Also one of pairs, whose last page reaches beyond what is purged."""
    world = TreeWorld(tmp_path, page_size, eagle=eagle, bits="exact")
    prompt = draw(3, 10 * 16)
    world.run("computed", prompt)
    before = world.cache.evictable_size()
    key = RadixKey(array("q", prompt[: 8 * 16]))
    freed, left = world.cache.sweeps.step("purge", namespace_of(key), key)
    assert not left and freed == before > 0
    assert world.run("again", prompt[: 8 * 16 + 4])["path"] != "device"
    world.close()


def test_a_purge_goes_through_classes_in_the_order_of_the_tree(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks free the same in each step; in the order of a set of texts they would not."""
    monkeypatch.setattr(tree_nodes, "MAX_FREED", 1)
    key = RadixKey(array("q", ASKED[:PREFIX]))
    for number, order in enumerate([({}, EXACT), (EXACT, {})]):
        for wanted in order:
            world.run(f"{number} {wanted}", ASKED, **wanted)
        # Which lock what is swept.
        world.service.store.writes.drain()
        world.poll()
        root = world.cache.root_node
        first, _ = (node.key.extra_key for node in root.children.values())
        while len(root.children) > 1:
            world.cache.sweeps.step(f"purge {number}", namespace_of(key), key)
        assert [node.key.extra_key for node in root.children.values()] == [first]
        world.flush()


def test_a_class_has_a_tree_of_its_own(world: TreeWorld) -> None:
    coded = world.run("coded", ASKED)
    assert coded["path"] == "ssd" and coded["bits_mean"] == world.config.bits
    for rid, wanted in (("again", {}), ("fewer", {"bits": 5})):
        told = world.run(rid, ASKED, **wanted)
        assert told["path"] == "device" and told["approximate"]
        assert told["loaded_tokens"] == told["ssd_bytes"] == 0
    told = world.run("exact", ASKED, **EXACT)
    assert told["path"] == "ssd" and told["loaded_tokens"] == PREFIX and not told["approximate"]
    assert told["bits_mean"] == 16.0 and told["ssd_bytes"] > 2 * coded["ssd_bytes"] > 0
    assert world.run("exact again", ASKED, **EXACT)["path"] == "device"
    told = world.run("coded again", ASKED)
    assert told["approximate"] and told["bits"] == world.config.bits


@pytest.mark.parametrize("session", [None, SimpleNamespace(streaming=False, session_id="s")])
def test_what_is_computed_in_slots_that_were_loaded_is_stored(
    world: TreeWorld, session: Any
) -> None:
    """They are marked anew, also for a turn of a session."""
    world.cache._provenance.mark(torch.arange(world.allocator.size), 1)
    prompt = [*STORED[:PREFIX], *draw(3, 256)]
    req = world.request("turn", [*prompt, 1])
    req.session = session
    assert world.serve(req)["loaded_tokens"] == PREFIX
    world.service.store.writes.drain()
    world.flush()
    assert world.run("next", [*prompt, 2])["loaded_tokens"] == len(prompt)


def test_who_may_not_use_the_store_shares_nothing_that_was_loaded(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.run("coded", ASKED)["approximate"]
    monkeypatch.setattr(request_tracker, "serve_refusal", lambda req: "a reason")
    assert world.run("refused", ASKED)["path"] == "computed"


@pytest.mark.parametrize(
    ("queued", "step"),
    [(False, "check_hicache_events"), (False, "on_idle"), (True, "check_hicache_events")],
    ids=["ended", "ended, idle", "put back"],
)
def test_what_is_released_unfinished_is_over_unless_it_is_queued(
    world: TreeWorld, queued: bool, step: str
) -> None:
    """SGLang cannot put a beam group back into its queue, and ends it without a word."""
    # Nothing is loaded for it: an idle server waits for jobs first.
    req = world.request("own", draw(5, 40))
    world.begin(req)
    before = world.service.totals["requests"]
    req.to_finish = FINISH_LENGTH(1)
    world.release(req)
    if queued:
        world.scheduler.waiting_queue.append(req)
    getattr(world.cache, step)()
    assert (world.cache._tracked.get("own") is not None) == queued
    assert world.service.totals["requests"] == before + (not queued)
    if queued:
        world.abort(req)


def test_queries_of_a_request_that_is_retracted_and_aborted_are_sampled_no_more(
    world: TreeWorld,
) -> None:
    req = world.request("own", draw(5, 40))
    world.begin(req)
    assert world.cache._saves._sampler._to_sample == {"own"}
    world.release(req)
    world.scheduler.waiting_queue.append(req)
    world.abort(req)
    assert not world.cache._saves._sampler._to_sample, "all layers have hooks for as long"


def nearly_done(world: TreeWorld, monkeypatch: pytest.MonkeyPatch, req: Any = None) -> Any:
    """A request whose job lacks one layer, with a pass that takes longer than that."""
    loads, began = world.cache.loads, list[LoadJob]()
    monkeypatch.setattr(loads._early_admission, "_possible", True)
    monkeypatch.setattr(loads._loader, "begin", began.append)
    monkeypatch.setattr(loads._service.estimator, "pass_seconds", lambda before, new: 1.0)
    req = req or world.request("own", ASKED)
    world.poll()
    (job,) = began
    job.started_at, job.layers_loaded = time.monotonic() - 0.3, 3
    return req, job


def test_a_pass_begins_early_only_beside_nobody(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        req, job = nearly_done(world, patched)
        world.scheduler.running_batch.reqs.append(object())
        assert world.waits(req) and not job.inserted_early
        world.scheduler.running_batch.reqs.clear()
        world.scheduler.disaggregation_mode = DisaggregationMode.PREFILL
        assert world.waits(req), "it would send slots that are not filled"
        world.scheduler.disaggregation_mode = DisaggregationMode.NULL
        world.scheduler.require_mlp_sync = True
        assert world.waits(req), "ranks of other batches would wait as well"
        world.scheduler.require_mlp_sync = False
        other = world.request("other", draw(5, 40))
        assert world.waits(req) and not world.waits(other), "both would be in one pass"
        world.abort(other)
        sharing = world.request("sharing", ASKED)
        assert world.waits(sharing)
        job.layers_loaded = 1
        job.started_at = time.monotonic() - 1.0
        assert world.waits(req), "what is left takes 3 s"
        job.layers_loaded = 3
        assert not world.waits(req) and job.inserted_early and world.waits(sharing)
        world.abort(sharing)
        # SGLang does not admit it before the job ends.
        world.cache.loads._loader._end(job, JobState.LOADED)
        told = world.serve(req)
        assert (told["loaded_tokens"], told["shared_tokens"]) == (PREFIX, 0)


def test_nothing_is_loaded_any_more_when_the_store_is_set_aside(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang may flush at once, also if a pass used an early job that failed, and is in vain."""

    def queue(req: Any, is_retracted: bool) -> None:
        world.match(req)
        world.scheduler.waiting_queue.append(req)
        with monkeypatch.context() as patched:
            # As if more of its prompt had been stored meanwhile than is resident.
            nothing = SimpleNamespace(device_prefix_len=0)
            patched.setattr(prefix_loads, "match_resident", lambda cache, key: nothing)
            world.cache.prefetch_from_storage(req.cache_request_handle)
        assert is_retracted and world.jobs.waiters, "it is planned again, with the old store"

    def release(req: Any, cache: Any, checkpoint: bool) -> None:
        world.release(req)
        req.kv = ReqKvInfo()

    world.scheduler._add_request_to_queue = queue
    monkeypatch.setattr(early_admission, "release_kv_cache", release)
    with monkeypatch.context() as patched:
        req, job = nearly_done(world, patched)
        assert not world.waits(req) and job.inserted_early
        world.admit(req)
        world.cache.loads._loader._end(job, JobState.DROPPED)
        assert world.cache.has_pending_cache_operations()
        world.cache._set_aside()
        assert not world.cache.has_pending_cache_operations() and not world.jobs.jobs
        assert world.scheduler.waiting_queue == [req]
        world.abort(req)


@pytest.mark.parametrize("where", ["disagg_prefill_inflight_queue", "running_mbs", "mbs"])
def test_what_is_sent_or_in_another_batch_gives_its_slots_back(tmp_path: Path, where: str) -> None:
    """A prefill server, or a pass of a pipeline, runs nothing, and has no room before its end."""
    world = TreeWorld(tmp_path, size=512)
    world.run("first", STORED)
    world.flush()
    sent = world.request("sent", draw(6, 300))
    world.admit(sent)
    world.compute(sent)
    held = [sent] if where.startswith("disagg") else [None, SimpleNamespace(reqs=[sent])]
    setattr(world.scheduler, where, held)
    req = world.request("next", ASKED)
    for _ in range(3):
        world.poll()
        assert world.waits(req), "it would be computed, as soon as there is room"
    setattr(world.scheduler, where, [])
    world.end(sent)
    assert world.serve(req)["loaded_tokens"] == PREFIX
    world.close()


OWN = [*ASKED[:-1], 3]


@contextlib.contextmanager
def running(world: TreeWorld, **wanted: object) -> Iterator[None]:
    """A request that runs, and leaves no room for another prefix."""
    req = world.request("running", ASKED, **wanted)
    world.begin(req)
    world.scheduler.running_batch.reqs.append(req)
    taken = world.allocator.alloc(world.allocator.available_size() - PREFIX)
    yield
    world.allocator.free(taken)
    world.scheduler.running_batch.reqs.remove(req)
    world.end(req)
    world.service.store.writes.drain()


def is_exact(world: TreeWorld, rid: str) -> bool:
    return bool(world.cache._tracked[rid].kv_class.exact)


def test_who_would_wait_for_room_uses_them(world: TreeWorld) -> None:
    with running(world, **EXACT):
        req = world.request("own", OWN)
        assert world.waits(req), "there may be room"
        world.poll()
        assert not world.waits(req)
        told = world.serve(req)
    assert told["path"] == "device" and told["prefix_tokens"] >= PREFIX
    assert told["decision"] == "none" and told["bits"] is None
    assert told["ssd_bytes"] == 0 and not told["approximate"]


def test_who_asks_for_exact_kvs_uses_no_others(world: TreeWorld) -> None:
    with running(world):
        req = world.request("own", OWN, **EXACT)
        world.poll()
        assert world.waits(req) and is_exact(world, "own")
        world.abort(req)


def test_when_they_are_gone_it_loads_what_it_asked_for(world: TreeWorld) -> None:
    with running(world, **EXACT):
        req = world.request("own", OWN)
        world.poll()
        assert is_exact(world, "own")
    world.poll()
    world.cache.evict(EvictParams(num_tokens=10**6))
    told = world.serve(req)
    assert told["path"] == "ssd" and told["bits"] == world.config.bits and told["approximate"]


def test_the_span_of_waiting_says_what_was_loaded_meanwhile(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry's SDK is not needed here."""
    spans = dict[str, mock.MagicMock]()
    tracer = SimpleNamespace(start_span=lambda name, **_: spans.setdefault(name, mock.MagicMock()))
    monkeypatch.setattr(trace, "opentelemetry_initialized", True)
    monkeypatch.setattr(trace, "tracer", tracer)
    monkeypatch.setattr(trace, "threads_info", {})
    context = trace.TraceReqContext("own", module_name="request")
    context.rebuild_thread_context()

    req = world.request("own", ASKED)
    req.time_stats.trace_ctx = context
    req.time_stats.set_wait_queue_entry_time()
    world.settle(req)
    world.admit(req)
    req.time_stats.set_forward_entry_time()

    told_by = {
        name: span.add_event.call_args for name, span in spans.items() if span.add_event.called
    }
    assert [*told_by] == ["prefill_waiting"]
    assert told_by["prefill_waiting"].kwargs["name"] == "impress.load"
    told = told_by["prefill_waiting"].kwargs["attributes"]
    assert told["tokens"] == PREFIX and told["ssd_bytes"] > 0
    assert min(told[name] for name in ("queued_ms", "read_ms", "restored_ms")) >= 0
    context.abort()
    world.compute(req)
    world.end(req)
