"""Identification rules: which heads are probed, and whether their vote stands for all heads.

A rule is a small object behind `IdentificationRule`; the loader asks it and never looks inside, so
that better rules can replace the paper's.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import Tensor

from impress_sglang.importance.selection import (
    mean_jaccard,
    per_head_tokens,
    similarity_threshold,
    top_tokens,
    vote,
)


def probe_kv_heads(num_query_heads: int, num_kv_heads: int, probe_heads: int) -> tuple[int, ...]:
    """The KV heads whose keys are read in full.

    Multi-head models: the first `probe_heads` heads, as in the paper (4.3). Grouped-query models:
    the first max(1, round(probe_heads * G / 32)) of G KV heads, which keeps the paper's share of
    bytes (3 of 32 heads).
    """
    if num_query_heads == num_kv_heads:
        count = min(probe_heads, num_kv_heads)
    else:
        count = min(num_kv_heads, max(1, round(probe_heads * num_kv_heads / 32)))
    return tuple(range(count))


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """What the probe heads say of a layer.

    `tokens` is int64 [k], ascending, when one set serves all heads; None when the layer must fall
    back to a set per KV head.
    """

    similarity: float
    threshold: float
    tokens: Tensor | None


class IdentificationRule(Protocol):
    """Decides which tokens of a prefix a layer uses.

    Implementations must be pure: same scores, same answer; and must return exactly `k` distinct
    tokens in [0, m) per set.
    """

    def judge(self, probe_scores: Tensor, k: int) -> ProbeVerdict:
        """Judge a layer by the scores [Hp, m] of the query heads that share the probe KV heads."""
        ...

    def fall_back(self, scores: Tensor, group_size: int, k: int) -> Tensor:
        """Tokens of each KV head, int64 [G, k] ascending, from the scores [Hq, m] of all heads."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PaperRule:
    """IMPRESS 4.3: vote if the probe heads' sets are more alike than t = j**alpha, else H2O."""

    alpha: float

    def judge(self, probe_scores: Tensor, k: int) -> ProbeVerdict:
        """See `IdentificationRule.judge`."""
        num_tokens = probe_scores.shape[1]
        sets = top_tokens(probe_scores, k)
        similarity = mean_jaccard(sets, num_tokens)
        threshold = similarity_threshold(k, num_tokens, self.alpha)
        agreed = similarity > threshold or sets.shape[0] == 1
        return ProbeVerdict(similarity, threshold, vote(probe_scores, sets, k) if agreed else None)

    def fall_back(self, scores: Tensor, group_size: int, k: int) -> Tensor:
        """See `IdentificationRule.fall_back`."""
        return per_head_tokens(scores, group_size, k)


@dataclasses.dataclass(frozen=True, slots=True)
class H2ORule:
    """The AS+H2O baselines of the paper: all keys are read, each KV head takes its own top k."""

    def judge(self, probe_scores: Tensor, k: int) -> ProbeVerdict:
        """See `IdentificationRule.judge`; always falls back."""
        return ProbeVerdict(0.0, 1.0, None)

    def fall_back(self, scores: Tensor, group_size: int, k: int) -> Tensor:
        """See `IdentificationRule.fall_back`."""
        return per_head_tokens(scores, group_size, k)
