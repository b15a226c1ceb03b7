"""Our routes: which bodies are right, what warming says, and who may ask; without a scheduler."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from fastapi.testclient import TestClient

from impress_sglang.plugin import routes
from impress_sglang.plugin.routes import AdminHTTPError, carry_out, fields_of
from impress_sglang.serving.why import Reason

VOCAB = 1000


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]


def manager_of(**fields: Any) -> SimpleNamespace:
    """Stands in for SGLang's tokenizer manager."""
    model_config = SimpleNamespace(vocab_size=VOCAB)
    return SimpleNamespace(context_len=5, model_config=model_config, **fields)


@pytest.mark.parametrize(
    ("verb", "body", "fields"),
    [
        (
            "pin",
            {"text": "abc", "extra_key": "t", "cache_salt": ""},
            {"input_ids": [97, 98, 99], "extra_key": "t"},
        ),
        ("purge", {"all": True}, {"everything": True}),
        ("purge", {"extra_key": None}, {}),
        ("purge", {"all": True, "older_than": 5}, {"everything": True, "older_than": 5}),
        ("warm", {"input_ids": [1]}, {"input_ids": [1]}),
    ],
)
def test_bodies_are_read(verb: str, body: Any, fields: Any) -> None:
    assert fields_of(verb, body, manager_of(tokenizer=Tokenizer())) == fields


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
        fields_of(verb, body, manager_of(tokenizer=Tokenizer()))


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
            raise AdminHTTPError(why["error"])
        return {"tokens": len(input_ids), "stored_tokens": 0, "why": why}


@pytest.fixture
def warming(monkeypatch: pytest.MonkeyPatch) -> Warming:
    server = Warming()
    manager = manager_of(tokenizer=Tokenizer(), generate_request=server.generate_request)
    monkeypatch.setattr(routes, "tokenizer_manager", lambda: manager)
    monkeypatch.setattr(routes, "send", server.send)
    return server


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
    (request,) = warming.asked
    asked = request.sampling_params["custom_params"]
    # It is computed behind exact KVs, so that everybody may use it, and others blend it.
    assert (asked["impress_bits"], asked["impress_blend"]) == ("exact", "off")
    assert asked["impress_store"] is True and asked["impress_retention"] == 1.0
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


def test_pages_of_other_sites_neither_see_nor_order_anything(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A browser sends what a page posts, whoever may read the answer: it is refused before."""
    arguments = SimpleNamespace(api_key=None, admin_api_key=None)
    manager = manager_of(server_args=arguments, tokenizer=None)
    app: Any = client.app
    app.dependency_overrides.clear()
    monkeypatch.setattr(routes, "tokenizer_manager", lambda: manager)
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
    foreign = [{"Origin": origin} for origin in ("http://evil.example", "null")]
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
    stats = [{"store": store} for store in ({"directory": "/kv/a.1"}, {"directory": "/kv/a"}, None)]
    assert routes.merged("stats", stats)["replicas"] == [stats[2], stats[1], stats[0]]
    overviews = [{"stats": replica} for replica in stats[:2]]
    assert routes.merged("overview", overviews) is overviews[1]
    for states, told in (("ok ok", "ok"), ("ok failed", "failed"), ("failed running", "running")):
        answers = [{"integrity": state} for state in states.split()]
        assert routes.merged("check", answers) == {"integrity": told}
    steps = [{"segments": 2, "left": False}, {"segments": 1, "left": True}]
    assert routes.merged("purge", steps) == {"segments": 3, "left": True}
    stored = [{"stored_tokens": 64}, {"stored_tokens": 128}]
    assert routes.merged("why", stored) is stored[1]
    pins = [{"unpinned": n, "pins": {"prefixes": 1, "bytes": n}} for n in (0, 1)]
    assert routes.merged("unpin", pins) == {"unpinned": 1, "pins": {"prefixes": 1, "bytes": 1}}
