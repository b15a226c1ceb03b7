"""Slots of stored prefixes: each request has its own; SGLang's tree takes over whole ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from impress_sglang.paper.saving import Save
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
    assert request.quality == Quality(1, 0.25)
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
    assert len(saves_of(world, length)) == saved


def saves_of(world: World, length: int) -> list[Save]:
    """Of a pass that completes a prompt nobody has stored."""
    req = world.request("p", range(3000, 3000 + length))
    (row,) = world.rows.alloc_rows(1)
    req.kv = SimpleNamespace(req_pool_idx=row)
    world.cache._known.note(req)
    return [*world.cache.passes.begin_saves(["p"], [length]).values()]
