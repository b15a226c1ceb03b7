"""The command line: whether the store pays on a server, which is a fake one here."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from impress_sglang.cli import DONE, INTERRUPTED, REFUSED, UNREACHABLE
from impress_sglang.cli.main import main
from tests.unit.stub_server import StubServer

Output = pytest.CaptureFixture[str]
# By so much one way takes longer than another, whatever else a loaded machine does meanwhile.
SLOW_S = 0.5
TOKENS = 128
STRANGER = ("somebody else", "")


class Fake(StubServer):
    """Has a pool and a store, of which a prefix is a `cache_salt` and the first tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.pool: set[tuple[str, str]] = set()
        self.stored: set[tuple[str, str]] = {STRANGER}
        self.computing_s, self.loading_s, self.decision, self.writing = 0.04, 0.01, "load", 1
        self.broken: dict[str, tuple[int, bytes]] = {}
        self.signal = 0, 0

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for _, asked, body, _ in self.asked if asked.partition("?")[0] == path]

    def reply(self, path: str, body: Any) -> tuple[int, bytes]:
        path = path.partition("?")[0]
        if path in self.broken:
            return self.broken[path]
        return 200, json.dumps(self.report(path, body or {})).encode()

    def report(self, path: str, body: dict[str, Any]) -> Any:
        salt, tokens = body.get("cache_salt", ""), body.get("input_ids")
        if path == "/flush_cache":
            return self.pool.clear()
        if path == "/impress/stats":
            return {"store": {"read_mbps": 1234}}
        if path == "/tokenize":
            return {"tokens": list(range(len(body["prompt"])))}
        if path == "/impress/why":
            self.writing -= 1
            return {"why": {"reason": "being_written" if self.writing >= 0 else "stored"}}
        if path == "/impress/purge":
            purged = {prefix for prefix in self.stored if prefix[0] == salt}
            self.stored -= purged
            return {"segments": len(purged)}
        assert path == "/generate" and tokens
        found = self.generate((salt, str(tokens[:TOKENS])), body["sampling_params"])
        return {"meta_info": {"impress": found}}

    def generate(self, prefix: tuple[str, str], sampling: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            number, stop = self.signal
            if number and len(self.bodies("/generate")) >= number:
                self.signal = 0, 0
                os.kill(os.getpid(), stop)
            stored, resident = prefix in self.stored, prefix in self.pool
            loads = stored and not resident and self.decision == "load"
            self.pool.add(prefix)
            if sampling["custom_params"]["impress_store"]:
                self.stored.add(prefix)
        if not resident:
            time.sleep(self.loading_s if loads else self.computing_s)
        return {
            "path": "device" if resident else "ssd" if loads else "computed",
            "decision": self.decision if stored and not resident else "none",
            "bits_mean": 5.25 if loads else None,
            "ssd_bytes": 2_000_000 if loads else 0,
            "why": {"reason": "computed_faster", "text": "loading would take longer"},
        }


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake().serving() as fake:
        yield fake
    assert STRANGER in fake.stored
    for body in fake.bodies("/impress/purge"):
        assert body["cache_salt"].startswith("impress-bench-")


def run(fake: Fake, *options: str) -> int:
    sizes = ("--prefixes=3", f"--prefix-tokens={TOKENS}")
    return main(["bench", "--url", fake.url, *sizes, *options])


def measured(fake: Fake, output: Output, *options: str) -> tuple[dict[str, Any], str]:
    """The rows by their way, and the conclusion."""
    assert run(fake, "--json", *options) == DONE
    captured = output.readouterr()
    assert "removed what was stored: 3 segments" in captured.err and fake.stored == {STRANGER}
    result = json.loads(captured.out)
    return {row["way"]: row for row in result["ways"]}, result["conclusion"]


@pytest.mark.parametrize("clients", [1, 3])
def test_each_way_is_measured(fake: Fake, capsys: Output, clients: int) -> None:
    fake.computing_s = SLOW_S
    ways, conclusion = measured(fake, capsys, "--flush", f"--clients={clients}")
    assert list(ways) == ["computed", "computed, stored", "SGLang's pool", "loaded"]
    assert all(row["requests"] == 3 for row in ways.values())
    loaded, computed = ways["loaded"], ways["computed"]
    assert (loaded["read_mb"], loaded["bits"], computed["bits"]) == (2.0, 5.25, None)
    assert computed["ttft_ms"] >= 500 and computed["ratio"] == 1 and loaded["ratio"] > 1
    assert computed["tokens_per_s"] < loaded["tokens_per_s"]
    assert conclusion.startswith("The store pays here") and "1,234 MB/s" in conclusion
    requests = fake.bodies("/generate")
    assert len({str(body["input_ids"][:TOKENS]) for body in requests}) == 3
    custom = [body["sampling_params"]["custom_params"] for body in requests]
    assert custom.count({"impress_store": True, "impress_ttl": 3600}) == 3
    assert custom.count({"impress_store": False}) == len(custom) - 3


def test_the_pool_of_others_is_emptied_only_on_request(fake: Fake, capsys: Output) -> None:
    ways, conclusion = measured(fake, capsys)
    assert "loaded" not in ways and "--flush" in conclusion and not fake.bodies("/flush_cache")


def test_a_slow_drive_does_not_pay(fake: Fake, capsys: Output) -> None:
    fake.loading_s = SLOW_S
    ways, conclusion = measured(fake, capsys, "--flush")
    assert ways["loaded"]["ratio"] < 1 and conclusion.startswith("The store does not pay here")


def test_a_server_that_computes_instead_says_why(fake: Fake, capsys: Output) -> None:
    fake.decision = "recompute"
    ways, conclusion = measured(fake, capsys, "--flush")
    assert ways["computed anyway"]["requests"] == 3 and "loaded" not in ways
    assert "loading would take longer" in conclusion


def test_prefixes_of_a_text(fake: Fake, capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a" * 3 * TOKENS)
    measured(fake, capsys, f"--text={path}")
    first = {body["input_ids"][0] for body in fake.bodies("/generate")}
    assert first == {0, TOKENS, 2 * TOKENS}


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("number", [2, 6, 9])
def test_interruptions_leave_nothing(fake: Fake, capsys: Output, stop: int, number: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    fake.signal = number, stop
    assert run(fake, "--clients=2") == INTERRUPTED
    captured = capsys.readouterr()
    assert "impress: removed what was stored" in captured.err and not captured.out
    assert fake.stored == {STRANGER} and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_requests_and_orders_may_need_other_keys(fake: Fake, capsys: Output) -> None:
    measured(fake, capsys, "--key=of-orders", "--api-key=of-requests", "--flush")
    keys = {path.partition("?")[0]: key for _, path, _, key in fake.asked}
    assert keys["/generate"] == keys["/impress/stats"] == "Bearer of-requests"
    assert keys["/impress/purge"] == keys["/flush_cache"] == "Bearer of-orders"


@pytest.mark.parametrize(
    ("path", "code", "answer", "status", "message"),
    [
        ("/flush_cache", 400, b"Flush failed: 2 requests run.\n", REFUSED, "2 requests run"),
        ("/generate", 400, b'{"error": {"message": "too long"}}', REFUSED, "too long"),
        ("/generate", 200, b'{"meta_info": {}}', UNREACHABLE, "impress"),
    ],
)
def test_what_a_server_refuses(
    fake: Fake, capsys: Output, path: str, code: int, answer: bytes, status: int, message: str
) -> None:
    fake.broken[path] = code, answer
    assert run(fake, "--flush") == status
    assert message in capsys.readouterr().err and fake.stored == {STRANGER}


def test_what_cannot_be_removed_is_told(fake: Fake, capsys: Output) -> None:
    fake.broken["/impress/purge"] = 500, b"oops"
    assert run(fake) == DONE
    assert "impress purge --cache-salt impress-bench-" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--prefixes=0", "--prefix-tokens=100", "--clients=0"])
def test_what_cannot_be_measured(fake: Fake, capsys: Output, tmp_path: Path, wrong: str) -> None:
    assert run(fake, wrong) == REFUSED
    short = tmp_path / "text"
    short.write_text("too short")
    assert run(fake, f"--text={short}") == REFUSED
    assert "384 are needed" in capsys.readouterr().err and not fake.bodies("/generate")
