"""The drift benchmark's conversations, and its distance of distributions."""

from __future__ import annotations

import math

import pytest

from bench.core.session import BenchFailed
from bench.quality import drift
from bench.quality.drift import conversations, divergence


def tokenize(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def row(task: str, *bots: str) -> dict[str, object]:
    return {"task": task, "history": [{"user": "why?", "bot": bot} for bot in bots]}


def test_dialogues_of_a_task_are_joined_and_tasks_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drift, "LEAST_TURN_TOKENS", 100)
    long = "because " * 20
    rows = [row("a", long + "1", "no", long + "2"), row("b", long + "3", long + "4")]
    rows.append(row("a", long + "5", long + "6"))

    talks = conversations(rows, tokenize, 3, 2)

    ends = [["".join(map(chr, answer))[-12] for _, answer in talk] for talk in talks]
    assert ends == [["1", "2"], ["3", "4"], ["5", "6"]]
    assert "".join(map(chr, talks[0][0][0])).startswith("<|im_start|>user\nwhy?<|im_end|>")


def test_too_few_conversations_are_noticed() -> None:
    with pytest.raises(BenchFailed, match="0 conversations of 2 turns, not 1"):
        conversations([row("a", "because " * 20)], tokenize, 1, 2)


def test_the_divergence_is_that_of_named_tokens_and_the_rest() -> None:
    exact = {1: math.log(0.5), 2: math.log(0.25), 3: math.log(0.05)}
    found = {1: math.log(0.4), 2: math.log(0.4), 9: math.log(0.1)}

    by_hand = 0.5 * math.log(0.5 / 0.4) + 0.25 * math.log(0.25 / 0.4) + 0.25 * math.log(0.25 / 0.2)
    assert divergence(exact, found) == pytest.approx(by_hand)
    assert divergence(exact, exact) == pytest.approx(0.0, abs=1e-9)
