"""Policies: whether prefixes are stored, how much of them is loaded, and what caches replace.

A policy only decides. All policies share attention, I/O, tiers and admission, so that a difference
between two servers is a difference of policy. All but `impress*` are the paper's systems (6.1,
6.3); `as+h2o` loads all keys and important values.
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
    """Options of a request for stored prefixes: the share of tokens to load, and their bits.

    `chosen`: whether the request itself has set the share. `auto_bits`: whether `bits` is a
    minimum, and more are welcome. `blend`: share of reused text that is recomputed where it is no
    prefix, `AUTO`, or `OFF` for no reuse.
    """

    retention: float = 1.0
    bits: float = EXACT_BITS
    chosen: bool = False
    auto_bits: bool = False
    blend: float | str = OFF

    @property
    def share(self) -> float:
        """Minimum recomputed share of text that is reused after other text."""
        if self.blend == OFF:
            return 1.0
        return AUTO_SHARE if self.blend == AUTO else float(self.blend) + 0.0  # never -0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Meaning of one value of `--impress-policy`."""

    name: str
    replacement: Callable[[], ReplacementRule] = LeastRecentlyUsed
    """Makes a new replacement rule of the caches."""
    stores: bool = True
    """Whether computed prefixes are written to SSD."""
    codes: bool = False
    """Whether prefixes are loaded from codes."""
    probes: bool = False
    """Whether segments store the keys of probe heads separately."""
    reorders: bool = False
    """Whether stored segments are rewritten by importance."""

    def bits(self, options: LoadOptions) -> float:
        """Return the average bits per element of a loaded prefix; below `EXACT_BITS`: codes."""
        return options.bits if self.codes else EXACT_BITS


def make_policy(config: ImpressConfig) -> Policy:
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
