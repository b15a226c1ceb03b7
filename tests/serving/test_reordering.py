"""Caches that evict all the time and segments that are rewritten, while requests are served."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import Answer, assert_same, paths, report
from tests.serving.conftest import Serve
from tests.serving.harness import BENCH, Server
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

PREFIXES = [random_tokens(700, seed=100 + number) for number in range(4)]
# Of 0.74 MB of KVs per prefix.
SMALL_CACHES = ("--impress-device-gb=0.0004", "--impress-host-gb=0.0008")
COMMON = (
    "--impress-policy=paper",
    "--impress-reorder-interval=0",
    *SMALL_CACHES,
)


def question(prefix: int, seed: int) -> list[int]:
    return [*PREFIXES[prefix], *random_tokens(12, seed)]


def reorder(server: Server, route: str = "/bench/reorder", **body: object) -> None:
    """Order a reordering and wait until it is done."""
    server.post(route, **body).raise_for_status()
    wait_until(lambda: server.stats()["reorder"]["pending"] == 0, 60)


@pytest.fixture(scope="module")
def reordered(workdir: Path, serve: Serve) -> str:
    """Four prefixes, each reordered by what three questions selected."""
    store = workdir / "store-reordered"
    flags = (*COMMON, "--impress-retention=0.25", "--max-total-tokens=1600")
    with serve("reordered", *flags, preload=BENCH) as server:
        for prefix in PREFIXES:
            server.generate(prefix, 1)
            # While a prefix is written, the small pool has no room to write another.
            server.flush()
        before = set(store.glob("*/segments/*/*.kv"))
        first = [server.generate(question(i, 0), 1) for i in range(4)]
        told = [report(answer) for answer in first]
        assert {own["used_tokens"] for own in told} == {700 // 4}
        layers = {own["layers_by_probe"] + own["layers_by_fallback"] for own in told}
        assert layers == {3} and all(own["approximate"] for own in told)
        reorder(server, "/impress/reorder", force=True)
        assert server.stats()["reorder"]["segments"] == 0, "one request has not paid for it"
        more = [server.generate(question(i, seed), 1) for seed in (1, 2) for i in range(4)]
        assert set(paths([*first, *more])) == {"ssd"}
        reorder(server)
        stats = server.stats()
        assert stats["reorder"]["segments"] == 4
        assert stats["reorder"]["bytes_written"] == stats["store"]["used_bytes"]
        assert stats["integrity"] == "ok"
        wait_until(lambda: len(list(store.glob("*/segments/*/*.kv"))) == 4)
        assert not before & set(store.glob("*/segments/*/*.kv"))
        after = [server.generate(question(i, 9), 1) for i in range(4)]
        assert set(paths(after)) == {"ssd"}
        assert server.stats()["integrity"] == "ok"
    return "reordered"


def enough(stats: dict[str, Any]) -> bool:
    """Rewritten and evicted."""
    return stats["reorder"]["segments"] >= 4 and stats["cache"]["dropped"] > 0


def test_eight_clients_while_segments_are_rewritten_and_chunks_evicted(
    serve: Serve, stock: Server, reordered: str
) -> None:
    """Where all is exact every answer is that of stock SGLang, whatever moves meanwhile."""
    prompts = [question(number % 4, 1000 + number) for number in range(32)]
    expected = stock.generate_together(prompts, 8, return_logprob=True)
    flags = (*COMMON, "--max-total-tokens=2500")
    with serve("eight", *flags, store=reordered, preload=BENCH) as server:
        busy = threading.Event()
        busy.set()

        def keep_reordering() -> None:
            while busy.is_set():
                server.post("/bench/reorder")
                time.sleep(0.1)

        background = threading.Thread(target=keep_reordering)
        background.start()
        found: list[Answer] = []
        try:
            # A slow machine rewrites less in the time of a round.
            while len(found) < 4 * len(prompts) and not enough(server.stats()):
                for first in range(0, len(prompts), 8):
                    found += server.generate_together(
                        prompts[first : first + 8], 8, return_logprob=True
                    )
        finally:
            busy.clear()
            background.join()
        assert_same(expected * (len(found) // len(prompts)), found, 1e-4)
        stored = [report(answer) for answer in found if report(answer)["path"] == "ssd"]
        assert len(stored) >= 8
        assert all(said["used_tokens"] == said["prefix_tokens"] for said in stored)
        stats = server.stats()
        assert stats["reorder"]["segments"] >= 4
        assert stats["reorder"]["failed"] == 0
        assert stats["cache"]["dropped"] > 0
        assert stats["integrity"] == "ok"
