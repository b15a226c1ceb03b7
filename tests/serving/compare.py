"""How far two servers' answers are from each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.serving.harness import Server

Answer = dict[str, Any]


def assert_same(expected: Sequence[Answer], actual: Sequence[Answer], tolerance: float) -> None:
    """Same tokens, and log-probabilities of the chosen tokens within `tolerance`."""
    assert len(expected) == len(actual)
    for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
        assert got["output_ids"] == want["output_ids"], f"answer {index} differs"
        difference = logprob_distance(want, got)
        assert difference <= tolerance, f"answer {index}: log-probabilities differ by {difference}"


def logprob_distance(left: Answer, right: Answer) -> float:
    """Largest difference of the log-probabilities of output tokens."""
    pairs = zip(
        left["meta_info"]["output_token_logprobs"],
        right["meta_info"]["output_token_logprobs"],
        strict=True,
    )
    return max(abs(a[0] - b[0]) for a, b in pairs)


def assert_as_stock(server: Server, stock: Server, prompt: list[int], path: str = "ssd") -> None:
    """A prompt's prefix comes from there, and the answer is right."""
    expected, answer = (
        one.generate([*prompt, 5, 6, 7], 4, return_logprob=True) for one in (stock, server)
    )
    assert report(answer)["path"] == path, report(answer)["why"]
    assert_same([expected], [answer], 1e-4)


def paths(answers: Sequence[Answer]) -> list[str]:
    return [report(answer)["path"] for answer in answers]


def report(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = answer["meta_info"]["impress"]
    return found
