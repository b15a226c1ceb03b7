"""What the page shows, and that it shows nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken

from impress_sglang.plugin import admin
from impress_sglang.plugin.routes import document, with_text
from impress_sglang.serving.report import MAX_WORDS
from tests.browser import needs_browser, shown
from tests.integration.worlds import STORED, World

SHOWN = {"show_prompts": "on"}


def seen(world: World, **wanted: Any) -> Any:
    """What the scheduler's process answers."""
    return world.told("overview", **{"after": 0, "below": None, **wanted})


def shown_of(world: World) -> Any:
    """What is told of a prompt that is stored, and of a request that has ended."""
    world.stored_after("r", 2000)
    world.run("asked", STORED, namespace="tenant", store=False)
    return seen(world)


def test_never_all_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "MAX_SEGMENTS", 2)
    for number in range(5):
        world.stored_after(f"r{number}", 2000 + 100 * number)
    rows = seen(world)["segments"]
    assert len(rows) == 2 and rows[1]["on"] == rows[0]["segment"]
    assert rows[0]["builders"] == 4 and rows[1]["builders"] == 0
    below = seen(world, below=rows[0]["segment"])["segments"]
    assert len(below) == 2 and {row["on"] for row in below} == {rows[0]["segment"]}
    assert seen(world, below="gone") == {"segments": []}


def test_nobody_is_shown_prompts(world: World) -> None:
    found = shown_of(world)
    assert found["requests"][0]["begins"] and found["segments"][0]["begins"]
    assert all(row["words"] is None for row in (*found["requests"], *found["segments"]))
    assert not re.search(r"\b10[0-9][0-9], 10", json.dumps(found)), "tokens"
    assert all(row["text"] is None for row in with_text(found, Tokenizer())["segments"])


class Tokenizer:
    def decode(self, tokens: list[int]) -> str:
        return f"<b>{tokens[0]}</b>" + "x" * 1000


@pytest.mark.parametrize("options", [SHOWN])
def test_prompts_are_shown_to_who_wants_that(world: World) -> None:
    found = shown_of(world)
    assert found["requests"][0]["words"] == STORED[:MAX_WORDS]
    (row,) = with_text({"segments": found["segments"][:1]}, Tokenizer())["segments"]
    assert row["text"].startswith("<b>1000</b>x") and len(row["text"]) == 120
    assert with_text({"requests": found["requests"]}, None)["requests"][0]["text"] is None


@pytest.mark.parametrize("options", [SHOWN])
def test_media_are_one_token_that_no_text_has(world: World) -> None:
    """Cut to 32 bits they would be other tokens. Some tokenizers raise an error for it."""
    media = 2**31  # SGLang 0.5.22 has none above 32 bits.
    world.run("media", array("q", [media, media + 5, *STORED]))
    found = seen(world)
    assert found["requests"][0]["words"][:3] == [2**31 - 1, 2**31 - 1, STORED[0]]
    tokenizer = tiktoken.Encoding("", pat_str=".", mergeable_ranks={b"a": 0}, special_tokens={})
    assert with_text({"requests": found["requests"]}, tokenizer)["requests"][0]["text"] is None


def test_a_browser_runs_what_belongs_to_the_page() -> None:
    html, policy = document()
    for kind, tag in (("style", "style"), ("script", "script")):
        (source,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy and len(source) > 1000
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", html)
    assert set(re.findall(r"https?://[\w.:]+", html)) <= {
        "http://127.0.0.1:30000",
        "http://www.w3.org",
    }


HOSTILE = "<img src=x onerror=\"document.title='taken over'\"><script>alert(1)</script>"


@contextmanager
def served(found: dict[str, Any] | None) -> Iterator[str]:
    """A server that has the page and these data, or tells none without a key; its address."""
    html, policy = document()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path == "/impress"
            self.send_response(200 if is_page or found is not None else 401)
            self.send_header("Content-Security-Policy", policy)
            self.send_header("Content-Type", "text/html" if is_page else "application/json")
            self.end_headers()
            self.wfile.write((html if is_page else json.dumps(found)).encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/impress"
        finally:
            server.shutdown()


@needs_browser
@pytest.mark.parametrize("options", [SHOWN])
def test_prompts_are_only_text(world: World, tmp_path: Path) -> None:
    found = with_text(shown_of(world), SimpleNamespace(decode=lambda _: HOSTILE))
    found["requests"][0] |= {"rid": HOSTILE, "why": {"text": HOSTILE, "reason": "x", "rest": None}}
    with served(found) as url:
        dom = shown(url, tmp_path)
    assert "in use" in dom and dom.count("&lt;img src=x") >= 3
    assert "<img" not in dom and "taken over</title>" not in dom


@needs_browser
def test_a_browser_asks_for_the_key(tmp_path: Path) -> None:
    with served(None) as url:
        dom = shown(url, tmp_path)
    assert "a key is needed" in dom and not re.search(r"<tbody id=\"requests\"><tr", dom)
