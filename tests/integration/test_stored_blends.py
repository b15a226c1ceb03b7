"""What was blended is stored when its request is over: whose slots, and who finds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH

from impress_sglang.serving.paper.blend_plan import BlendPlan
from impress_sglang.serving.paper.blended_loading import BlendedLoading
from impress_sglang.serving.paper.request import StoredRequest
from impress_sglang.storage.quality import Quality
from tests.integration.worlds import (
    SHAPE,
    World,
    blending_world,
    install_hooks,
    shuffled,
)

QUESTION = [*range(70_000, 70_020)]


pytestmark = pytest.mark.usefixtures("no_slot_is_lost")


@pytest.fixture(params=[1, 16])
def page_size(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


@pytest.fixture
def least() -> int:
    return 1


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_size: int, least: int
) -> Iterator[World]:
    """Documents 1, 2 and 3 are stored, in this order."""
    install_hooks(monkeypatch)
    world = blending_world(tmp_path, page_size, size=4096, write_after=least, load="always")
    for rid in "xy"[:least]:
        # With its question, whole pages.
        world.compute(rid, 2000, prompt=[*shuffled(1, 2, 3), *range(12)])
    yield world
    assert world.cache._saves.writing_tokens == 0
    world.close()


def wait(world: World, prompt: list[int], rid: str = "r", **wanted: object) -> Any:
    """A request is matched; by default it blends what is stored and computes a quarter again."""
    req = world.request(rid, prompt, **({"bits": 6.0, "retention": 1.0, "blend": 0.25} | wanted))
    world.match(req)
    return req


def plan_of(world: World, prompt: list[int], **custom: object) -> Any:
    """How a request would be admitted that then goes away."""
    req = wait(world, prompt, "plan", **custom)
    plan = world.cache._known["plan"].plan
    world.cache.release_aborted_request(req.cache_request_handle)
    return plan


def run(world: World, req: Any) -> StoredRequest:
    """A request is admitted and blended."""
    cache = world.cache
    assert isinstance(cache._known[req.rid].plan, BlendPlan)
    request = world.admit(req)
    assert request is not None and isinstance(request.loading, BlendedLoading)
    request.loading.blended = True
    for _ in range(SHAPE.num_layers):
        world.runtime.finish_layer(request)
    (row,) = world.rows.alloc_rows(1)
    tokens, prefix = len(req.origin_input_ids), cache.prefix_device_indices(req)
    new = world.allocator.alloc(-(-(tokens - len(prefix)) // cache.page_size) * cache.page_size)
    assert new is not None
    world.rows.req_to_token[row, :tokens] = torch.cat([prefix, new])[:tokens]
    req.kv = SimpleNamespace(req_pool_idx=row, cache_protected_len=len(prefix))
    req.lock = cache.lock(req.last_node)
    return request


def end(world: World, req: Any) -> None:
    """As SGLang ends a request: its tree, then the slots that it does not know, then the rest."""
    tokens, row = len(req.origin_input_ids), req.kv.req_pool_idx
    req.finished_reason = FINISH_LENGTH(1)
    world.cache.checkpoint(req, up_to=tokens)
    size = world.cache.page_size
    assert req.kv.cache_protected_len % size == 0
    world.allocator.free(world.rows.req_to_token[row, req.kv.cache_protected_len : tokens])
    world.cache.unlock(req.lock)
    world.cache.on_release(req, checkpointed=True)
    world.rows.free_slots.append(row)
    world.check_slots()


def blend(world: World, prompt: list[int], rid: str = "r", **custom: object) -> None:
    req = wait(world, prompt, rid, **custom)
    run(world, req)
    world.cache.check_integrity()
    end(world, req)


PROMPT = [*shuffled(3, 1, 2), *QUESTION]


def test_the_second_request_loads_what_the_first_one_blended(world: World) -> None:
    whole = len(PROMPT) // world.cache.page_size * world.cache.page_size
    blend(world, PROMPT)
    world.runtime.store.writes.drain()

    again = plan_of(world, [*PROMPT, 5])
    assert not isinstance(again, BlendPlan) and again.stop == whole
    assert again.match.quality == Quality(1, 1.0, 6.0, 0.25)
    assert again.quality == Quality(2, 1.0, 6.0, 0.25)
    assert isinstance(plan_of(world, PROMPT, blend=0.5), BlendPlan)
    assert plan_of(world, PROMPT, bits="exact") is None
    assert plan_of(world, PROMPT, bits=8.0).match.quality == Quality()
    for refused in ("off", 1.0):
        assert plan_of(world, PROMPT, blend=refused) is None
    assert plan_of(world, [*PROMPT, 5], blend="auto").match == again.match


@pytest.mark.parametrize("page_size", [1])
@pytest.mark.parametrize("indexed", [True, False])
def test_after_a_restart_it_still_is_what_it_was(world: World, indexed: bool) -> None:
    blend(world, PROMPT)
    world.runtime.close()
    if not indexed:
        for path in world.runtime.config.ssd_path.glob("*/catalog.sqlite*"):
            path.unlink()
    again = blending_world(world.runtime.config.ssd_path, size=4096, load="always")
    assert plan_of(again, PROMPT).match.quality == Quality(1, 1.0, 6.0, 0.25)
    assert isinstance(plan_of(again, PROMPT, blend=0.5), BlendPlan)
    assert plan_of(again, PROMPT, bits="exact") is None
    again.close()


def test_an_exact_copy_is_found_by_all(world: World) -> None:
    blend(world, PROMPT)
    world.runtime.store.writes.drain()
    before = len(world.runtime.store.tree)
    world.compute("exact", 9000, prompt=[*PROMPT, *range(8)])
    assert len(world.runtime.store.tree) == before + 1
    for custom in ({}, {"blend": "off"}):
        assert plan_of(world, PROMPT, **custom).match.quality == Quality()


def test_behind_a_kept_prefix_only_the_rest_is_stored(world: World) -> None:
    """And a request that is not to be stored stores nothing of it."""
    tree, prompt = world.runtime.store.tree, [*shuffled(1, 3, 2), *QUESTION]
    before = set(tree.segments())
    blend(world, prompt, store=False)
    assert set(tree.segments()) == before
    blend(world, prompt)
    (new,) = set(tree.segments()) - before
    assert new.info.prefix_len == 300 and new.info.quality.blended
    assert new.info.num_tokens == len(prompt) // world.cache.page_size * world.cache.page_size - 300


@pytest.mark.parametrize("page_size", [1])
@pytest.mark.parametrize("depth", [0, 1])
def test_no_more_approximations_than_are_allowed(world: World, depth: int) -> None:
    runtime = world.runtime
    object.__setattr__(runtime.config, "approximation_depth", depth)
    blend(world, PROMPT)
    runtime.store.writes.drain()
    assert any(own.info.approximate for own in runtime.store.tree.segments()) == bool(depth)


@pytest.mark.parametrize("resident", [0, 48])
def test_slots_are_held_until_they_are_written(world: World, resident: int) -> None:
    """Those of the request, and those of SGLang's tree, if what it has is stored nowhere."""
    prompt = [*range(60_000, 60_000 + resident), *PROMPT]
    if resident:
        world.make_resident(prompt[:resident])
    free, cache = world.allocator.available_size(), world.cache
    world.pool.go_on.clear()
    blend(world, prompt)
    whole = len(prompt) // cache.page_size * cache.page_size
    assert cache._private_tokens == 0 and cache._saves.held_tokens == whole - resident
    assert cache._saves.locked_tokens() == resident
    assert world.allocator.available_size() == free - (whole - resident)
    world.pool.go_on.set()
    world.runtime.store.writes.drain()
    assert world.allocator.available_size() == free
    assert plan_of(world, [*prompt, 5]).stop == whole


def test_a_write_is_given_up_for_room(world: World) -> None:
    world.pool.go_on.clear()
    blend(world, PROMPT)
    assert world.cache._saves.held_tokens
    world.cache._allocate(world.allocator.size)
    world.allocator.clear()
    assert not world.cache._saves.held_tokens
    world.pool.go_on.set()
    world.runtime.store.writes.drain()
    assert isinstance(plan_of(world, PROMPT), BlendPlan)


@pytest.mark.parametrize("least", [2])
def test_what_one_asks_for_is_stored_no_more_than_else(world: World) -> None:
    """Of a prompt of two requests what they have in common, which ends in the blended prefix."""
    tree = world.runtime.store.tree
    before = set(tree.segments())
    blend(world, [*shuffled(3, 1, 2), *QUESTION])
    assert set(tree.segments()) == before
    blend(world, [*shuffled(3, 1), *shuffled(2)[:200], *QUESTION])
    (new,) = set(tree.segments()) - before
    assert 700 < new.info.num_tokens <= 800


@pytest.mark.parametrize("page_size", [1])
def test_new_documents_of_a_blend_are_donors_once_they_are_asked_for_again(world: World) -> None:
    """With `--impress-write-after 1`, too, by which the first prompt is stored with a mark."""

    def exact_tokens() -> int:
        stored = world.runtime.store.tree.segments()
        return sum(own.info.num_tokens for own in stored if not own.info.approximate)

    before = exact_tokens()
    blend(world, [*shuffled(4, 3, 5, 6), *QUESTION])
    world.runtime.store.writes.drain()
    assert exact_tokens() == before and plan_of(world, shuffled(7, 5, 6)) is None
    # Who asks for the same again loads it, and is no reason to compute it.
    again = plan_of(world, [*shuffled(4, 3, 5, 6), *QUESTION])
    assert again is not None and not isinstance(again, BlendPlan)

    other = shuffled(6, 3, 5, 4)
    req = wait(world, other, "waits")
    assert world.cache._known["waits"].plan is None, "it blends nothing, to be computed exactly"
    world.cache.release_aborted_request(req.cache_request_handle)
    world.compute("other", 9000, prompt=other, bits=6.0, retention=1.0, blend=0.25)
    assert exact_tokens() >= before + len(other)
    plan = plan_of(world, shuffled(7, 5, 6))
    assert isinstance(plan, BlendPlan) and plan.reused > 500
    assert not world.cache._saves.for_others
