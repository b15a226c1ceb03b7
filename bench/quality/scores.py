"""Choices, agreement, shifts and intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.quality.tasks import NORMALISED, Item

RESAMPLES = 10_000
CONFIDENCE = 0.95
# Resamples at once, which bounds memory.
_BLOCK = 500
Floats = NDArray[np.float64]


def chosen_option(task: str, item: Item, logliks: Sequence[float]) -> int:
    """Place of the most likely option, the first of equals; per byte if the task is normalised."""
    sizes = item.option_bytes if task in NORMALISED else (1,) * len(logliks)
    values = [value / max(1, size) for value, size in zip(logliks, sizes, strict=True)]
    return values.index(max(values))


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
