"""A pool whose slots are being written: requests are admitted as if nothing were written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from impress_sglang.paper.saving import Save
from impress_sglang.storage.writer import WriteAbandoned
from tests.integration.worlds import SHAPE, TOKENS, World

pytestmark = pytest.mark.usefixtures("no_slot_is_lost")


def _computed(world: World, rid: str, first: int) -> tuple[Save, Any]:
    """A prompt is computed and resident, its request has ended, and its write hangs."""
    save = world.prefill(rid, first)
    req = world.cache._known[rid].req
    req.kv = SimpleNamespace(
        req_pool_idx=req.kv.req_pool_idx,
        cache_protected_len=0,
        cache_inserted_len=0,
        swa_evict_floor=0,
    )
    save.open(SHAPE.num_layers)
    world.cache.checkpoint(req, up_to=TOKENS)
    world.cache.unlock(req.lock)
    world.cache.on_release(req, checkpointed=True)
    return save, req


def test_slots_that_are_written_count_as_room(world: World) -> None:
    """SGLang admits a prompt by its budget, and evicts only for what it has admitted."""
    world.pool.go_on.clear()
    _computed(world, "first", 1000)
    _computed(world, "second", 2000)
    assert world.runtime.store.writes

    budget = world.allocator.create_prefill_budget(world.cache, num_mixed_decode_tokens=0)
    assert budget.remaining_total == TOKENS * 4
    world.check_slots()
    world.cache.evict(EvictParams(num_tokens=2 * TOKENS))
    assert world.allocator.available_size() == TOKENS * 4


def test_the_write_of_a_pass_under_way_is_not_given_up(world: World) -> None:
    """Its request has the slots, so that nobody could gain them, though it is the latest write."""
    world.pool.go_on.clear()
    first, _ = _computed(world, "first", 1000)
    running = world.prefill("running", 2000)

    assert world.cache.evict(EvictParams(num_tokens=2 * TOKENS)).num_tokens_evicted == TOKENS
    assert first.finished and not running.finished
    running.check()
    running.open(SHAPE.num_layers)
    world.pool.go_on.set()
    world.runtime.store.writes.drain()
    assert world.stored(1000) == 0 and world.stored(2000) == TOKENS
    # Its request ends.
    world.cache._saves._begun.clear()
    world.allocator.free(running.slots)


def test_a_prompt_whose_request_ends_before_it_is_computed_is_not_saved(world: World) -> None:
    save = world.prefill("gone", 3000)
    req = world.cache._known["gone"].req
    slots = world.rows.req_to_token[req.kv.req_pool_idx, :TOKENS].long()
    world.cache.on_release(req, checkpointed=False)
    world.allocator.free(slots)
    with pytest.raises(WriteAbandoned):
        save.check()
    world.runtime.store.writes.drain()
    assert world.stored(3000) == 0
