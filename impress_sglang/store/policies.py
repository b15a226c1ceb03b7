"""Policies: what is stored, how much of a prefix is used, and what keeps its place in the caches.

A policy decides; it moves nothing. All policies share attention, I/O, tiers and admission, so that
a difference between two servers is a difference of policy. All but `impress*` are the paper's
systems (6.1, 6.3); `as+h2o` loads all keys and important values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from impress_sglang.config import AUTO, AUTO_SHARE, EXACT_BITS, OFF, ImpressConfig
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
    """What one value of `--impress-policy` stands for."""

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

    def bits(self, wanted: LoadOptions) -> float:
        """Bits per element, on average, of a loaded prefix; below `EXACT_BITS`: from codes."""
        return wanted.bits if self.codes else EXACT_BITS


def make_policy(config: ImpressConfig) -> Policy:
    """The policy that the configuration names."""
    score = functools.partial(ImportanceScore, config.half_life)
    policies = (
        Policy("recompute", stores=False),
        Policy("as"),
        Policy("as+h2o+lru"),
        Policy("as+h2o+lfu", LeastFrequentlyUsed),
        Policy("paper+itf", LeastFrequentlyUsed, probes=True),
        Policy("paper+itf+reorder", LeastFrequentlyUsed, probes=True, reorders=True),
        Policy("paper", score, probes=True, reorders=True),
        Policy("impress+lru", codes=True),
        Policy("impress+lfu", LeastFrequentlyUsed, codes=True),
        Policy("impress", score, codes=True),
    )
    return next(policy for policy in policies if policy.name == config.policy)
