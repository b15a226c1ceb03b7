"""Policies: what is stored, how much of a prefix is used, and what keeps its place in the caches.

A policy decides; it moves nothing. All policies share attention, I/O, tiers and admission, so that
a difference between two servers is a difference of policy. They are the paper's systems (6.1, 6.3):

    recompute          nothing stored
    as                 whole prefix, LRU            AttentionStore-like
    as+h2o+lru         all keys, important values, LRU
    as+h2o+lfu         the same with LFU
    paper+itf          the keys of probe heads tell the important part; LFU
    paper+itf+reorder  the same, segments reordered
    paper              the same, caches by score    IMPRESS

and ours:

    impress+lru        the prefix in few bits; LRU
    impress+lfu        the same with LFU
    impress            the same, caches by score
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from impress_sglang.config import ImpressConfig
from impress_sglang.options import AUTO, AUTO_SHARE, EXACT_BITS, OFF
from impress_sglang.tiers.rules import (
    ImportanceScore,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    ReplacementRule,
)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a request wants of a stored prefix: the share of its tokens, and their bits.

    `chosen`: the request itself has set the share. `auto_bits`: `bits` are the least, and more are
    welcome. `blend`: how much of reused text that is no prefix is computed again: a share, `AUTO`,
    or `OFF` for no reuse.
    """

    retention: float = 1.0
    bits: float = EXACT_BITS
    chosen: bool = False
    auto_bits: bool = False
    blend: float | str = OFF

    @property
    def share(self) -> float:
        """The least share of text reused behind other text that must have been computed again."""
        if self.blend == OFF:
            return 1.0
        return AUTO_SHARE if self.blend == AUTO else float(self.blend) + 0.0  # never -0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What one value of `--impress-policy` stands for.

    Only for an `exact` request may loaded KVs, and those computed after them, be used where SGLang
    expects exact ones, and it never loads approximate KVs. tests/unit/test_policies.py tests what
    all policies have in common.
    """

    name: str
    replacement: Callable[[], ReplacementRule] = LeastRecentlyUsed
    """Makes the rule for what stays in the caches, a new one at each call."""
    stores: bool = True
    """Whether computed prefixes are written to SSD."""
    codes: bool = False
    """Whether prefixes are loaded from codes."""
    probes: bool = False
    """Whether segments keep the keys of probe heads apart."""
    reorders: bool = False
    """Whether stored segments are rewritten by importance."""
    scores: bool = False
    """Whether resident prefixes are evicted by score as well, instead of by recency."""

    def exact(self, wanted: LoadOptions) -> bool:
        """Whether a request gets all of a prefix as it was computed."""
        return wanted.retention >= 1.0 and self.bits(wanted) == EXACT_BITS

    def bits(self, wanted: LoadOptions) -> float:
        """Bits per element, on average, of a loaded prefix; below `EXACT_BITS`: from codes."""
        return wanted.bits if self.codes else EXACT_BITS


def make_policy(config: ImpressConfig) -> Policy:
    """The policy that the configuration names."""

    def score() -> ReplacementRule:
        return ImportanceScore(config.half_life)

    policies = (
        Policy("recompute", stores=False),
        Policy("as"),
        Policy("as+h2o+lru"),
        Policy("as+h2o+lfu", LeastFrequentlyUsed),
        Policy("paper+itf", LeastFrequentlyUsed, probes=True),
        Policy("paper+itf+reorder", LeastFrequentlyUsed, probes=True, reorders=True),
        Policy("paper", score, probes=True, reorders=True, scores=True),
        Policy("impress+lru", codes=True),
        Policy("impress+lfu", LeastFrequentlyUsed, codes=True),
        Policy("impress", score, codes=True, scores=True),
    )
    return next(policy for policy in policies if policy.name == config.policy)
