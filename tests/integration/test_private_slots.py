"""Slots of stored prefixes: each request has its own; SGLang's tree takes over whole ones."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.serving.why import Reason
from tests.integration.worlds import SHAPE, TOKENS, World, report_of

pytestmark = pytest.mark.usefixtures("no_slot_is_lost")


@pytest.fixture
def options() -> dict[str, str]:
    return {"load": "always"}


@pytest.fixture
def world(world: World) -> World:
    world.store_prompt(1000)
    return world


def test_a_prefix_that_is_used_is_the_last_to_be_removed(world: World) -> None:
    """The quota removes what was used longest ago."""
    (segment,) = world.runtime.store.tree.segments()
    for _ in range(2):
        before = segment.hits, segment.last_access
        world.end(world.loaded("r"))
        assert segment.hits == before[0] + 1 and segment.last_access > before[1]


def test_a_part_of_a_prefix_has_slots_of_its_own(world: World) -> None:
    """An offset row."""
    req = world.ask("part", retention=0.25)
    request = world.admit(req)
    assert request is not None and req.host_hit_length == TOKENS // 4
    assert request.k == TOKENS // 4 and request.start == TOKENS - TOKENS // 4
    assert world.cache._private_tokens == TOKENS // 4
    assert request.report["used_tokens"] == request.report["loaded_tokens"] == TOKENS // 4
    assert request.report["shared_tokens"] == 0 and request.report["bits"] == 16.0
    world.load(request)
    assert not request.loading, "given back after the last layer"
    stats = request.stats
    assert stats.layers_by_probe + stats.layers_by_fallback == SHAPE.num_layers
    assert request.report["bits_mean"] == 16.0


@pytest.mark.parametrize(("length", "saved"), [(15, 0), (16, 1)])
def test_a_prompt_is_saved_from_the_shortest_length_on(
    world: World, length: int, saved: int
) -> None:
    req = world.request("p", range(3000, 3000 + length))
    world.match(req)
    world._offer(req)
    assert len(world.cache._saves._saves) == saved
    del world.cache._known["p"]


def test_slots_that_are_written_count_as_room(world: World) -> None:
    """SGLang admits a prompt by its budget, and evicts only for what it has admitted."""
    world.pool.go_on.clear()
    used = [world.prefill(rid, first) for rid, first in (("a", 2000), ("b", 3000))][1].last_node
    assert world.cache._saves.pending
    budget = world.allocator.create_prefill_budget(world.cache, num_mixed_decode_tokens=0)
    assert budget.remaining_total == TOKENS * 4
    world.check_slots()
    lock = world.cache.lock(used)
    assert world.cache.evictable_size() == TOKENS
    assert world.cache.evict(EvictParams(num_tokens=2 * TOKENS)).num_tokens_evicted == TOKENS
    assert not world.cache._saves.pending, "given up"
    world.cache.unlock(lock)


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_a_request_is_ended_if_its_prefix_cannot_be_loaded(world: World, part: float) -> None:
    """SGLang drops what its pass computes, nothing of it is kept, and the next one is computed."""
    req = world.ask("r", retention=part)
    request = world.admit(req)
    assert request is not None
    world.cache.finish_storage_prefetch_admission(req.cache_request_handle, 0, None)
    (segment,) = world.runtime.store.tree.segments()
    world.runtime.fail(request, SegmentUnreadable(segment.segment_id, "test"))
    world.cache.fail("r")
    for _ in range(SHAPE.num_layers):
        request.end_layer()
    world.cache.checkpoint(req, up_to=len(req.origin_input_ids))
    req.to_finish = req.discard_output_reason
    req.update_finish_state(0)
    world.cache.on_release(req, checkpointed=False)
    report = report_of(req)
    assert report is not None and report["why"]["reason"] == Reason.DAMAGED
    assert not world.runtime.live and not world.cache._private_tokens
    assert not world.ask("again", retention=part).host_hit_length
    del world.cache._known["again"]
