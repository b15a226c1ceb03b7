"""Requests for which there is no room use more bits, as long as these are resident."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from impress_sglang.store.writing import StoreOutcome
from tests.integration.test_tree_loads import ASKED, EXACT, PREFIX, STORED, draw
from tests.integration.tree_world import TreeWorld, told_of

OWN = [*ASKED[:-1], 3]


@pytest.fixture(params=[1, 16], ids=["tokens", "pages"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TreeWorld]:
    world = TreeWorld(tmp_path, request.param, write_after=1, load="always", blend="off")
    yield world
    world.service.store.writes.drain()
    world.check_slots()
    assert not world.jobs.jobs and not world.jobs.waiters and not list(world.cache._known)
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
    world.settle(req)
    world.admit(req)
    world.compute(req)
    world.scheduler.running_batch.reqs.append(req)
    taken = world.allocator.alloc(world.allocator.available_size() - left)
    yield
    world.allocator.free(taken)
    world.scheduler.running_batch.reqs.remove(req)
    world.end(req)
    world.service.store.writes.drain()


def is_exact(world: TreeWorld, rid: str) -> bool:
    return bool(world.cache._known[rid].kv_class.exact)


def go_on(world: TreeWorld, req: Any) -> dict[str, Any]:
    """The rest of a queued request; returns its report."""
    world.settle(req)
    world.admit(req)
    world.compute(req)
    told = told_of(req)
    world.end(req)
    return told


def give_up(world: TreeWorld, req: Any) -> None:
    world.scheduler.waiting_queue.remove(req)
    world.cache.release_aborted_request(req.cache_request_handle)


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
        told = go_on(world, req)
    assert told["path"] == "device" and told["prefix_tokens"] >= PREFIX
    assert told["decision"] == "none" and told["bits"] is None
    assert told["ssd_bytes"] == 0 and not told["approximate"]


@pytest.mark.usefixtures("stored")
def test_they_must_not_lack_some_of_what_is_stored(world: TreeWorld) -> None:
    longer = [*STORED[:PREFIX], *draw(5, 64)]
    world.run("longer", [*longer, 1], **EXACT)
    world.flush()
    with running(world, ASKED, **EXACT):
        req = world.request("own", [*longer, 2])
        world.poll()
        assert world.waits(req) and not is_exact(world, "own")
        give_up(world, req)


@pytest.mark.usefixtures("stored")
def test_nobody_uses_them_who_has_room(world: TreeWorld) -> None:
    world.run("exact", ASKED, **EXACT)
    assert world.run("own", OWN)["approximate"]


@pytest.mark.usefixtures("stored")
def test_who_asks_for_exact_kvs_uses_no_others(world: TreeWorld) -> None:
    with running(world, ASKED):
        req = world.request("own", OWN, **EXACT)
        world.poll()
        assert world.waits(req) and is_exact(world, "own")
        give_up(world, req)


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
    told = go_on(world, raised(world))
    assert told["path"] == "ssd" and told["bits"] == world.config.bits and told["approximate"]


def test_when_they_are_gone_and_not_stored(
    world: TreeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own class has more than what is exact."""
    world.run("first", STORED[:128])
    world.flush()
    world.run("approximate", STORED)
    world.flush()
    refused = StoreOutcome.NO_SPACE
    monkeypatch.setattr(world.service.store.writes, "offer", lambda *_, **__: refused)
    world.run("exact", ASKED, **EXACT)
    told = go_on(world, raised(world))
    assert told["prefix_tokens"] == PREFIX and told["why"]["reason"] == "loaded"


@pytest.mark.usefixtures("stored")
def test_who_was_put_back_is_told_of_what_it_has_now(world: TreeWorld) -> None:
    req = world.request("own", OWN)
    world.settle(req)
    world.admit(req)
    world.compute(req)
    assert told_of(req)["approximate"]
    world.release(req)
    evict_all(world)
    with running(world, ASKED, **EXACT):
        world.match(req)
        world.scheduler.waiting_queue.append(req)
        world.cache.prefetch_from_storage(req.cache_request_handle)
        world.poll()
        assert is_exact(world, "own")
        assert not go_on(world, req)["approximate"]


@pytest.mark.usefixtures("stored")
def test_looking_for_them_keeps_nothing_in_the_pool(world: TreeWorld) -> None:
    """A part of the prefix that nobody uses is the first to be evicted all the same."""
    world.run("part", STORED[:129], **EXACT)
    other = draw(9, 160)
    world.run("other", other)
    assert world.run("other again", other)["path"] == "device"
    with running(world, draw(11, 20), left=32):
        req = world.request("own", OWN)
        world.poll()
        assert world.cache._known["own"].waiter.is_blocked
        world.cache.evict(EvictParams(num_tokens=100))
        give_up(world, req)
    assert world.run("other once more", other)["path"] == "device"
