"""Slots of prefixes in codes: the room that they take, and requests that fail with them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.serving.estimate import RequestLengths
from impress_sglang.serving.paper.loading import SelectiveLoading, SharedLoading
from impress_sglang.serving.paper.saving import Save
from impress_sglang.storage.quality import Quality
from tests.integration.worlds import SHAPE, TOKENS, World

pytestmark = pytest.mark.usefixtures("no_slot_is_lost")


@pytest.fixture
def options() -> dict[str, str]:
    return {"load": "always"}


@pytest.fixture
def world(world: World) -> World:
    world.store_prompt(1000)
    return world


@pytest.mark.parametrize("length", [TOKENS, 24])
def test_admission_takes_no_more_room_than_it_promised(world: World, length: int) -> None:
    """SGLang counts idle parts as room until they are used; then it must have counted them."""
    world.idle_part()
    req, before = world.ask("second", length), room(world)
    request = world.admit(req)
    assert request is not None and request.report["shared_tokens"] == length
    assert before - room(world) <= req.host_hit_length
    world.load(request)


def room(world: World) -> int:
    """What SGLang admits by."""
    return int(world.allocator.create_prefill_budget(world.cache).remaining_total)


@pytest.mark.parametrize("where", ["restore_base", "raise_units"])
def test_nobody_joins_what_ran_out_of_memory(
    world: World, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.admit(world.ask("first"))
    second = world.admit(world.ask("second"))
    assert first is not None and second is not None
    for request in (first, second):
        world.load(request, 0)
    writer = world.runtime._loaders.coded._writer

    def fails(*_: Any) -> None:
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(writer, where, fails)
        with pytest.raises(MemoryError):
            world.load(first, 1)
    # As `attention._load_layer` does.
    world.runtime.fail(first)
    world.runtime.finish_layer(first)
    # What is in the slots now is not what the levels say: another must not attend to it.
    with pytest.raises(PrefixUnreadable):
        world.load(second, 1)
    # And who comes before the two have left, as with SGLang's overlap, loads it for itself.
    third = world.loaded("third")
    assert not set(third.slots.tolist()) & set(first.slots.tolist())


@pytest.mark.parametrize("options", [{"load": "always", "readahead": 0.2}])
def test_a_taken_prefetch_leaves_none_behind(world: World) -> None:
    long, short = world.ask("long"), world.ask("short", 40)
    world.cache.prefetch(long)
    world.cache.prefetch(short)
    assert set(world.runtime.prefetches._waiting) == {"long", "short"}
    short_again = world.ask("long", 40)
    assert world.admit(short_again) is not None
    assert "long" not in world.runtime.prefetches


def test_a_prefix_that_is_used_in_codes_is_the_last_to_be_removed(world: World) -> None:
    """Also where all of it is in slots: the quota removes what was used longest ago."""
    (segment,) = world.runtime.store.tree.segments()
    for _ in range(2):
        before = segment.hits, segment.last_access
        world.end(world.loaded("r"))
        assert segment.hits == before[0] + 1 and segment.last_access > before[1]


@pytest.mark.parametrize("options", [{"load": "faster"}])
def test_what_is_complete_is_used_however_slow_loading_is(world: World) -> None:
    world.idle_part()
    (part,) = world.cache._residents
    estimator = world.runtime.estimator
    for _ in range(9):
        for new in (8, TOKENS):
            estimator.note_forward(new, new * TOKENS, new * 1e-4)
        estimator.note_load(RequestLengths(0, TOKENS, 8), 9.0, whole=True, bits=6.0)
    part.planes[0] -= 1
    assert world.ask("declined").host_hit_length == 0, "the control: loading is slow"
    part.planes[0] += 1
    assert world.ask("used").host_hit_length == TOKENS


def test_a_part_of_a_prefix_has_slots_of_its_own(world: World) -> None:
    """An offset row, filled from codes: nobody shares it, and it shares nothing that is there."""
    world.idle_part()
    req = world.ask("part", retention=0.25)
    request = world.admit(req)
    assert request is not None and req.host_hit_length == TOKENS // 4
    assert request.k == TOKENS // 4 and request.start == TOKENS - TOKENS // 4
    assert not request.uses and isinstance(request.loading, SelectiveLoading)
    assert world.cache._private_tokens == TOKENS // 4
    assert request.quality == Quality(1, 0.25, 6.0)
    assert request.report["used_tokens"] == request.report["loaded_tokens"] == TOKENS // 4
    assert request.report["shared_tokens"] == 0 and request.report["bits"] == 6.0
    world.load(request)
    assert request.loading is None, "given back after the last layer"
    assert request.stats.layers_by_probe == SHAPE.num_layers
    assert request.report["bits_mean"] == 6.0
    assert int(str(request.report["base_bytes"])) > 0
    assert world.cache._residents.idle_tokens == TOKENS, "what others share stays"


@pytest.mark.parametrize("options", [{"load": "always", "readahead": 0.2}])
def test_what_was_read_for_a_part_while_it_waited_is_its_own(world: World) -> None:
    world.cache.prefetch(world.ask("part", retention=0.5))
    (prefetch,) = world.runtime.prefetches._waiting.values()
    whole = world.admit(world.ask("whole"))
    assert whole is not None and isinstance(whole.loading, SharedLoading)
    assert prefetch.source not in {own.source for own in whole.loading._loads}
    part = world.admit(world.ask("part", retention=0.5))
    assert part is not None and isinstance(part.loading, SelectiveLoading)
    assert part.loading._source is prefetch.source
    assert part.report["prefetched"] and not world.runtime.prefetches._waiting


FORK = 40


@pytest.mark.parametrize("page_size", [16])
def test_slots_are_taken_and_given_back_in_pages(world: World, page_size: int) -> None:
    """Of a prompt that leaves another one inside a page; its page there is nobody else's."""
    world.store_prompt(1000, FORK)
    world.idle_part()
    requests = [world.admit(world.ask(rid, fork=FORK)) for rid in ("a", "b")]
    for request in requests:
        assert request is not None and request.num_tokens == TOKENS
        pages = request.slots.view(-1, page_size)
        assert torch.equal(pages, pages[:, :1] + torch.arange(page_size))
        assert not (pages[:, 0] % page_size).any()
    first, second = requests
    assert first is not None and second is not None
    same = first.slots == second.slots
    assert same.tolist() == [token // page_size != FORK // page_size for token in range(TOKENS)]
    assert first.report["loaded_tokens"] == 32 and second.report["loaded_tokens"] == 16
    for layer in range(SHAPE.num_layers):
        world.load(first, layer)
        world.load(second, layer)
    world.end(first)
    assert world.allocator.available_size() == world.allocator.size - (TOKENS + 32)
    world.end(second)
    # What was shared stays, and what was not does not.
    assert world.cache._residents.idle_tokens == TOKENS + 16
    assert world.allocator.available_size() == world.allocator.size - (TOKENS + 16)


@pytest.mark.parametrize("page_size", [16])
@pytest.mark.parametrize("bits", [6.0, "exact"])
def test_a_prefix_ends_with_a_page(world: World, bits: object) -> None:
    request = world.admit(world.ask("r", length=50, bits=bits))
    assert request is not None and request.prefix_len == request.k == 48
    assert world.allocator.available_size() == world.allocator.size - 48
    world.load(request)
    world.end(request)
    # What is in no whole page of the tree is not saved: its slots are not the tree's.
    (save,) = saves_of(world, 50)
    assert len(save.slots) == 48


@pytest.mark.parametrize("page_size", [16])
def test_a_rest_in_a_page_with_another_segment_is_computed(world: World, page_size: int) -> None:
    """All of its pages or none: a prefix does not end inside of one."""
    world.store_prompt(1000, FORK)
    world.idle_part()
    admission = world.runtime.admission
    admission._config = dataclasses.replace(admission._config, min_prefix_tokens=33)
    req = world.ask("r", fork=FORK)
    request = world.admit(req)
    assert request is not None and request.prefix_len == 32
    assert req.host_hit_length % page_size == req.prefix_len % page_size == 0
    world.load(request)


@pytest.mark.parametrize(("length", "saved"), [(15, 0), (16, 1)])
def test_a_prompt_is_saved_from_the_shortest_length_on(
    world: World, length: int, saved: int
) -> None:
    assert len(saves_of(world, length)) == saved


def saves_of(world: World, length: int) -> list[Save]:
    """Of a pass that completes a prompt nobody has stored."""
    req = world.request("p", range(3000, 3000 + length))
    (row,) = world.rows.alloc_rows(1)
    req.kv = SimpleNamespace(req_pool_idx=row)
    world.cache._known.note(req)
    return [*world.cache.passes.begin_saves(["p"], [length]).values()]
