"""The page of a running server, and its data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.browser import needs_browser, shown
from tests.serving.conftest import Serve
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens

KEY = {"Authorization": "Bearer the-admins-key"}


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    flags = ("--max-total-tokens=1500", "--admin-api-key=the-admins-key")
    with serve("page", *flags) as server:
        for number in range(8):
            prefix = random_tokens(700, seed=number % 3)
            server.generate([*prefix, *random_tokens(9, seed=50 + number)])
        yield server


def overview(server: Server, **wanted: Any) -> Any:
    url = f"{server.url}/impress/overview"
    response = requests.get(url, headers=KEY, params=wanted, timeout=60)
    response.raise_for_status()
    return response.json()


def test_what_it_says_agrees_with_the_statistics(server: Server) -> None:
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


def test_the_page_itself_asks_for_no_key(server: Server) -> None:
    answer = requests.get(f"{server.url}/impress", timeout=60)
    policy = answer.headers["Content-Security-Policy"]
    assert answer.ok and policy.startswith("default-src 'none'")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@needs_browser
def test_a_browser_asks_for_the_key(server: Server, tmp_path: Path) -> None:
    dom = shown(f"{server.url}/impress", tmp_path)
    assert "a key is needed" in dom and not re.search(r"<tbody id=\"requests\"><tr", dom)
