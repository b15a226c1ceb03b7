"""A part of a prefix: what is read, what is reported, and that SGLang's accounting stays quiet.

A request whose prefix turns out damaged within a forward pass, where these prefixes load, ends.
`test_faults.py` has those that load beside the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import assert_same, paths, report
from tests.serving.conftest import Serve
from tests.serving.damage import store_damaged
from tests.serving.harness import BENCH, Server
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

STAYS_WHOLE = "paper"
TOLERANCE = 1e-4
CHUNK = 128
WHOLE: dict[str, Any] = {"return_logprob": True, "impress_retention": 1.0}


@pytest.fixture(scope="module")
def paper(serve: Serve) -> Iterator[Server]:
    flags = ("--max-total-tokens=9000", f"--chunked-prefill-size={CHUNK}")
    with serve("paper", "--impress-policy=paper", "--impress-retention=0.25", *flags) as server:
        yield server


def test_report_of_a_stored_prefix(paper: Server) -> None:
    prefix = paper.store(1001, seed=1)
    answer = paper.generate([*prefix, *random_tokens(20, seed=2)], 4)
    said = report(answer)
    assert said["path"] == "ssd"
    assert said["prefix_tokens"] == said["stored_tokens"] == 1001
    assert said["used_tokens"] == said["loaded_tokens"] == 251
    tokens = {source: count for source, count in said["tokens"].items() if count}
    assert tokens == {"loaded": 251, "unused": 750, "computed": 20}
    assert said["approximate"] is True
    assert said["layers_by_probe"] + said["layers_by_fallback"] == 3
    assert said["probe_ms"] > 0 and said["load_ms"] > 0 and said["attention_ms"] > 0
    assert 0 < said["ssd_needed_bytes"] <= said["ssd_bytes"]
    assert said["ahead_bytes"] - said["ahead_used_bytes"] <= 0.25 * said["ssd_bytes"]
    assert answer["meta_info"]["cached_tokens"] == 1001
    assert answer["meta_info"]["prompt_tokens"] == 1021
    # The next question finds most of it in the caches.
    again = report(paper.generate([*prefix, *random_tokens(20, seed=3)], 4))
    assert again["device_chunks"] > 0.5 * again["chunks_accessed"]
    assert again["ssd_bytes"] < said["ssd_bytes"] / 2
    for asked, used in ((0.5, 501), (0.001, 51)):
        # Down to the floor of the server, 0.05.
        question = [*prefix, *random_tokens(20, seed=4)]
        told = report(paper.generate(question, 1, impress_retention=asked))
        assert told["used_tokens"] == used


def test_batch_with_chunks_resident_stored_and_new(paper: Server) -> None:
    stored = paper.store(900, seed=31)
    resident = random_tokens(700, seed=32)
    paper.generate(resident, 1)
    batch = [
        [*stored, *random_tokens(1200, seed=33)],
        [*stored, *random_tokens(30, seed=34)],
        [*stored, *random_tokens(30, seed=34)],
        [*resident, *random_tokens(40, seed=35)],
        random_tokens(200, seed=36),
    ]
    answers = paper.generate_together(batch, 12)
    assert paths(answers) == ["ssd", "ssd", "ssd", "device", "computed"]
    assert answers[1]["output_ids"] == answers[2]["output_ids"]


def test_what_is_computed_after_a_part_is_neither_stored_nor_resident(paper: Server) -> None:
    """What rests on a part of a prefix is no exact KV for others."""
    prompt = [*paper.store(500, seed=41), *random_tokens(100, seed=42)]
    for flushes in (False, False, True, True):
        said = report(paper.generate(prompt, 40))
        assert said["path"] == "ssd" and said["prefix_tokens"] == 500
        if flushes:
            paper.flush()
    whole = report(paper.generate(prompt, 4, impress_retention=1.0))
    assert whole["used_tokens"] == 500 and not whole["approximate"]
    paper.flush()
    assert report(paper.generate([*prompt, 5], 1))["prefix_tokens"] >= 600


@pytest.mark.parametrize("new", [20, 3 * CHUNK + 5])
def test_a_request_ends_if_its_prefix_is_damaged(stock: Server, paper: Server, new: int) -> None:
    """`new` tokens in one chunk of prefill, and in several; others go on, and the next is right."""
    prompts = [
        [*store_damaged(paper, 11 * CHUNK + 17, seed=new), *random_tokens(new, seed=51)],
        [*paper.store(600, seed=54 + new), *random_tokens(12, seed=55)],
        random_tokens(60, seed=56 + new),
    ]
    expected = stock.generate_together(prompts, 16, return_logprob=True)

    broken, *others = paper.generate_together(prompts, 16, **WHOLE)

    assert broken["meta_info"]["finish_reason"]["type"] == "abort"
    assert "ask again" in broken["meta_info"]["finish_reason"]["message"]
    assert report(broken)["why"]["reason"] == "damaged"
    assert_same(expected[1:], others, TOLERANCE)
    assert report(others[0])["path"] == "ssd"
    for _ in range(2):
        assert_same(expected, paper.generate_together(prompts, 16, **WHOLE), TOLERANCE)
        paper.flush()


PREFIXES = [random_tokens(700, seed=100 + number) for number in range(4)]
# Of 0.74 MB of KVs per prefix.
SMALL_CACHES = ("--impress-device-gb=0.0004", "--impress-host-gb=0.0008")


def question(prefix: int, seed: int) -> list[int]:
    return [*PREFIXES[prefix], *random_tokens(12, seed)]


def reorder(server: Server, route: str = "/bench/reorder", **body: object) -> None:
    """Order a reordering and wait until it is done."""
    server.post(route, **body).raise_for_status()
    wait_until(lambda: server.stats()["reorder"]["pending"] == 0, 60)


def test_prefixes_are_rewritten_by_what_questions_selected(workdir: Path, serve: Serve) -> None:
    """Each of four by three questions, where caches evict; `test_random.py` has other traffic."""
    store = workdir / "store-reordered"
    flags = (
        *("--impress-policy=paper", "--impress-reorder-interval=0", *SMALL_CACHES),
        *("--impress-retention=0.25", "--max-total-tokens=1600"),
    )
    with serve("reordered", *flags, preload=BENCH) as server:
        for prefix in PREFIXES:
            server.generate(prefix, 1)
            # While a prefix is written, the small pool has no room to write another.
            server.flush()
        before = set(store.glob("*/segments/*/*.kv"))
        first = [server.generate(question(i, 0), 1) for i in range(4)]
        told = [report(answer) for answer in first]
        assert {said["used_tokens"] for said in told} == {700 // 4}
        layers = {said["layers_by_probe"] + said["layers_by_fallback"] for said in told}
        assert layers == {3} and all(said["approximate"] for said in told)
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
        assert server.stats()["reorder"]["failed"] == 0
