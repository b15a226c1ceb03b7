"""What a key may order and see: orders, statistics, and the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from bench.core.servers import body_of
from impress_sglang.cli import DONE
from impress_sglang.cli.main import main
from tests.serving.conftest import Serve
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens

KEYS = {"user": "a-users-key", "admin": "the-admins-key"}


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    """As anybody starts it, with both of SGLang's keys."""
    flags = (
        "--max-total-tokens=3000",
        f"--api-key={KEYS['user']}",
        f"--admin-api-key={KEYS['admin']}",
    )
    with serve("orders", *flags) as server:
        yield server


def ask(
    server: Server, method: str, path: str, who: str | None = None, **body: Any
) -> requests.Response:
    headers = {} if who is None else {"Authorization": f"Bearer {KEYS[who]}"}
    return requests.request(method, server.url + path, headers=headers, json=body, timeout=120)


def generate(server: Server, tokens: list[int], **fields: Any) -> dict[str, Any]:
    response = ask(server, "POST", "/generate", "user", **body_of(tokens, 2, None), **fields)
    response.raise_for_status()
    ask(server, "POST", "/flush_cache?timeout=60", "admin").raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def overview(server: Server, after: int = 0) -> Any:
    answer = ask(server, "GET", f"/impress/overview?after={after}", "admin")
    answer.raise_for_status()
    return answer.json()


def test_the_page_agrees_with_the_statistics(server: Server) -> None:
    for number in range(8):
        prefix = random_tokens(700, seed=number % 3)
        generate(server, [*prefix, *random_tokens(9, seed=50 + number)])
    found = overview(server)
    # SGLang's own warm-up came first.
    stats, rows = found["stats"], found["requests"][:8]

    numbers = [row["number"] for row in found["requests"]]
    assert numbers == [*range(len(numbers), 0, -1)]
    for row in rows:
        assert sum(row["tokens"].values()) == 709
        assert row["computing_ms"] > 0 and row["waited_ms"] >= 0 and row["why"]["text"]
    assert any(row["tokens"]["loaded"] and row["loading_ms"] for row in rows)
    totals = {
        name: sum(row["tokens"][name] for row in found["requests"]) for name in rows[0]["tokens"]
    }
    assert sum(totals.values()) - totals["computed"] == stats["totals"]["prefix_tokens"]
    by_period = [sum(column) for column in zip(*found["periods"], strict=True)][1:]
    assert by_period == [*totals.values()]
    assert sum(row["ssd_bytes"] for row in found["segments"]) == stats["store"]["used_bytes"]
    assert {row["begins"] for row in rows} == {row["begins"] for row in found["segments"]} - {None}
    assert all(row["text"] is None for row in (*rows, *found["segments"]))
    assert overview(server, after=numbers[0])["requests"] == []


def test_the_page_itself_asks_for_no_admins_key(server: Server) -> None:
    answer = ask(server, "GET", "/impress", "user")
    policy = answer.headers["Content-Security-Policy"]
    assert answer.ok and policy.startswith("default-src 'none'")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "verb", ["warm", "pin", "unpin", "purge", "why", "reorder", "check", "overview"]
)
def test_orders_ask_for_the_admins_key(server: Server, verb: str) -> None:
    method = "GET" if verb == "overview" else "POST"
    for who in (None, "user"):
        assert ask(server, method, f"/impress/{verb}", who, all=True).status_code == 401
    assert ask(server, method, f"/impress/{verb}", "admin", input_ids=[1]).status_code != 401


def test_whether_the_store_pays_is_measured_and_nothing_is_left(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ask(server, "GET", "/impress/stats", "user").json()["store"]["segments"]
    keys = (f"--key={KEYS['admin']}", f"--api-key={KEYS['user']}")
    # All three fit into half of the pool, which is what writes may hold: none is left unstored
    # because the others are still being written.
    asked = ("--prefixes=3", "--prefix-tokens=400", "--clients=2", "--flush", "--json")
    assert main(["bench", "--url", server.url, *keys, *asked]) == DONE
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    rows = {row["way"]: row for row in found["ways"]}
    ways = ("computed", "computed, stored", "SGLang's pool", "loaded")
    assert {way: row["requests"] for way, row in rows.items()} == dict.fromkeys(ways, 3)
    assert rows["loaded"]["read_mb"] > 0 == rows["computed"]["read_mb"]
    assert found["drive_mbps"] > 0 and " here: the first token takes" in found["conclusion"]
    assert "removed what was stored: 3 segments" in captured.err
    assert ask(server, "GET", "/impress/stats", "user").json()["store"]["segments"] == before


def test_statistics_ask_for_a_key_and_tell_nothing_of_prompts(server: Server) -> None:
    assert ask(server, "GET", "/impress/stats", None).status_code == 401
    before = texts_of(ask(server, "GET", "/impress/stats", "user").json())
    for seed in range(3):
        names = {"rid": f"request-{seed}", "extra_key": f"tenant-{seed}"}
        generate(server, random_tokens(300, seed=20 + seed), **names)

    stats = ask(server, "GET", "/impress/stats", "user").json()

    assert stats["store"]["segments"] >= 3
    # Numbers change; whatever else there is, is known before anybody asks anything.
    assert texts_of(stats) == before
    assert not any(isinstance(value, list) and len(value) > 8 for value in values_of(stats))


def values_of(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from values_of(part)


def texts_of(value: Any) -> list[str]:
    """All texts in it, keys and values."""
    found = [part for part in values_of(value) if isinstance(part, str)]
    objects = (part for part in values_of(value) if isinstance(part, dict))
    return sorted(found + [key for keys in objects for key in keys])
