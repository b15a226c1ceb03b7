"""A part of a prefix: what is read, what is reported, and that SGLang's accounting stays quiet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.compare import paths, report
from tests.serving.conftest import Serve
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens

STAYS_WHOLE = "paper"


@pytest.fixture(scope="module")
def paper(serve: Serve) -> Iterator[Server]:
    flags = ("--max-total-tokens=9000", "--chunked-prefill-size=512")
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


def test_report_in_a_stream_and_totals(paper: Server) -> None:
    prefix = paper.store(400, seed=5)
    before = paper.stats()["totals"]
    response = paper.ask([*prefix, 5, 6, 7], 5, stream=True)
    events = [line for line in response.text.splitlines() if line.startswith("data: {")]
    # A busy server sends several tokens at once.
    assert 2 <= len(events) <= 5
    assert all('"path": "ssd"' in event for event in events) or all(
        '"path":"ssd"' in event for event in events
    )
    after = paper.stats()["totals"]
    assert after["requests_ssd"] == before["requests_ssd"] + 1
    assert after["used_tokens"] == before["used_tokens"] + 100
    assert after["prefix_tokens"] == before["prefix_tokens"] + 400


def test_each_sample_says_what_it_loaded_itself(paper: Server) -> None:
    """A part of a prefix is nobody else's."""
    prefix = paper.store(600, seed=11)
    before = paper.stats()["totals"]
    answers: Any = paper.generate([*prefix, 5, 6, 7], 2, sampling_params={"n": 2})
    assert paths(answers) == ["ssd"] * 2
    # With that of the request for the prompt alone.
    assert paper.stats()["totals"]["requests_ssd"] == before["requests_ssd"] + 3


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
