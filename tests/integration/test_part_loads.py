"""Stored prefixes of which a request may use a part: what is loaded, in slots of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams

from impress_sglang.config import AUTO, AUTO_FLOOR
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.paper.plugin.part_cache import PartCache
from impress_sglang.paper.request import StoredRequest
from impress_sglang.paper.service import PartService
from impress_sglang.serving.why import Reason
from impress_sglang.storage.quality import EXACT
from impress_sglang.store.prefix_hashes import namespace_text
from tests.integration.tree_world import told_of
from tests.integration.worlds import NEW, OTHER, STORED, TOKENS, World, install_hooks
from tests.unit.kv_factory import as_tokens, make_shape
from tests.unit.waiting import wait_until


class PaperWorld(World):
    """The paper's tree cache, which loads in the model's pass; `STORED` is only in the store."""

    service_class, cache_class = PartService, PartCache
    shape = make_shape(layers=3)

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, **({"policy": "paper", "retention": 0.5} | options))
        self.store_prompt()

    def ask(self, rid: str = "r", **wanted: Any) -> Any:
        """A request that begins with the stored prompt is queued."""
        return self.request(rid, [*STORED, *range(5000, 5008)], **wanted)

    def begin_load(self, req: Any) -> Any:
        """A request is admitted; None if nothing is loaded for it."""
        params = InitLoadBackParams(
            best_match_node=None, host_hit_length=req.host_hit_length, req=req
        )
        return None if self.cache.init_load_back(params) is None else self.cache.live[req.rid]

    def load(self, request: StoredRequest) -> None:
        """A pass loads all layers of an admitted request."""
        for layer in range(self.shape.num_layers):
            queries = torch.randn(4, self.shape.num_query_heads, self.shape.key_dim)
            new_keys = torch.randn(4, self.shape.num_kv_heads, self.shape.key_dim)
            pools = self.pool.keys[layer], self.pool.values[layer]
            request.load(layer, queries, new_keys, 0.3, *pools)
            request.end_layer()

    def forget(self, req: Any) -> None:
        """A request is over."""
        req.finished_reason = FINISH_LENGTH(1)
        self.cache.on_release(req, checkpointed=False)

    def close(self) -> None:
        for tracked in list(self.cache._tracked.values()):
            self.forget(tracked.req)
        super().close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PaperWorld]:
    install_hooks(monkeypatch)
    world = PaperWorld(tmp_path, load="always", readahead=0.2)
    yield world
    world.close()


def test_a_part_of_a_prefix_has_slots_of_its_own(world: PaperWorld) -> None:
    """An offset row; a request that is retracted loads it again, and tells of its last load."""
    req = world.ask(retention=0.25)
    for _ in range(2):
        assert req.host_hit_length == TOKENS // 4
        request = world.begin_load(req)
        assert request.k == TOKENS // 4 and request.start == TOKENS - TOKENS // 4
        assert world.told("stats")["device_pool"]["private_tokens"] == TOKENS // 4
        told = request.report
        assert told["used_tokens"] == told["loaded_tokens"] == TOKENS // 4
        assert told["shared_tokens"] == 0 and told["bits"] == 16.0
        assert not told["probe_ms"] + told["load_ms"] + told["attention_ms"]
        world.load(request)
        assert not request.is_loading, "given back after the last layer"
        assert told["probe_ms"] and told["load_ms"] and told["bits_mean"] == 16.0
        assert told["layers_by_probe"] + told["layers_by_fallback"] == world.shape.num_layers
        told["attention_ms"] = 1.0
        world.cache.on_release(req, checkpointed=False)
        world.match(req)


@pytest.mark.parametrize(("length", "saved"), [(15, 0), (16, 1)])
def test_a_prompt_is_saved_from_the_shortest_length_on(
    world: PaperWorld, length: int, saved: int
) -> None:
    world.prefill("p", OTHER[:length])
    assert len(world.cache._saves._saves) == saved


@pytest.mark.parametrize("kind", [PaperWorld, World], ids=["in the pass", "beside it"])
def test_slots_that_are_written_count_as_room(tmp_path: Path, kind: type[World]) -> None:
    """SGLang admits a prompt by its budget, and evicts only for what it has admitted."""
    world = kind(tmp_path, size=4 * TOKENS)
    world.pool.go_on.clear()
    world.prefill("a", range(2000, 2064))
    last = world.prefill("b", OTHER).last_node
    assert world.cache._saves.writing_tokens
    budget = world.allocator.create_prefill_budget(world.cache, num_mixed_decode_tokens=0)
    assert budget.remaining_total == TOKENS * 4
    world.check_slots()
    with mock.patch.object(world.cache.tree_core, "inc_lock_ref") as count:
        assert budget.has_capacity()
    assert not count.called, "SGLang asks at each queued request, and saves may be many"
    lock = world.cache.lock(last)
    assert world.cache.evictable_size() == TOKENS
    assert world.cache.evict(EvictParams(num_tokens=2 * TOKENS)).num_tokens_evicted == TOKENS
    assert not world.cache._saves.writing_tokens, "given up"
    world.cache.unlock(lock)
    world.close()


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_a_request_is_ended_if_its_prefix_cannot_be_loaded(world: PaperWorld, part: float) -> None:
    """SGLang drops what its pass computes, nothing of it is kept, and the next one is computed."""
    req = world.ask(retention=part)
    request = world.begin_load(req)
    world.cache.finish_storage_prefetch_admission(req.cache_request_handle, 0, None)
    (segment,) = world.service.store.tree.segments()
    request.fail(SegmentUnreadable(segment.segment_id, "test"))
    world.cache.fail(req.rid)
    for _ in range(world.shape.num_layers):
        request.end_layer()
    world.cache.checkpoint(req, up_to=len(req.origin_input_ids))
    req.to_finish = req.discard_output_reason
    req.update_finish_state(0)
    before = world.service.totals["requests"]
    world.cache.on_release(req, checkpointed=False)
    assert world.service.totals["requests"] == before + 1, "it is counted, and learnt from"
    assert told_of(req)["why"]["reason"] == Reason.DAMAGED
    assert not world.cache.live and not world.cache._private()[0]
    assert not world.ask("again", retention=part).host_hit_length


@pytest.mark.parametrize("step", ["flush_pending_backups", "on_idle"])
def test_a_request_that_sglang_ends_without_saying_so_is_forgotten(
    world: PaperWorld, step: str
) -> None:
    req = world.ask()
    world.load(world.begin_load(req))
    req.to_finish = FINISH_LENGTH(1)
    for queue in ([req], []):
        world.cache._scheduler.waiting_queue = queue
        world.cache.on_release(req, checkpointed=False)
        getattr(world.cache, step)()
        assert [tracked.req for tracked in world.cache._tracked.values()] == queue


def test_a_request_does_without_what_cannot_be_opened(world: PaperWorld) -> None:
    req = world.ask()
    for path in world.service.config.ssd_path.glob("*/segments/*/*"):
        path.unlink()
    assert world.begin_load(req) is None
    world.match(req)
    assert not req.host_hit_length
    world.cache.finish_storage_prefetch_admission(req.cache_request_handle, 0, None)
    assert told_of(req)["why"]["reason"] == Reason.NOT_OPENED


@pytest.mark.parametrize(
    ("config", "computing", "decision", "loaded"),
    [
        ({"load": "faster", "retention": 1.0}, 0.9, "recompute", 0),
        ({"retention": 1.0}, 0.9, "load", TOKENS),
        ({"retention": AUTO}, 1.0, "load", TOKENS),
        ({"retention": AUTO}, 0.5, "load", AUTO_FLOOR * TOKENS),
    ],
    ids=["slower", "slower, always", "auto, hidden", "auto, not hidden"],
)
def test_how_much_is_loaded_if_reading_takes_a_second_per_byte(
    world: PaperWorld,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    computing: float,
    decision: str,
    loaded: float,
) -> None:
    """And `computing` that share of the seconds to read all; auto gives up tokens only for that."""
    service = world.service
    match = world.cache.planner.match(namespace_text(None, None), as_tokens(STORED), EXACT)
    seconds = service.store.readers.bytes_to_read(match.spans, codes=False) * computing
    monkeypatch.setattr(service.store.readers, "seconds_to_read", lambda count: count)
    monkeypatch.setattr(service.estimator.computing, "seconds", lambda new, pairs: seconds)
    monkeypatch.setattr(service.estimator.computing, "bound", lambda new, pairs: (seconds, True))
    service.config = dataclasses.replace(service.config, **config)
    req = world.ask()
    told = told_of(req)
    assert (told["decision"], req.host_hit_length) == (decision, loaded)
    assert (told["estimated_load_ms"] > told["estimated_recompute_ms"]) == (computing < 1.0)


def test_a_drive_that_was_slow_is_measured(
    world: PaperWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing would ever be loaded again."""
    service, store = world.service, world.service.store
    service.config = dataclasses.replace(service.config, load="faster")
    monkeypatch.setattr(service.estimator.computing, "bound", lambda new, pairs: (1.0, True))
    cost, names = store._reader.cost, [segment.segment_id for segment in store.tree.segments()]
    for _ in range(9):
        cost.observe(1, 1e3, 100.0)
    req = world.ask()
    assert told_of(req)["decision"] == "recompute"
    wait_until(lambda: service.poll() or cost.observations > 9)
    wait_until(lambda: service.poll() or not any(map(store.readers.is_open, names)))

    monkeypatch.setattr(store.readers, "seconds_to_read", lambda count: 2.0)
    world.match(req)
    assert not any(map(store.readers.is_open, names)), "once per request"
    assert told_of(world.ask("s"))["decision"] == "recompute"
    assert any(map(store.readers.is_open, names))
    assert not any(segment.hits for segment in store.tree.segments()), "it is no use"
    service.reopen(NEW)
    wait_until(lambda: not any(map(store.readers.is_open, names)))


def test_other_weights_are_served_once_nothing_is_resident(world: PaperWorld) -> None:
    world.prefill("resident", OTHER)
    assert world.call("update_weights_from_disk", flush_cache=False).success
    assert world.service.suspended and not world.cache._saves.writing_tokens
    req = world.ask()
    assert not req.host_hit_length
    world.forget(req)
    world.flush()
    wait_until(lambda: world.cache.flush_pending_backups() or world.service.in_use)
    assert world.service.identity == NEW and not len(world.service.store.tree)
