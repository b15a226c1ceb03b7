"""A part of a prefix: what is read, what is reported, and that SGLang's accounting stays quiet.

A prefix that turns out damaged within a forward pass, where these prefixes load, is computed: its
request is queued again. `test_unreadable.py` has those that load beside the pass.
"""

from __future__ import annotations

import json
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


def test_approximate_prefix_never_becomes_resident(paper: Server) -> None:
    """What was computed after a part of a prefix must not be taken for exact KVs later."""
    prefix = paper.store(600, seed=21)
    question = [*prefix, *random_tokens(40, seed=22)]
    assert paths([paper.generate(question, 40) for _ in range(3)]) == ["ssd"] * 3


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


def test_dialogue_that_fills_the_pool(paper: Server) -> None:
    """Turns that nearly fill the pool are served with the tokens that matter."""
    turns = random_tokens(7000, seed=61)
    paper.generate(turns, 1)
    paper.flush()
    longer = [*turns, *random_tokens(900, seed=62)]
    paper.generate(longer, 1)
    paper.flush()
    answer = paper.generate([*longer[:-1], *random_tokens(30, seed=63)], 8)
    assert report(answer)["stored_tokens"] == 7899
    assert report(answer)["used_tokens"] == -(-7899 // 4)


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


def turn(server: Server, chat: list[int], retention: float, seed: int) -> tuple[list[int], int]:
    """A turn of a chat at a retention: the chat after it, and how much of it came from SSD."""
    prompt = [*chat, *random_tokens(100, seed=seed)]
    answer = server.generate(prompt, 30, impress_retention=retention)
    said = report(answer)
    assert said["path"] == "ssd"
    server.flush()
    return [*prompt, *answer["output_ids"]], said["prefix_tokens"]


def test_a_request_takes_only_what_its_own_demand_allows(paper: Server) -> None:
    """What was computed at 0.05 once served everybody, and what they computed the next ones."""
    first = paper.store(500, seed=41)
    poor, _ = turn(paper, first, 0.05, seed=42)

    _, found = turn(paper, poor, 0.25, seed=43)
    assert found == 500, "who asks for a quarter gets nothing that rests on a twentieth"
    _, found = turn(paper, poor, 1.0, seed=44)
    assert found == 500, "nor who asks for all"
    _, found = turn(paper, poor, 0.05, seed=45)
    assert found > 600


@pytest.mark.parametrize("new", [20, 3 * CHUNK + 5])
def test_a_prefix_damaged_in_the_pass_is_computed(stock: Server, paper: Server, new: int) -> None:
    """`new` tokens in one chunk of prefill, and in several."""
    prompt = [*store_damaged(paper, 11 * CHUNK + 17, seed=new), *random_tokens(new, seed=2)]
    recomputed = paper.stats()["totals"]["requests_recomputed"]
    expected = stock.generate(prompt, 16, return_logprob=True)
    for path, reason in (("computed", "damaged"), ("device", "resident")):
        answer = paper.generate(prompt, 16, **WHOLE)
        assert_same([expected], [answer], TOLERANCE)
        said = report(answer)
        assert said["path"] == path and said["why"]["reason"] == reason
        assert said["recomputed"] is (path == "computed")
    assert paper.stats()["totals"]["requests_recomputed"] == recomputed + 1


def test_others_go_on_beside_a_damaged_prefix(stock: Server, paper: Server) -> None:
    prompts = [
        [*store_damaged(paper, 1500, seed=50), *random_tokens(5 * CHUNK, seed=51)],
        [*store_damaged(paper, 700, seed=52), *random_tokens(11, seed=53)],
        [*paper.store(600, seed=54), *random_tokens(12, seed=55)],
        random_tokens(60, seed=56),
    ]
    expected = stock.generate_together(prompts, 16, return_logprob=True)
    for damaged in (True, False):
        actual = paper.generate_together(prompts, 16, **WHOLE)
        assert_same(expected, actual, TOLERANCE)
        assert [report(own)["recomputed"] for own in actual] == [damaged, damaged, False, False]
        assert not damaged or report(actual[2])["path"] == "ssd"
        paper.flush()


def test_a_stream_has_the_answer(stock: Server, paper: Server) -> None:
    prompt = [*store_damaged(paper, 400, seed=91), *random_tokens(10, seed=92)]
    response = paper.ask(prompt, 4, stream=True, impress_retention=1.0)
    *_, last = [line for line in response.text.splitlines() if line.startswith("data: {")]
    answer = json.loads(last.removeprefix("data: "))
    assert answer["output_ids"][-4:] == stock.generate(prompt, 4)["output_ids"]
    assert answer["meta_info"]["impress"]["recomputed"] is True
