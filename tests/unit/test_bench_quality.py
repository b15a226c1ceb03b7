"""Benchmarks of quality: tasks, scores, and what a model reads behind rounded KVs."""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.core.report import Row, Table
from bench.core.session import BenchFailed
from bench.quality import accuracy
from bench.quality.accuracy import COLUMNS, Measured, Way, ask_all, make_rows, option_loglik
from bench.quality.blend import divergence, score
from bench.quality.precision import Reader, Rule
from bench.quality.tasks import Item, Task, make_task
from impress_sglang.cli.calibrate import Prompts, calibrated
from impress_sglang.codes.rows.fit import SINK_TOKENS
from tests.serving.tiny_models import make_model, random_tokens

EXACT, QUARTER, FIVE = Way("paper"), Way("paper", 0.25), Way("a@5", 1.0, 5.0)
EXCERPTED = ("piqa", "copa", "openbookqa", "squad", "completion", "signature")


def report(**changed: Any) -> Row:
    return {
        "path": "ssd",
        "stored_tokens": 100,
        "loaded_tokens": 25,
        "approximate": True,
        "bits": 5.0,
        "resident_tokens": 0,
        **changed,
    }


def measured(way: Way, logliks: list[list[float]]) -> Measured:
    task = Task("rte", [list(range(100))], [Item(0, [1], ([2], [3]), (4, 8), 0)] * len(logliks))
    return Measured(way, task, logliks, [40.0] * len(logliks))


def task_of(name: str, seed: int = 3) -> Task:
    args = argparse.Namespace(prefixes=2, examples=8, data=None, seed=seed)
    return make_task(name, lambda text: list(map(ord, text)), args)


@pytest.mark.parametrize("name", EXCERPTED)
def test_tasks_have_questions_that_no_prefix_shows(name: str) -> None:
    task = task_of(name)
    assert len(task.items) == 8 and len(task.prefixes) >= 2
    prefixes = ["".join(map(chr, prefix)) for prefix in task.prefixes]
    for item in task.items:
        question = "".join(map(chr, item.question))
        assert all(question not in prefix for prefix in prefixes)
        assert 0 <= item.gold < len(item.options)
    assert [item.prefix for item in task.items] == sorted(item.prefix for item in task.items)
    assert task_of(name) == task != task_of(name, seed=4)


def test_an_options_loglik_is_that_of_its_own_tokens() -> None:
    meta = {"input_token_logprobs": [(None, 7, None), (-1.5, 8, None), (-0.25, 9, None)]}
    assert option_loglik(meta, [8, 9]) == -1.75
    with pytest.raises(BenchFailed, match="got those of"):
        option_loglik(meta, [8, 8])
    with pytest.raises(BenchFailed, match="sum up to"):
        option_loglik({"input_token_logprobs": [None, (float("-inf"), 8)]}, [8])


def test_bytes_are_those_of_requests_that_read() -> None:
    reports = iter([report(ssd_bytes=4000), report(path="device", ssd_bytes=100)])

    def generate(tokens: list[int], **_: Any) -> Row:
        logprobs = [None, (-1.0, tokens[-1])]
        return {"meta_info": {"input_token_logprobs": logprobs, "impress": next(reports)}}

    server: Any = SimpleNamespace(generate=generate)
    answers = ask_all(server, measured(FIVE, [[]]).task, FIVE)
    assert (answers.logliks, answers.read) == ([[-1.0, -1.0]], [40.0])


@pytest.mark.parametrize(
    ("way", "said", "right"),
    [
        (QUARTER, {}, True),
        (QUARTER, {"loaded_tokens": 26}, False),
        (QUARTER, {"path": "computed"}, False),
        (QUARTER, {"stored_tokens": 90, "loaded_tokens": 23}, False),
        (EXACT, {"approximate": False, "loaded_tokens": 100}, True),
        (EXACT, {"approximate": False, "path": "device", "loaded_tokens": 0}, True),
        (EXACT, {}, False),
        (FIVE, {"loaded_tokens": 100}, True),
        (FIVE, {"path": "device", "stored_tokens": 0, "resident_tokens": 100}, True),
        (FIVE, {"stored_tokens": 90, "loaded_tokens": 90, "resident_tokens": 10}, True),
        (FIVE, {"stored_tokens": 90, "loaded_tokens": 90}, False),
        (Way("a@6", 1.0, 6.0), {}, False),
    ],
)
def test_an_answer_must_have_come_as_asked(way: Way, said: Row, right: bool) -> None:
    with contextlib.nullcontext() if right else pytest.raises(BenchFailed):
        accuracy.check_path(report(**said), 100, way)


def test_rows_compare_with_the_reference() -> None:
    exact, other = [[-1.0, -2.0]] * 8, [[-1.0, -2.0]] * 6 + [[-3.0, -1.0]] * 2
    answers = [measured(Way(accuracy.REFERENCE), exact), measured(QUARTER, other)]
    _, row = rows = make_rows(answers, kv_bytes=100, seed=1)
    assert (row["accuracy"], row["agreement"], row["difference_points"]) == (0.75, 0.75, -25.0)
    low, high = row["agreement_interval"]
    assert low < 0.75 < high <= 1.0
    assert row["read"] == 0.4 and row["shift_nats"] == pytest.approx(0.375)
    assert "-25.0 [-62.5, 0.0]" in " ".join(str(Table(rows, COLUMNS)).split())


def test_the_divergence_is_that_of_named_tokens_and_the_rest() -> None:
    exact = {1: math.log(0.5), 2: math.log(0.25), 3: math.log(0.05)}
    other = {1: math.log(0.4), 2: math.log(0.4), 9: math.log(0.1)}
    by_hand = 0.5 * math.log(0.5 / 0.4) + 0.25 * math.log(0.25 / 0.4) + 0.25 * math.log(0.25 / 0.2)
    assert divergence(exact, other) == pytest.approx(by_hand)
    assert divergence(exact, exact) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "f1", "right"),
    [
        (" The Exeter College, Oxford.\nQuestion", 0.8, True),
        (" Exeter", 2 / 3, False),
        (" collegeexeter college", 0.5, False),
        ("", 0.0, False),
        (" B", 1.0, True),
    ],
)
def test_answers_are_compared_by_their_words(text: str, f1: float, right: bool) -> None:
    assert score(text, ["Exeter College", "b"]) == (pytest.approx(f1), right)


@torch.no_grad()
def test_a_model_reads_on_behind_exact_and_rounded_kvs(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    texts = {str(seed): random_tokens(400, seed=seed) for seed in range(30, 34)}
    with torch.enable_grad():
        ((basis,),) = calibrated(Prompts(model), texts)
    reader = Reader(tmp_path, {4.0: basis})
    prefix, text = random_tokens(200, seed=1), random_tokens(30, seed=2)
    kvs, energies = reader.prefix(prefix)
    exact = reader.follow(kvs, text)
    whole = reader.model(torch.tensor([[*prefix, *text]])).logits[0, len(prefix) :]
    torch.testing.assert_close(exact, whole.log_softmax(-1), rtol=0, atol=1e-3)

    def loss(rule: str) -> float:
        rounded = reader.rounded(Rule.parse(rule), kvs, energies)
        assert torch.equal(rounded[0][1][:SINK_TOKENS], kvs[0][1][:SINK_TOKENS]), "values of sinks"
        logp = reader.follow(rounded, text)
        return float((exact.exp() * (exact - logp)).sum(-1).mean())

    assert 0 <= loss("coded 6") < loss("coded 5")
    assert 0 < loss("basis 4") < loss("coded 5") * 9
