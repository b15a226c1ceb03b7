"""The integrity check: by command only, in steps between which requests are served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from impress_sglang.plugin import routes, served_cache
from impress_sglang.serving.job_queue import Waiter
from tests.integration.worlds import OTHER, STORED, TOKENS, World


def polled(world: World) -> str:
    """As by `GET /impress/stats`."""
    integrity: str = world.told("stats")["integrity"]
    return integrity


def told(world: World, *, begin: bool = True) -> str:
    integrity: str = world.told("check", begin=begin)["integrity"]
    return integrity


def checked(world: World) -> str:
    state = told(world)
    while state == "running":
        state = told(world, begin=False)
    return state


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One item in a step."""
    monkeypatch.setattr(served_cache, "STEP_S", 0.0)


def test_polls_tell_what_the_last_check_found(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.stored_after("a", 2000)
    assert [polled(world) for _ in range(3)] == ["unchecked"] * 3
    assert told(world, begin=False) == "unchecked", "nobody has begun one"
    assert checked(world) == "ok" == polled(world)
    for error in (AssertionError, KeyError):

        def fail(error: type[Exception] = error) -> Iterator[None]:
            yield
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(world.service.store, "check_steps", fail)
            assert checked(world) == "failed" == polled(world)
        assert "the integrity check of IMPRESS failed" in caplog.text
    assert checked(world) == "ok"


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("damage", ["requests", "store"])
def test_a_check_finds_what_is_wrong(world: World, damage: str) -> None:
    world.stored_after("a", 2000)
    segment = next(world.service.store.tree.segments())
    if damage == "requests":
        world.jobs.waiters["nobody"] = Waiter("nobody")
    else:
        segment.last_access, segment.hits = -1, 5
        world.service.store.quota.pending_bytes += 1
    assert checked(world) == "failed"
    world.jobs.waiters.clear()
    world.service.store.quota.pending_bytes = 0
    assert checked(world) == "ok"


@pytest.mark.usefixtures("slow")
def test_requests_are_served_while_a_check_goes_on(world: World) -> None:
    world.stored_after("a", 2000)
    assert told(world) == "running" == polled(world)
    world.stored_after("b", 3000, prompt=OTHER)
    assert told(world) == "running", "who comes later waits for the same"
    world.make_resident(STORED)
    assert world.cache.evictable_size() >= TOKENS
    while (state := told(world, begin=False)) == "running":
        world.stored_after("c", 4000, prompt=OTHER)
    assert state == "ok"


def test_the_route_goes_on_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, asked = iter(["running", "running", "failed"]), []

    async def send(verb: str, **fields: Any) -> dict[str, Any]:
        asked.append((verb, fields))
        return {"integrity": next(answers)}

    monkeypatch.setattr(routes, "send", send)
    assert asyncio.run(routes.check_all()) == {"integrity": "failed"}
    assert asked == [("check", {"begin": True}), ("check", {}), ("check", {})]
