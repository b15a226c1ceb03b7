"""A part of a prefix: what is read, what is reported, and that SGLang's accounting stays quiet.

A request whose prefix turns out damaged within a forward pass, where these prefixes load, ends.
`test_faults.py` has those that load beside the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.compare import assert_same, paths, report
from tests.serving.conftest import Serve
from tests.serving.damage import store_damaged
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens

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
    tokens = {own: count for own, count in said["tokens"].items() if count}
    assert tokens == {"loaded": 251, "unused": 750, "computed": 20}
    assert said["approximate"] is True
    assert said["layers_by_probe"] + said["layers_by_fallback"] == 3
    assert said["probe_ms"] > 0 and said["load_ms"] > 0 and said["attention_ms"] > 0
    assert answer["meta_info"]["cached_tokens"] == 1001
    assert answer["meta_info"]["prompt_tokens"] == 1021


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


@pytest.mark.parametrize(("asked", "used"), [(0.5, 301), (0.1, 61), (0.001, 31)])
def test_a_request_asks_for_its_own_retention(paper: Server, asked: float, used: int) -> None:
    """Down to the floor of the server, 0.05."""
    prefix = paper.store(601, seed=71)
    question = [*prefix, *random_tokens(20, seed=72)]
    answers = [
        paper.generate(question, 4),
        paper.generate(question, 4, impress_retention=asked),
        paper.generate(question, 4),
    ]
    assert [report(answer)["used_tokens"] for answer in answers] == [151, used, 151]
    assert answers[0]["output_ids"] == answers[2]["output_ids"]


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
