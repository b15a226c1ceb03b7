"""What the decode benchmark says of two answers."""

from __future__ import annotations

from bench.quality.decode import PAIRS, compare, questions


def test_an_answer_is_compared_token_by_token() -> None:
    exact = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert compare("exact", exact, exact) == {
        "prefix": "exact",
        "same": 4.0,
        "alike": 1.0,
        "equal": 2,
    }
    # The second one leaves a token out and goes on as before.
    assert compare("other", exact, [[1, 2, 3, 4], [5, 7, 8, 9]]) == {
        "prefix": "other",
        "same": 2.5,
        "alike": 0.875,
        "equal": 1,
    }


def test_all_questions_share_the_handbook() -> None:
    asked = questions(lambda text: [ord(letter) for letter in text])
    assert len({tuple(own[:2000]) for own in asked}) == 1
    assert len({tuple(own) for own in asked}) == len(PAIRS)
