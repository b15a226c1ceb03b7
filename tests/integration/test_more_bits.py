"""Requests for which there is no room use more bits, as long as these are resident."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tests.integration.test_tree_loads import ASKED, EXACT, PREFIX, STORED
from tests.integration.tree_world import TreeWorld

OWN = [*ASKED[:-1], 3]


@pytest.fixture
def world(tmp_path: Path, page_size: int) -> Iterator[TreeWorld]:
    world = TreeWorld(tmp_path, page_size, blend="off")
    yield world
    world.close()


@pytest.fixture
def stored(world: TreeWorld) -> None:
    world.run("stored", STORED)
    world.flush()


@contextlib.contextmanager
def running(
    world: TreeWorld, tokens: list[int], *, left: int = PREFIX, **wanted: object
) -> Iterator[None]:
    """A request that runs, and leaves no room for another prefix."""
    req = world.request("running", tokens, **wanted)
    world.begin(req)
    world.scheduler.running_batch.reqs.append(req)
    taken = world.allocator.alloc(world.allocator.available_size() - left)
    yield
    world.allocator.free(taken)
    world.scheduler.running_batch.reqs.remove(req)
    world.end(req)
    world.service.store.writes.drain()


def is_exact(world: TreeWorld, rid: str) -> bool:
    return bool(world.cache._known[rid].kv_class.exact)


def evict_all(world: TreeWorld) -> None:
    world.poll()
    world.cache.evict(EvictParams(num_tokens=10**6))


@pytest.mark.usefixtures("stored")
def test_who_would_wait_for_room_uses_them(world: TreeWorld) -> None:
    with running(world, ASKED, **EXACT):
        req = world.request("own", OWN)
        assert world.waits(req), "there may be room"
        world.poll()
        assert not world.waits(req)
        told = world.serve(req)
    assert told["path"] == "device" and told["prefix_tokens"] >= PREFIX
    assert told["decision"] == "none" and told["bits"] is None
    assert told["ssd_bytes"] == 0 and not told["approximate"]


@pytest.mark.usefixtures("stored")
def test_who_asks_for_exact_kvs_uses_no_others(world: TreeWorld) -> None:
    with running(world, ASKED):
        req = world.request("own", OWN, **EXACT)
        world.poll()
        assert world.waits(req) and is_exact(world, "own")
        world.abort(req)


def raised(world: TreeWorld) -> Any:
    """A queued request that was to use exact KVs, which are not there any more."""
    with running(world, ASKED, **EXACT):
        req = world.request("own", OWN)
        world.poll()
        assert is_exact(world, "own")
    evict_all(world)
    return req


@pytest.mark.usefixtures("stored")
def test_when_they_are_gone_it_loads_what_it_asked_for(world: TreeWorld) -> None:
    told = world.serve(raised(world))
    assert told["path"] == "ssd" and told["bits"] == world.config.bits and told["approximate"]
