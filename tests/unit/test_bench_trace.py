"""The trace of `bench serving`: equal every time, normal popularity, prefixes that differ."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.core.servers import link_store, segment_sizes
from bench.policies.examples import READERS, Example, TraceError, make_examples, read_examples
from bench.policies.trace import (
    MAX_QUESTION_TOKENS,
    Trace,
    TraceOptions,
    draw_prefixes,
    make_trace,
    write_for_bench_serving,
)

OPTIONS = TraceOptions(
    prefixes=6, prefix_tokens=300, warmup=5, settle=2, requests=20, sigma=1.5, seed=3
)
ROWS: dict[str, dict[str, Any]] = {
    "rte": {"premise": "It rains.", "hypothesis": "It is wet.", "label": "entailment"},
    "piqa": {"goal": "Open a jar", "sol1": "turn it", "sol2": "burn it", "label": 0},
    "openbookqa": {"question": "Ice is", "choices": ["hot", "cold"], "label": 1},
    "copa": {
        "premise": "It rained.",
        "question": "effect",
        "choice1": "The street was wet.",
        "choice2": "The sun was hot.",
        "label": 0,
    },
    "squad_xquad_en": {"context": "It rained.", "question": "What fell?", "answers": ["rain"]},
}
SHOTS = {
    "rte": "It rains.\nQuestion: It is wet. True or False?\nAnswer: True",
    "piqa": "Question: Open a jar\nAnswer: turn it",
    "openbookqa": "Question: Ice is\nAnswer: cold",
    "copa": "It rained therefore the street was wet.",
    "squad_xquad_en": "Passage: It rained.\nQuestion: What fell?\nAnswer: rain",
}


class Words:
    """A tokenizer of words and signs."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        words = re.findall(r"\w+|\W", text)
        return [self._ids.setdefault(word, len(self._ids)) for word in words]


def trace_of(options: TraceOptions = OPTIONS) -> Trace:
    return make_trace({"made": make_examples(400, 7)}, Words(), options)


def requests_of(trace: Trace) -> list[Any]:
    return [*trace.warmup, *trace.settle, *trace.measured]


def test_same_options_give_the_same_trace() -> None:
    assert trace_of() == trace_of()


def test_another_seed_gives_another_trace() -> None:
    other = TraceOptions(6, 300, 5, 2, 20, sigma=1.5, seed=4)
    assert trace_of().prefixes != trace_of(other).prefixes


def test_parts_have_the_lengths_that_were_asked_for() -> None:
    trace = trace_of()
    assert len(trace.prefixes) == 6
    assert (len(trace.warmup), len(trace.settle), len(trace.measured)) == (5, 2, 20)
    assert all(250 < len(prefix.tokens) <= 300 for prefix in trace.prefixes)


def test_prefixes_share_no_first_token() -> None:
    trace = trace_of(TraceOptions(60, 100, 1, 1, 10, sigma=15, seed=1))
    assert len({prefix.tokens[0] for prefix in trace.prefixes}) == 60


def test_a_request_is_a_prefix_and_a_question_that_no_prefix_shows() -> None:
    trace = trace_of()
    for request in requests_of(trace):
        prefix = trace.prefixes[request.prefix]
        new = len(request.tokens) - len(prefix.tokens)
        assert request.tokens[: len(prefix.tokens)] == prefix.tokens
        assert 0 < new <= MAX_QUESTION_TOKENS
        question = request.text.removeprefix(prefix.text)
        assert request.text.startswith(prefix.text)
        assert not any(question in other.text for other in trace.prefixes)


def test_questions_do_not_repeat() -> None:
    questions = Counter(request.text for request in requests_of(trace_of()))
    assert max(questions.values()) == 1


def test_popularity_is_normal_and_no_prefix_comes_twice_in_a_row() -> None:
    draws = draw_prefixes(20_000, 16, 4.0, np.random.default_rng(1))
    assert all(a != b for a, b in itertools.pairwise(draws))
    assert np.mean(draws) == pytest.approx(7.5, abs=0.1)
    counts = Counter(draws)
    # Of a normal distribution, twice as far from the middle falls off with the square.
    assert counts[3] / counts[7] == pytest.approx(np.exp(-(4.5**2 - 0.5**2) / 32), rel=0.15)
    assert set(draws) == set(range(16))


def test_a_narrow_sigma_stays_in_the_middle() -> None:
    draws = Counter(draw_prefixes(1_000, 16, 1.0, np.random.default_rng(1)))
    assert sum(draws[i] for i in range(5, 11)) > 950


@pytest.mark.parametrize(("prefixes", "sigma"), [(1, 1.0), (4, 0.1)])
def test_a_trace_that_cannot_be_drawn_is_refused(prefixes: int, sigma: float) -> None:
    with pytest.raises(TraceError, match="two prefixes"):
        trace_of(TraceOptions(prefixes, 300, 1, 1, 5, sigma=sigma, seed=1))


def test_too_few_examples_are_refused() -> None:
    with pytest.raises(TraceError, match="less than 300 tokens"):
        make_trace({"made": make_examples(4, 1)}, Words(), OPTIONS)
    with pytest.raises(TraceError, match="no question"):
        make_trace({"long": [Example("a " * 100, "b")] * 20}, Words(), OPTIONS)


def test_prefixes_take_turns_among_data_sets() -> None:
    sets = {"b": make_examples(400, 1), "a": make_examples(400, 2)}
    trace = make_trace(sets, Words(), OPTIONS)
    assert [prefix.dataset for prefix in trace.prefixes] == ["a", "b"] * 3


def test_made_examples_differ_from_each_other() -> None:
    examples = make_examples(500, 1)
    assert len({example.question for example in examples}) == 500
    assert examples == make_examples(500, 1) != make_examples(500, 2)


@pytest.mark.parametrize("name", READERS)
def test_data_sets_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "part.jsonl").write_text(json.dumps(ROWS[name]) + "\n\n")
    (example,) = read_examples(tmp_path, name)
    assert example.shot == SHOTS[name]
    assert not example.question.endswith(example.answer)


def test_an_unknown_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no data set 'rte'"):
        read_examples(tmp_path, "rte")


def test_bench_serving_reads_the_written_trace(tmp_path: Path) -> None:
    trace = trace_of()
    write_for_bench_serving(trace, tmp_path / "trace.jsonl")
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    turns = [json.loads(line)["conversations"] for line in lines]
    assert [turn[0]["content"] for turn in turns] == [r.text for r in trace.measured]
    assert all(len(turn) == 2 for turn in turns)


def test_a_linked_store_shares_segments_but_not_the_catalog_or_the_lock(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    segments = source / "model" / "segments" / "ab"
    segments.mkdir(parents=True)
    (segments / "ab1.kv").write_bytes(b"kv" * 100)
    (source / "model" / "catalog.sqlite").write_bytes(b"rows")
    (source / "model" / "lock").touch()

    link_store(source, target)

    copy = target / "model"
    assert (copy / "segments/ab/ab1.kv").samefile(segments / "ab1.kv")
    assert (copy / "catalog.sqlite").read_bytes() == b"rows"
    assert not (copy / "catalog.sqlite").samefile(source / "model" / "catalog.sqlite")
    assert not (copy / "lock").exists()
    assert segment_sizes(target) == [200]
