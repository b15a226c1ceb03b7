"""A part of a prefix: what is read, what is reported, and that SGLang's accounting stays quiet.

A request whose prefix turns out damaged within a forward pass, where these prefixes load, ends.
`test_faults.py` has those that load beside the pass.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.compare import assert_same, report
from tests.serving.conftest import module_server
from tests.serving.damage import segments, store_damaged
from tests.serving.harness import BENCH, Server
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

STAYS_WHOLE = "paper"
CHUNK = 128
WHOLE: dict[str, Any] = {"return_logprob": True, "impress_retention": 1.0}


FLAGS = (
    *("--impress-policy=paper", "--impress-retention=0.25"),
    *("--max-total-tokens=9000", f"--chunked-prefill-size={CHUNK}"),
)
paper = module_server("paper", *FLAGS, preload=BENCH)


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
    assert_same(expected[1:], others)
    assert report(others[0])["path"] == "ssd"
    for _ in range(2):
        assert_same(expected, paper.generate_together(prompts, 16, **WHOLE))
        paper.flush()


def reorder(server: Server, route: str, **body: object) -> None:
    """Order a reordering and wait until it is done."""
    server.post(route, **body).raise_for_status()
    wait_until(lambda: server.stats()["reorder"]["pending"] == 0, 60)


def test_a_prefix_is_rewritten_by_what_questions_selected(paper: Server) -> None:
    before = segments(paper)
    prefix = paper.store(700, seed=100)
    (old,) = segments(paper) - before

    def ask(seed: int) -> None:
        said = report(paper.generate([*prefix, *random_tokens(12, seed)], 1))
        assert said["path"] == "ssd" and said["used_tokens"] == 700 // 4

    ask(101)
    reorder(paper, "/impress/reorder", force=True)
    assert old.exists(), "one request has not paid for it"
    ask(102)
    ask(103)
    reorder(paper, "/bench/reorder")
    wait_until(lambda: not old.exists())
    ask(104)
    assert paper.stats()["reorder"]["failed"] == 0
