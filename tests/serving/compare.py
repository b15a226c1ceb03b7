"""How far two servers' answers are from each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.serving.harness import Server

Answer = dict[str, Any]


def assert_same(
    expected: Sequence[Answer], actual: Sequence[Answer], tolerance: float = 1e-4
) -> None:
    """Same tokens, and log-probabilities of the chosen tokens within `tolerance`; SGLang's EAGLE
    has no number for some."""
    for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
        assert got["output_ids"] == want["output_ids"], f"answer {index} differs"
        np.testing.assert_allclose(logprobs(got), logprobs(want), rtol=0, atol=tolerance)


def logprobs(answer: Answer) -> npt.NDArray[np.float64]:
    """Of output tokens; NaN where there is none."""
    return np.array([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]], float)


def assert_as_stock(server: Server, stock: Server, prompt: list[int], path: str = "ssd") -> None:
    """A prompt's prefix comes from there, and the answer is right."""
    expected, answer = (
        one.generate([*prompt, 5, 6, 7], 4, return_logprob=True) for one in (stock, server)
    )
    assert report(answer)["path"] == path, report(answer)["why"]
    assert_same([expected], [answer])


def paths(answers: Sequence[Answer]) -> list[str]:
    return [report(answer)["path"] for answer in answers]


def report(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = answer["meta_info"]["impress"]
    return found
