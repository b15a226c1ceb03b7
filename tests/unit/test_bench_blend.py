"""The questions of the blend benchmark, and its intervals."""

from __future__ import annotations

import argparse
import math

import pytest

from bench.core.session import BenchFailed
from bench.quality.blend import HEAD, SHOTS, divergence, draw, interval, packs_of, score


def tokenize(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def arguments(**given: object) -> argparse.Namespace:
    usual = {"questions": 4, "documents": 3, "tokens": 20, "seed": 1, "set": "a set"}
    return argparse.Namespace(**(usual | given))


ROWS = [
    {"context": f"passage {n} " * 9, "question": f"what {n}", "answers": [f"{n}", "no"]}
    for n in range(8)
]
WHOLE = [{"ctxs": ["one", "two", "three", "four"], "question": "q", "answers": ["a"]}] * 8


@pytest.mark.parametrize("rows", [ROWS, WHOLE])
def test_documents_come_in_another_order(rows: list[dict[str, object]]) -> None:
    drawn = draw(rows, tokenize, arguments())
    assert len(drawn) == 4
    for question in drawn:
        assert sorted(question.order) == [0, 1, 2] != question.order
        assert all(2 < len(own) <= 22 and own[-2:] == [10, 10] for own in question.documents)
        stored, asked = question.prompt([0, 1, 2]), question.prompt(question.order)
        assert sorted(stored) == sorted(asked) and stored != asked
    assert draw(rows, tokenize, arguments()) == drawn != draw(rows, tokenize, arguments(seed=2))


def test_the_passage_of_a_question_is_among_its_documents() -> None:
    for own in draw(ROWS, tokenize, arguments(tokens=1000)):
        number = bytes(own.question).decode().removeprefix(f"{SHOTS}Question: what ")[0]
        assert any(f"passage {number} " in bytes(doc).decode() for doc in own.documents)
        assert bytes(own.answer).decode() == f" {number}"


def test_too_few_rows_are_noticed() -> None:
    with pytest.raises(BenchFailed, match="a set has 8 rows"):
        draw(ROWS, tokenize, arguments(questions=9))


def test_an_interval_holds_the_mean() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert 1.0 < low < 2.5 < high < 4.0
    assert interval([2.0] * 5) == (2.0, 2.0)


def test_the_divergence_is_that_of_named_tokens_and_the_rest() -> None:
    exact = {1: math.log(0.5), 2: math.log(0.25), 3: math.log(0.05)}
    found = {1: math.log(0.4), 2: math.log(0.4), 9: math.log(0.1)}
    by_hand = 0.5 * math.log(0.5 / 0.4) + 0.25 * math.log(0.25 / 0.4) + 0.25 * math.log(0.25 / 0.2)
    assert divergence(exact, found) == pytest.approx(by_hand)
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


def test_documents_are_stored_once_and_several_in_a_prompt() -> None:
    drawn = draw(ROWS, tokenize, arguments(tokens=1000, questions=8))
    packs = list(packs_of(drawn, 3))
    assert len(packs) == 3
    for text in (f"passage {number} " * 9 for number in range(8)):
        assert sum(bytes(own).decode().count(text) for own in packs) == 1
    assert all(own[: len(tokenize(HEAD))] == tokenize(HEAD) for own in packs)
