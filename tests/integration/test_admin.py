"""What an administrator may ask for, and what becomes of it in the scheduler's process."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server

from impress_sglang.plugin import admin, routes, sweeps
from impress_sglang.plugin.admin import handle
from impress_sglang.plugin.routes import NotDone, carry_out, fields_of
from impress_sglang.serving.why import Reason
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import Priority, read_header
from tests.integration.test_why import admitted
from tests.integration.worlds import OTHER, STORED, TOKENS, World
from tests.unit.store_factory import check_index
from tests.unit.waiting import wait_until

VOCAB = 1000


@pytest.fixture
def options() -> dict[str, Any]:
    return {"load": "always"}


@pytest.fixture
def world(world: World) -> Iterator[World]:
    """No slot is lost; most orders are read without one."""
    yield world
    world.settle()
    world.check_slots()


def told(world: World, verb: str, input_ids: list[int] | None = None, **fields: Any) -> Any:
    """The answer to a request."""
    return world.told(verb, input_ids=input_ids, **fields)


def make_old(world: World) -> None:
    """All that is stored was written long ago."""
    order = world.runtime.store.tree.order
    for segment in world.runtime.store.tree.segments():
        segment.written = 1.0
    order._due = [(1.0, number, segment) for _, number, segment in order._due]


def test_a_purged_prefix_is_nowhere(world: World) -> None:
    """On SSD, in caches, and in SGLang's pool."""
    world.store_prompt(1000)
    world.end(world.loaded("first"))
    world.make_resident(STORED)
    world.make_resident(OTHER)

    answer = told(world, "purge", [*STORED, 7, 8])

    assert (answer["segments"], answer["tokens"], answer["left"]) == (1, TOKENS, 0)
    assert answer["bytes"] > 0 and answer["pool_tokens"] == TOKENS
    assert world.cache.evictable_size() == TOKENS
    assert admitted(world)["reason"] == Reason.PURGED
    assert admitted(world, OTHER)["reason"] == Reason.RESIDENT
    world.runtime.store.writes.drain()
    check_index(world.runtime.store)
    assert world.files() == 0


def test_a_purge_is_of_one_namespace(world: World) -> None:
    world.compute("a", 2000, namespace="tenant")
    world.compute("b", 2000)
    assert told(world, "purge", extra_key="nobody")["segments"] == 0
    assert told(world, "purge", STORED, extra_key="tenant")["segments"] == 1
    assert told(world, "purge", extra_key="tenant")["segments"] == 0
    assert admitted(world, namespace="tenant")["reason"] == Reason.PURGED
    assert admitted(world)["reason"] == Reason.LOADED
    assert told(world, "purge", everything=True)["segments"] == 1
    stats = world.runtime.store.stats
    assert (stats.segments_purged, stats.segments_evicted) == (2, 0)


def resident(world: World) -> dict[str | None, int]:
    """Tokens in SGLang's tree, by namespace."""
    found: dict[str | None, int] = {}
    nodes = list(world.cache.root_node.children.values())
    for node in nodes:
        found[node.key.extra_key] = found.get(node.key.extra_key, 0) + len(node.key)
        nodes.extend(node.children.values())
    return found


def fill_pool(world: World, namespace: str | None, first: int, *lengths: int) -> None:
    """Prompts that all begin alike, behind 8 tokens, are in SGLang's tree."""
    for number, length in enumerate(lengths):
        tokens = [*range(first, first + 8), *[first + 100 + number] * length]
        world.make_resident(tokens, namespace)


@pytest.mark.parametrize("everything", [False, True])
def test_a_purge_empties_the_pool_of_a_namespace_or_of_all(world: World, everything: bool) -> None:
    for namespace in ("a", "b", None):
        fill_pool(world, namespace, 1000, 8, 16)
    assert resident(world) == {"a": 32, "b": 32, None: 32}

    answer = told(world, "purge", **({"everything": True} if everything else {"extra_key": "a"}))

    assert (answer["pool_tokens"], answer["left"]) == (96 if everything else 32, 0)
    assert resident(world) == ({} if everything else {"b": 32, None: 32})
    world.check_slots()


def purged_by_age(world: World, **fields: Any) -> list[Any]:
    """The answers of all steps that removed something, and of the last one."""
    answers = [told(world, "purge", older_than=100, **fields)]
    while answers[-1].get("left"):
        answers.append(told(world, "purge", older_than=100, **fields))
    return [answer for answer in answers if answer.get("segments") != 0 or not answer["left"]]


def test_a_purge_by_age_is_answered_in_steps(world: World) -> None:
    world.compute("a", 2000)
    world.compute("b", 2000, prompt=OTHER)
    make_old(world)
    world.compute("c", 4000, prompt=OTHER)

    assert purged_by_age(world, input_ids=STORED)[0]["segments"] == 1
    assert purged_by_age(world, everything=True)[0]["segments"] == 1
    assert purged_by_age(world, everything=True)[0]["segments"] == 0
    assert admitted(world, STORED)["reason"] == Reason.PURGED
    assert len(world.runtime.store.tree) > 0


@pytest.mark.parametrize("options", [{"ttl": 3600.0}])
def test_an_idle_server_removes_what_is_too_old(world: World) -> None:
    world.compute("a", 2000)
    make_old(world)

    def gone() -> bool:
        world.runtime.tell_metrics(idle=True)
        return not len(world.runtime.store.tree)

    wait_until(gone)
    assert admitted(world)["reason"] == Reason.EXPIRED


def test_a_request_that_waits_for_what_is_purged_is_computed(world: World) -> None:
    world.store_prompt(1000)
    req = world.ask("waits")
    assert told(world, "purge", STORED)["segments"] == 1
    assert world.admit(req) is None


def test_pins(world: World) -> None:
    refused = told(world, "pin", STORED)
    assert refused["error"] == f"0 of its {TOKENS} tokens are stored: warm it first"
    world.store_prompt(1000)
    done = told(world, "pin", [*STORED, 5])
    assert done["tokens"] == TOKENS and done["pins"]["prefixes"] == 1
    assert world.runtime.summary()["pins"] == done["pins"]
    assert told(world, "unpin", STORED)["unpinned"] == 1
    assert told(world, "pin", STORED[:63]) == {"error": "a prefix has 64 tokens at least"}


@pytest.mark.parametrize("options", [{"load": "always", "write_after": 2}])
def test_why_is_told_of_prompts_that_nobody_sends(world: World) -> None:
    def why(prompt: list[int], **fields: Any) -> tuple[int, str, str | None]:
        answer = told(world, "why", prompt, **fields)
        assert answer["tokens"] == len(prompt) and answer["why"]["text"].endswith(".")
        return answer["stored_tokens"], answer["why"]["reason"], answer["why"]["rest"]

    assert why(STORED) == (0, Reason.SEEN_TOO_SELDOM, None)
    assert why(STORED) == (0, Reason.SEEN_TOO_SELDOM, None), "to ask is no sight"
    for number in range(2):
        world.compute(f"r{number}", 2000 + 100 * number)
    assert why(STORED) == (TOKENS, Reason.STORED, None)
    assert why([*STORED, *OTHER]) == (TOKENS, Reason.STORED, Reason.SEEN_TOO_SELDOM)
    assert why(STORED, extra_key="tenant") == (0, Reason.SEEN_TOO_SELDOM, None)
    (segment,) = world.runtime.store.tree.segments()
    object.__setattr__(segment.info, "quality", segment.info.quality.after(8.0))
    assert told(world, "warm", STORED)["why"]["reason"] == Reason.QUALITY, "it is to be exact"
    told(world, "purge", STORED)
    assert why(STORED) == (0, Reason.PURGED, None)
    assert why(STORED[:5]) == (0, Reason.TOO_SHORT, None)
    assert why([]) == (0, Reason.TOO_SHORT, None)


def test_no_order_ends_the_scheduler(world: World) -> None:
    for text in (None, "", "no JSON", "[]", "{}", '{"verb": 1}', '{"verb": "pin", "x": 1}'):
        assert "error" in json.loads(handle(world.impress, text))
    assert "error" in told(world, "unheard of", STORED)
    assert "error" in told(world, "pin", [2**40] * TOKENS)
    world.runtime.served.aside = "weights change"
    assert told(world, "purge", STORED) == {"error": "no store is in use: weights change"}


@pytest.mark.parametrize("options", [{"write_after": 2}])
def test_what_a_request_says_of_being_stored(world: World) -> None:
    """Nothing of it is, and it counts as no sight; or all of it is, at first sight."""
    for number in range(3):
        assert world.compute(f"n{number}", 2000, store=False) == 0
    assert world.compute("first", 3000) == 0
    assert world.compute("again", 4000) == TOKENS
    assert world.compute("once", 5000, prompt=OTHER, store=True) == 3 * TOKENS


def test_a_request_says_how_long_it_is_stored(world: World) -> None:
    for number, ttl in enumerate((3600, 0)):
        wanted = {"ttl": ttl} if ttl else {}
        world.compute(f"r{number}", 2000, prompt=(STORED, OTHER)[number], **wanted)
    ends = sorted(own.info.expires for own in world.runtime.store.tree.segments())
    assert ends[0] == 0 and 0 < ends[1] - time.time() <= 3601


@pytest.mark.parametrize("wish", ["low", "normal", "high"])
def test_a_request_says_before_what_it_goes(world: World, wish: str) -> None:
    """As far as the header of the file that it stores."""
    world.compute("r", 2000, priority=wish)
    (path,) = Path(world.runtime.config.ssd_path).glob("*/segments/*/*")
    assert read_header(path, FileSystem()).info.priority is Priority[wish.upper()]
    rows = world.told("overview", after=0, below=None)["segments"]
    assert [own["priority"] for own in rows] == [wish]


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]


def manager_of(**fields: Any) -> SimpleNamespace:
    """Stands in for SGLang's tokenizer manager."""
    model_config = SimpleNamespace(vocab_size=VOCAB)
    return SimpleNamespace(context_len=5, model_config=model_config, **fields)


def test_bodies_are_read() -> None:
    own = fields_of("pin", {"text": "abc", "extra_key": "t", "cache_salt": ""}, Tokenizer(), VOCAB)
    assert own == {"input_ids": [97, 98, 99], "extra_key": "t"}
    assert fields_of("purge", {"all": True}, None, VOCAB) == {"everything": True}
    assert fields_of("purge", {"extra_key": None}, None, VOCAB) == {}
    old = fields_of("purge", {"all": True, "older_than": 5}, None, VOCAB)
    assert old == {"everything": True, "older_than": 5}
    assert fields_of("warm", {"input_ids": [1]}, None, VOCAB) == {"input_ids": [1]}


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("purge", None),
        ("purge", {}),
        ("purge", []),
        ("purge", {"all": False}),
        ("purge", {"all": 1}),
        ("purge", {"all": True, "extra_key": "t"}),
        ("purge", {"input_ids": []}),
        ("purge", {"input_ids": [-1]}),
        ("purge", {"input_ids": [VOCAB]}),
        ("purge", {"input_ids": [True]}),
        ("purge", {"input_ids": "1"}),
        ("purge", {"text": 1}),
        ("purge", {"text": "a", "input_ids": [1]}),
        ("purge", {"text": ""}),
        ("purge", {"prefix": [1]}),
        ("purge", {"extra_key": 1}),
        ("purge", {"older_than": 5}),
        ("purge", {"older_than": -1, "all": True}),
        ("purge", {"older_than": None, "all": True}),
        ("purge", {"older_than": True, "all": True}),
        ("purge", {"older_than": float("inf"), "all": True}),
        ("pin", {"older_than": 5, "input_ids": [1]}),
        ("pin", {"extra_key": "t"}),
        ("unpin", {"all": True}),
        ("warm", {"cache_salt": "t"}),
    ],
)
def test_wrong_orders_are_refused(verb: str, body: object) -> None:
    with pytest.raises(ValueError, match=r"[a-z]"):
        fields_of(verb, body, Tokenizer(), VOCAB)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """Of the routes alone."""
    app = FastAPI()
    monkeypatch.setattr(http_server, "app", app)
    routes.add_routes()
    app.dependency_overrides[routes.refuse_foreign] = lambda: None
    return TestClient(app)


def test_what_is_no_prompt_never_reaches_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "tokenizer_manager", manager_of)
    monkeypatch.setattr(routes, "send", None)
    with pytest.raises(ValueError, match="at most 5 tokens"):
        asyncio.run(carry_out("why", {"input_ids": [1] * 6}))


@dataclasses.dataclass
class Warming:
    """Requests that are made of orders to warm, how each ends, and what becomes of its prefix."""

    asked: list[Any] = dataclasses.field(default_factory=list)
    ends: list[Any] = dataclasses.field(default_factory=list)
    whys: list[Any] = dataclasses.field(default_factory=list)

    async def generate_request(self, request: Any, _: None) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(request)
        end = self.ends.pop(0) if self.ends else {"type": "length"}
        if isinstance(end, Exception):
            raise end
        yield {"meta_info": {"finish_reason": end, "impress": {"path": "computed"}}}

    async def send(self, verb: str, *, input_ids: list[int], **_: Any) -> dict[str, Any]:
        assert verb == "warm"
        why = self.whys.pop(0) if self.whys else {"reason": "never_stored", "rest": None}
        if "error" in why:
            raise NotDone(why["error"])
        return {"tokens": len(input_ids), "stored_tokens": 0, "why": why}


@pytest.fixture
def warming(monkeypatch: pytest.MonkeyPatch) -> Warming:
    own = Warming()
    manager = manager_of(tokenizer=Tokenizer(), generate_request=own.generate_request)
    monkeypatch.setattr(routes, "tokenizer_manager", lambda: manager)
    monkeypatch.setattr(routes, "send", own.send)
    return own


def why(reason: Reason, rest: Reason | None = None) -> dict[str, Any]:
    return {"reason": reason, "rest": rest}


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        (why(Reason.NEVER_STORED), why(Reason.BEING_WRITTEN), "being_written"),
        (why(Reason.NEVER_STORED), why(Reason.STORED), "stored"),
        (why(Reason.STORED, Reason.EVICTED), why(Reason.STORED), "stored"),
        (why(Reason.STORED, Reason.EVICTED), why(Reason.STORED, Reason.NO_ROOM), "not_stored"),
        (why(Reason.STORED), why(Reason.STORED, Reason.BEING_WRITTEN), "being_written"),
        (why(Reason.STORED), why(Reason.STORED), "stored_before"),
        (why(Reason.NO_ROOM), why(Reason.NO_ROOM), "not_stored"),
    ],
)
def test_warming_says_what_became_of_a_prefix(
    warming: Warming, before: Any, after: Any, outcome: str
) -> None:
    warming.whys = [before, after]
    answer = asyncio.run(carry_out("warm", {"input_ids": [1, 2]}))
    assert answer == {
        "tokens": 2,
        "stored_tokens": 0,
        "why": after,
        "path": "computed",
        "outcome": outcome,
    }


ABORTED = {"type": "abort", "message": "Aborted"}


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (ABORTED, 503, "aborted (Aborted)"),
        (HTTPException(503, "The request queue is full."), 503, "queue is full"),
        (HTTPException(500, "no"), 500, "no"),
        (ValueError("too long"), 400, "too long"),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_warming_that_fails_is_no_success(
    warming: Warming, client: TestClient, end: Any, status: int, words: str, several: bool
) -> None:
    """Whether there is a report or not; of several, those before it were warmed."""
    warming.ends = [{"type": "length"}, end] if several else [end]
    body = {"input_ids": [[1], [2], [3]] if several else [1]}
    answer = client.post("/impress/warm", json=body)
    assert answer.status_code == status and answer.json().keys() == {"error"}
    assert words in answer.json()["error"]
    assert answer.json()["error"].startswith("1 of 3 prefixes were warmed, ") == several
    assert len(warming.asked) == 1 + several


def test_a_fault_of_ours_is_none_of_the_caller(
    world: World, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def communicate(message: Any) -> Any:
        return [SimpleNamespace(rid=handle(world.impress, message.rid))]

    manager = manager_of(
        auto_create_handle_loop=lambda: None, set_internal_state_communicator=communicate
    )
    monkeypatch.setattr(routes, "tokenizer_manager", lambda: manager)
    assert client.get("/impress/stats").json()["requests_live"] == 0
    assert client.post("/impress/pin", json={"input_ids": [1]}).status_code == 400
    monkeypatch.setitem(admin.VERBS, "pin", None)
    assert client.post("/impress/pin", json={"input_ids": [1]}).status_code == 500
    world.runtime.served.aside = "a test"
    refused = client.post("/impress/reorder")
    assert refused.status_code == 400 and "no store is in use: a test" in refused.text


def test_each_purge_is_seen_through_before_the_next_one_begins(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: more sweeps at once than are kept would throw each other out."""
    monkeypatch.setattr(sweeps, "MOST_LOOKS", 1)
    for number in range(12):
        fill_pool(world, f"tenant {number}", 1000, 1)
    names = list[str]()

    async def send(verb: str, **fields: Any) -> Any:
        await asyncio.sleep(0)
        names.append(fields["name"])
        return world.told(verb, **fields)

    async def all_of_them() -> list[Any]:
        orders = [{"extra_key": f"tenant {number}"} for number in range(12)]
        return await asyncio.gather(*(carry_out("purge", own) for own in orders))

    monkeypatch.setattr(routes, "tokenizer_manager", manager_of)
    monkeypatch.setattr(routes, "send", send)
    monkeypatch.setattr(routes, "PAUSE_S", 0.0)
    answers = asyncio.run(asyncio.wait_for(all_of_them(), 60))
    assert all(own["pool_tokens"] == 9 and own["writes"] == 0 for own in answers)
    assert len(set(names)) == 12 and len(names) > 24, "each has a name, and goes in steps"
    assert names == sorted(names, key=names.index)


def test_pages_of_other_sites_neither_see_nor_order_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A browser sends what a page posts, whoever may read the answer: it is refused before."""
    app = FastAPI()
    arguments = SimpleNamespace(api_key=None, admin_api_key=None)
    manager = manager_of(server_args=arguments, tokenizer=None)
    monkeypatch.setattr(http_server, "app", app)
    monkeypatch.setattr(routes, "tokenizer_manager", lambda: manager)
    routes.add_routes()
    client = TestClient(app)
    # Totals are as open as those of SGLang, and the page has no data.
    open_to_all = {"/impress", "/impress/stats"}
    paths = {
        (path, method.upper())
        for path, methods in app.openapi()["paths"].items()
        for method in methods
        if path not in open_to_all
    }
    assert {path.split("/")[-1] for path, _ in paths} == {
        *("overview", "reorder", "check", "warm", "pin", "unpin", "purge", "why")
    }
    foreign = [{"Origin": own} for own in ("http://evil.example", "null")]
    for (path, method), headers in itertools.product(sorted(paths), foreign):
        assert client.request(method, path, headers=headers).status_code == 403, path
    # An order of our own page, or of no page, is taken, and this one is wrong.
    for headers in ({"Origin": "http://testserver"}, {}):
        assert client.post("/impress/pin", headers=headers, json={"a": 1}).status_code == 400
    # With a key the key decides.
    arguments.api_key = "secret"
    for headers in foreign:
        assert client.post("/impress/pin", headers=headers, json={"a": 1}).status_code == 400


def test_replicas_answer_as_one() -> None:
    stats = [{"store": own} for own in ({"directory": "/kv/a.1"}, {"directory": "/kv/a"}, None)]
    assert routes.merged("stats", stats)["replicas"] == [stats[2], stats[1], stats[0]]
    overviews = [{"stats": own} for own in stats[:2]]
    assert routes.merged("overview", overviews) is overviews[1]
    for states, told in (("ok ok", "ok"), ("ok failed", "failed"), ("failed running", "running")):
        answers = [{"integrity": own} for own in states.split()]
        assert routes.merged("check", answers) == {"integrity": told}
    steps = [{"segments": 2, "left": False}, {"segments": 1, "left": True}]
    assert routes.merged("purge", steps) == {"segments": 3, "left": True}
    stored = [{"stored_tokens": 64}, {"stored_tokens": 128}]
    assert routes.merged("why", stored) is stored[1]
    pins = [{"unpinned": n, "pins": {"prefixes": 1, "bytes": n}} for n in (0, 1)]
    assert routes.merged("unpin", pins) == {"unpinned": 1, "pins": {"prefixes": 1, "bytes": 1}}
