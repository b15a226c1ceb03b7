"""Identification rules: which tokens of a prefix a layer uses.

A rule is a small object behind `TokenSelector`; the loader asks it and never looks inside. The rule
decides which evidence it asks for: scores from the probe column, or from all keys.
docs/design.md (Parts of prefixes) has the rules.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

from torch import Tensor

from impress_sglang.importance.selection import (
    agreed_tokens,
    own_tokens,
    similarity_threshold,
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


class Evidence(Protocol):
    """What a rule may ask about a layer; each kind of scores costs a read and a product, once.

    Scores are importance, float32, in the order of the query heads.
    """

    @property
    def layer(self) -> int:
        """Number of the layer."""
        ...

    @property
    def num_tokens(self) -> int:
        """m, tokens of the prefix."""
        ...

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        ...

    def probe_scores(self) -> Tensor:
        """Scores [Hp, m] of the query heads that the probe column has keys for."""
        ...

    def exact_scores(self) -> Tensor:
        """Scores [Hq, m] of all query heads; reads all keys."""
        ...


class TokenSelector(Protocol):
    """The contract; tests/unit/test_selectors.py runs it on every implementation.

    Implementations must be pure: same evidence, same answer. `evidence` is what they ask for
    first: probe (the probe column) or keys (all keys).
    """

    @property
    def evidence(self) -> str:
        """What the rule asks for first."""
        ...

    def select(self, evidence: Evidence, k: int) -> Tensor:
        """The tokens that a layer uses.

        Returns:
            int64 on the CPU, ascending and distinct in each row, in [0, m): [1, k] if one set
            serves all heads, else [G, k], a set per KV head.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PaperSelector:
    """IMPRESS 4.3: vote if the probe heads' sets are more alike than t = j**alpha, else H2O."""

    alpha: float

    evidence: ClassVar[str] = "probe"

    def select(self, evidence: Evidence, k: int) -> Tensor:
        """See `TokenSelector.select`."""
        threshold = similarity_threshold(k, evidence.num_tokens, self.alpha)
        agreed = agreed_tokens(evidence.probe_scores(), k, threshold)
        if agreed is not None:
            return agreed[None]
        return own_tokens(evidence.exact_scores(), evidence.group_size, k)


@dataclasses.dataclass(frozen=True, slots=True)
class H2OSelector:
    """The AS+H2O baselines of the paper: all keys are read, each KV head takes its own top k."""

    evidence: ClassVar[str] = "keys"

    def select(self, evidence: Evidence, k: int) -> Tensor:
        """See `TokenSelector.select`."""
        return own_tokens(evidence.exact_scores(), evidence.group_size, k)
