"""Scores of answers, and intervals of their means.

An answer's score is 0 or 1 (the right option, the right final answer) or an F1 between them; its
choice is what agreement compares: the place of the option, or the generated text.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.quality.client import Answer
from bench.quality.tasks import Item, Task

RESAMPLES = 10_000
CONFIDENCE = 0.95
# Resamples at once, which bounds memory.
_BLOCK = 500
Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Score of an answer, whether it matches exactly, and what was chosen."""

    value: float
    exact: bool
    choice: int | str


def score(task: Task, item: Item, answer: Answer) -> Score:
    """Score one answer."""
    if not task.generates:
        place = chosen_option(task, item, answer.logliks)
        right = place == item.gold
        return Score(float(right), right, place)
    if task.name == "squad-f1":
        pairs = [(answer.text, reference) for reference in item.references]
        return Score(
            max(f1(*pair) for pair in pairs), any(same_text(*pair) for pair in pairs), answer.text
        )
    if task.name == "bbh":
        right = final_answer(answer.text) == item.references[0].strip()
    else:
        right = last_number(answer.text) == last_number(item.references[0])
    return Score(float(right), right, answer.text)


def chosen_option(task: Task, item: Item, logliks: Sequence[float]) -> int:
    """Place of the most likely option, the first of equals; per byte if the task is normalised."""
    sizes = item.option_bytes if task.normalised else (1,) * len(logliks)
    values = [value / max(1, size) for value, size in zip(logliks, sizes, strict=True)]
    return values.index(max(values))


def normalise(text: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def same_text(text: str, reference: str) -> bool:
    """SQuAD's exact match."""
    return normalise(text) == normalise(reference)


def f1(text: str, reference: str) -> float:
    """SQuAD's F1 over words."""
    words, wanted = normalise(text).split(), normalise(reference).split()
    common = sum((Counter(words) & Counter(wanted)).values())
    if not words or not wanted:
        return float(words == wanted)
    return 2 * common / (len(words) + len(wanted))


def final_answer(text: str) -> str:
    """What follows "the answer is" on its line, without the full stop; empty if nothing does."""
    found = re.search(r"the answer is:?[ \t]*([^\n]*)", text, re.IGNORECASE)
    return found.group(1).strip().removesuffix(".") if found else ""


def last_number(text: str) -> float | None:
    """The last number of a text."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def centred_shift(
    logliks: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
) -> float:
    """Mean absolute difference of centred option log-likelihoods, in nats.

    Args:
        logliks: [n][options] of a system.
        reference: [n][options] of the same questions.
    """
    shifts = [
        float(np.abs((one - one.mean()) - (other - other.mean())).mean())
        for one, other in zip(map(np.array, logliks), map(np.array, reference), strict=True)
    ]
    return float(np.mean(shifts))


def mean_interval(strata: Sequence[Floats], seed: int) -> tuple[float, float]:
    """Bootstrap interval of the mean over strata of each stratum's mean.

    Questions are drawn with replacement within their stratum (task). Differences of two systems on
    the same questions make it a paired bootstrap. The same sizes and seed draw the same questions.

    Args:
        strata: one value per question, [n] for each stratum.
        seed: of the draws.

    Returns:
        Bounds of the central 95%.
    """
    rng = np.random.default_rng(seed)
    means = np.mean([_resampled_means(values, rng) for values in strata], axis=0)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def _resampled_means(values: Floats, rng: np.random.Generator) -> Floats:
    """Means of resampled values, [RESAMPLES]."""
    n = len(values)
    blocks = [
        values[rng.integers(0, n, (_BLOCK, n))].mean(axis=1) for _ in range(RESAMPLES // _BLOCK)
    ]
    return np.concatenate(blocks)
