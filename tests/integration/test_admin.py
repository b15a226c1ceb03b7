"""What an administrator may ask for, and what becomes of it in the scheduler's process; what is
stored at which sight."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from impress_sglang.plugin import admin, routes, tree_cache, tree_nodes
from impress_sglang.plugin.admin import handle
from impress_sglang.plugin.routes import carry_out
from impress_sglang.serving.job_queue import Waiter
from impress_sglang.serving.why import Reason
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import Priority, read_header
from tests.integration.test_routes import manager_of
from tests.integration.test_why import admitted
from tests.integration.worlds import OTHER, STORED, TOKENS, World
from tests.unit.store_factory import check_index
from tests.unit.waiting import wait_until

# Prompts are stored once others have asked for the same, and no more of them than that.
SELDOM = {"write_after": 2}


@pytest.fixture
def options() -> dict[str, Any]:
    return {"load": "always"}


def make_old(world: World) -> None:
    """All that is stored was written long ago."""
    order = world.service.store.tree.order
    for segment in world.service.store.tree.segments():
        segment.written = 1.0
    order._expiring = [(1.0, number, segment) for _, number, segment in order._expiring]


def test_a_purged_prefix_is_nowhere(world: World) -> None:
    world.run("stored", STORED)
    world.make_resident(OTHER)

    answer = world.told("purge", [*STORED, 7, 8])

    assert (answer["segments"], answer["tokens"], answer["left"]) == (1, TOKENS, 0)
    assert answer["bytes"] > 0 and answer["pool_tokens"] == TOKENS
    assert world.cache.evictable_size() == TOKENS
    assert admitted(world)["reason"] == Reason.PURGED
    assert admitted(world, OTHER)["reason"] == Reason.RESIDENT
    world.service.store.writes.drain()
    check_index(world.service.store)
    assert world.files() == 0


def test_a_purge_is_of_one_namespace(world: World) -> None:
    world.stored_after("a", 2000, namespace="tenant")
    world.stored_after("b", 2000)
    assert world.told("purge", extra_key="nobody")["segments"] == 0
    assert world.told("purge", STORED, extra_key="tenant")["segments"] == 1
    assert world.told("purge", extra_key="tenant")["segments"] == 0
    assert admitted(world, namespace="tenant")["reason"] == Reason.PURGED
    assert admitted(world)["reason"] == Reason.LOADED
    assert world.told("purge", everything=True)["segments"] == 1
    stats = world.service.store.stats
    assert (stats.segments_purged, stats.segments_evicted) == (2, 0)


@pytest.mark.parametrize("everything", [False, True])
def test_a_purge_empties_the_pool_of_a_namespace_or_of_all(world: World, everything: bool) -> None:
    tenants = ("a", "b", None)
    for namespace in tenants:
        for end in (OTHER, STORED):
            world.make_resident([*STORED[:40], *end], namespace)

    answer = world.told("purge", **({"everything": True} if everything else {"extra_key": "a"}))

    each, gone = 40 + 2 * TOKENS, tenants if everything else ("a",)
    assert (answer["pool_tokens"], answer["left"]) == (each * len(gone), 0)
    assert world.cache.evictable_size() == each * (3 - len(gone))
    for namespace in tenants:
        reason = admitted(world, [*STORED[:40], *OTHER], namespace=namespace)["reason"]
        assert reason == (Reason.NEVER_STORED if namespace in gone else Reason.RESIDENT)


def purged_by_age(world: World, **fields: Any) -> int:
    """How many segments all steps have removed."""
    answer = world.told("purge", older_than=100, **fields)
    return int(answer["segments"]) + (purged_by_age(world, **fields) if answer["left"] else 0)


def test_a_purge_by_age_is_answered_in_steps(world: World) -> None:
    world.stored_after("a", 2000)
    world.stored_after("b", 2000, prompt=OTHER)
    make_old(world)
    world.stored_after("c", 4000, prompt=OTHER)

    assert purged_by_age(world, input_ids=STORED) == 1
    assert [purged_by_age(world, everything=True) for _ in range(2)] == [1, 0]
    assert admitted(world, STORED)["reason"] == Reason.PURGED
    assert len(world.service.store.tree) > 0


@pytest.mark.parametrize("options", [{"ttl": 3600.0}])
def test_an_idle_server_removes_what_is_too_old(world: World) -> None:
    world.stored_after("a", 2000)
    make_old(world)

    def gone() -> bool:
        world.service.publish_metrics(idle=True)
        return not len(world.service.store.tree)

    wait_until(gone)
    assert admitted(world)["reason"] == Reason.EXPIRED


def test_a_request_that_waits_for_what_is_purged_is_computed(world: World) -> None:
    world.store_prompt()
    req = world.request("waits", [*STORED, 7])
    assert world.waits(req)
    assert world.told("purge", STORED)["segments"] == 1
    assert world.serve(req)["path"] == "computed"


def test_pins(world: World) -> None:
    refused = world.told("pin", STORED)
    assert refused["error"] == f"0 of its {TOKENS} tokens are stored: warm it first"
    world.store_prompt()
    done = world.told("pin", [*STORED, 5])
    assert done["tokens"] == TOKENS and done["pins"]["prefixes"] == 1
    assert world.service.summary()["pins"] == done["pins"]
    assert world.told("unpin", STORED)["unpinned"] == 1
    world.told("pin", STORED)
    assert world.told("purge", STORED)["unpinned"] == 1
    assert world.service.summary()["pins"] == {"prefixes": 0, "bytes": 0}
    assert world.told("pin", STORED[:63]) == {"error": "a prefix has 64 tokens at least"}


def test_what_another_rank_cannot_pin_is_not_pinned(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store_prompt()
    # Its store is open, but it has not stored that.
    votes = iter([True, False])
    monkeypatch.setattr(world.cache.ranks, "all", lambda mine: mine and next(votes))
    assert "another rank cannot pin it" in world.told("pin", STORED)["error"]
    assert world.service.summary()["pins"] == {"prefixes": 0, "bytes": 0}


@pytest.mark.parametrize("options", [{"load": "always", "write_after": 2}])
def test_why_is_told_of_prompts_that_nobody_sends(world: World) -> None:
    def why(prompt: list[int], **fields: Any) -> tuple[int, str, str | None]:
        answer = world.told("why", prompt, **fields)
        assert answer["tokens"] == len(prompt) and answer["why"]["text"].endswith(".")
        return answer["stored_tokens"], answer["why"]["reason"], answer["why"]["rest"]

    assert why(STORED) == (0, Reason.SEEN_TOO_SELDOM, None)
    assert why(STORED) == (0, Reason.SEEN_TOO_SELDOM, None), "to ask is no sight"
    for number in range(2):
        world.stored_after(f"r{number}", 2000 + 100 * number)
    assert why(STORED) == (TOKENS, Reason.STORED, None)
    assert why([*STORED, *OTHER]) == (TOKENS, Reason.STORED, Reason.SEEN_TOO_SELDOM)
    assert why(STORED, extra_key="tenant") == (0, Reason.SEEN_TOO_SELDOM, None)
    (segment,) = world.service.store.tree.segments()
    object.__setattr__(segment.info, "quality", segment.info.quality.after(8.0))
    assert world.told("warm", STORED)["why"]["reason"] == Reason.QUALITY, "it is to be exact"
    world.told("purge", STORED)
    assert why(STORED) == (0, Reason.PURGED, None)
    assert why(STORED[:5]) == (0, Reason.TOO_SHORT, None)
    assert why([]) == (0, Reason.TOO_SHORT, None)


def test_no_order_ends_the_scheduler(world: World) -> None:
    for text in (None, "", "no JSON", "[]", "{}", '{"verb": 1}', '{"verb": "pin", "x": 1}'):
        assert "error" in json.loads(handle(world.cache, text))
    assert "error" in world.told("unheard of", STORED)
    assert "error" in world.told("pin", [2**40] * TOKENS)
    world.service.suspended_by = "weights change"
    assert world.told("purge", STORED) == {"error": "no store is in use: weights change"}


@pytest.mark.parametrize(("wish", "ttl"), [("low", 3600), ("normal", None), ("high", None)])
def test_a_request_says_how_long_it_is_stored_and_before_what_it_goes(
    world: World, wish: str, ttl: int | None
) -> None:
    """As far as the header of the file that it stores."""
    world.stored_after("r", 2000, priority=wish, **({} if ttl is None else {"ttl": ttl}))
    (path,) = Path(world.service.config.ssd_path).glob("*/segments/*/*")
    info = read_header(path, FileSystem()).info
    assert info.priority is Priority[wish.upper()]
    assert info.expires == 0 if ttl is None else 0 < info.expires - time.time() <= ttl + 1
    rows = world.told("overview", after=0, below=None)["segments"]
    assert [row["priority"] for row in rows] == [wish]


def test_a_fault_of_ours_is_none_of_the_caller(
    world: World, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def communicate(message: Any) -> Any:
        return [SimpleNamespace(rid=handle(world.cache, message.rid))]

    manager = manager_of(
        auto_create_handle_loop=lambda: None, set_internal_state_communicator=communicate
    )
    monkeypatch.setattr(routes, "tokenizer_manager", lambda: manager)
    assert client.get("/impress/stats").json()["requests_live"] == 0
    assert client.post("/impress/pin", json={"input_ids": [1]}).status_code == 400
    monkeypatch.setitem(admin.VERBS, "pin", None)
    assert client.post("/impress/pin", json={"input_ids": [1]}).status_code == 500
    world.service.suspended_by = "a test"
    refused = client.post("/impress/reorder")
    assert refused.status_code == 400 and "no store is in use: a test" in refused.text


def test_each_purge_is_seen_through_before_the_next_one_begins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: more sweeps at once than are kept would throw each other out."""
    monkeypatch.setattr(tree_nodes, "MAX_VISITED", 1)
    for number in range(12):
        world.make_resident(range(9), f"tenant {number}")
    names = list[str]()

    async def send(verb: str, **fields: Any) -> Any:
        await asyncio.sleep(0)
        names.append(fields["name"])
        return world.told(verb, **fields)

    async def all_of_them() -> list[Any]:
        orders = [{"extra_key": f"tenant {number}"} for number in range(12)]
        return await asyncio.gather(*(carry_out("purge", order) for order in orders))

    monkeypatch.setattr(routes, "tokenizer_manager", manager_of)
    monkeypatch.setattr(routes, "send", send)
    monkeypatch.setattr(routes, "PAUSE_S", 0.0)
    answers = asyncio.run(asyncio.wait_for(all_of_them(), 60))
    assert all(answer["pool_tokens"] == 9 and answer["writes"] == 0 for answer in answers)
    assert len(set(names)) == 12 and len(names) > 24, "each has a name, and goes in steps"
    assert names == sorted(names, key=names.index)


ANSWER = [*range(5000, 5000 + TOKENS)]
CONVERSATION = [*STORED, *range(2000, 2000 + TOKENS), *ANSWER]
# Requests one after the other, each with a question of its own unless it names one, and how many
# tokens are stored after each.
SIGHTS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "what two ask for, and no question": [(0, {}), (TOKENS, {}), (TOKENS, {}), (TOKENS, {})],
    "one who wants nothing stored does not count": [
        *[(0, {"question": 2000, "store": False})] * 3,
        (0, {}),
        (TOKENS, {}),
    ],
    "at first sight, if it is asked for": [(2 * TOKENS, {"store": True})],
    "in a namespace": [(0, {"namespace": "other"}), (0, {}), (TOKENS, {})],
    # SGLang computes their prompt first, without a token behind it.
    "samples of one request are one": [
        *(
            (0, {"question": 2000, "sampling": {"n": 2, "max_new_tokens": count}})
            for count in (0, 8, 8)
        ),
        (2 * TOKENS, {"question": 2000}),
    ],
    # The last answer was seen by whom it was given to; the turn under way is not stored.
    "a conversation, one turn later": [
        (0, {"question": 2000, "answer": ANSWER}),
        (len(CONVERSATION), {"prompt": CONVERSATION}),
    ],
}


@pytest.mark.parametrize("options", [SELDOM])
@pytest.mark.parametrize("requests", SIGHTS.values(), ids=SIGHTS)
def test_what_is_stored_at_which_sight(
    world: World, requests: list[tuple[int, dict[str, Any]]]
) -> None:
    for number, (stored, how) in enumerate(requests):
        question = {"question": 3000 + 100 * number}
        assert world.stored_after(f"r{number}", **(question | how)) == stored


@pytest.mark.parametrize("options", [SELDOM])
@pytest.mark.parametrize("retracted", [False, True])
def test_a_request_that_is_matched_again_counts_once(world: World, retracted: bool) -> None:
    req = world.request("r", [*STORED, *range(2000, 2064)])
    for _ in range(2):
        if retracted:
            world.cache.on_release(req, checkpointed=False)
        world.match(req)
    world.serve(req)
    world.flush()
    assert world.stored(STORED) == 0
    assert world.stored_after("t", 3000) == TOKENS


# The integrity check: by command only, in steps between which requests are served.


def check(world: World, *, begin: bool = True) -> str:
    """A step of the check; what it has found is what polls tell."""
    state: str = world.told("check", begin=begin)["integrity"]
    assert world.told("stats")["integrity"] == state
    return state


def checked(world: World) -> str:
    state = check(world)
    while state == "running":
        state = check(world, begin=False)
    return state


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One item in a step."""
    monkeypatch.setattr(tree_cache, "STEP_S", 0.0)


def test_polls_tell_what_the_last_check_found(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.stored_after("a", 2000)
    for _ in range(3):
        assert check(world, begin=False) == "unchecked", "nobody has begun one"
    assert checked(world) == "ok"
    for error in (AssertionError, KeyError):

        def fail(error: type[Exception] = error) -> Iterator[None]:
            yield
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(world.service.store, "check_steps", fail)
            assert checked(world) == "failed"
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
    assert check(world) == "running"
    world.stored_after("b", 3000, prompt=OTHER)
    assert check(world) == "running", "who comes later waits for the same"
    world.make_resident(STORED)
    assert world.cache.evictable_size() >= TOKENS
    while (state := check(world, begin=False)) == "running":
        world.stored_after("c", 4000, prompt=OTHER)
    assert state == "ok"
