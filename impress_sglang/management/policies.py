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

    impress            the prefix in few bits and more where a request looks; caches by score
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from impress_sglang.config import ImpressConfig
from impress_sglang.importance.identify import H2ORule, IdentificationRule, PaperRule
from impress_sglang.importance.selection import retained_tokens
from impress_sglang.options import EXACT_BITS
from impress_sglang.tiers.rules import (
    ImportanceScore,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    ReplacementRule,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What of a stored prefix a request wants: the share of its tokens, and their bits.

    `chosen`: the request says itself which share, `bits_chosen` how many bits.
    """

    retention: float = 1.0
    bits: float = EXACT_BITS
    chosen: bool = False
    bits_chosen: bool = False


class Policy(Protocol):
    """The contract; tests/unit/test_policies.py runs it on every implementation.

    * `tokens_to_load(m, r)` is 0 (do not use the stored prefix) or between 1 and m, for a request
      with the retention r; it depends on these alone, and does not fall when m or r grows.
    * `exact(wish)` says that a request gets all of a prefix as it was computed. Only then may KVs
      loaded or computed on top be used where SGLang expects exact ones, and approximate KVs are
      never loaded.
    * `probes` says whether segments keep the keys of probe heads apart; others have codes. A store
      serves all policies that say the same.
    * `bits(wish)` says in how many bits a prefix is loaded: below `EXACT_BITS` from codes.
    * `stores` says whether computed prefixes are written to SSD.
    * `reorders` says whether stored segments are rewritten by importance.
    * `scores` says whether resident prefixes are evicted by score, too, and not by recency.
    * `replacement_rule` gives a new rule at each call; `identification_rule` a pure one, which is
      asked where exact KVs are loaded, or were computed again.
    """

    @property
    def name(self) -> str:
        """Value of `--impress-policy`."""
        ...

    @property
    def stores(self) -> bool:
        """Whether computed prefixes are written."""
        ...

    @property
    def reorders(self) -> bool:
        """Whether segments are reordered."""
        ...

    @property
    def scores(self) -> bool:
        """Whether resident prefixes are evicted by score."""
        ...

    @property
    def probes(self) -> bool:
        """Whether segments keep the keys of probe heads apart."""
        ...

    def exact(self, wish: Wish) -> bool:
        """Whether a loaded prefix is what was computed."""
        ...

    def bits(self, wish: Wish) -> float:
        """Bits per element, on average, of a loaded prefix."""
        ...

    def tokens_to_load(self, num_tokens: int, retention: float) -> int:
        """How many tokens of a stored prefix of `num_tokens` tokens each layer uses."""
        ...

    def identification_rule(self) -> IdentificationRule:
        """Which tokens these are."""
        ...

    def replacement_rule(self) -> ReplacementRule:
        """What keeps its place in the caches."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """ReComp: nothing is stored; what left the device pool is computed again."""

    name: str = "recompute"
    stores: bool = False
    reorders: bool = False
    scores: bool = False
    probes: bool = False

    def exact(self, wish: Wish) -> bool:
        """See `Policy`."""
        return True

    def bits(self, wish: Wish) -> float:
        """See `Policy`."""
        return EXACT_BITS

    def tokens_to_load(self, num_tokens: int, retention: float) -> int:
        """See `Policy`."""
        return 0

    def identification_rule(self) -> IdentificationRule:
        """See `Policy`; never asked."""
        return H2ORule()

    def replacement_rule(self) -> ReplacementRule:
        """See `Policy`; never asked."""
        return LeastRecentlyUsed()


@dataclasses.dataclass(frozen=True, slots=True)
class WholePrefix:
    """AS-like (AttentionStore): the whole prefix is loaded."""

    name: str = "as"
    stores: bool = True
    reorders: bool = False
    scores: bool = False
    probes: bool = False

    def exact(self, wish: Wish) -> bool:
        """See `Policy`."""
        return True

    def bits(self, wish: Wish) -> float:
        """See `Policy`."""
        return EXACT_BITS

    def tokens_to_load(self, num_tokens: int, retention: float) -> int:
        """See `Policy`."""
        return num_tokens

    def identification_rule(self) -> IdentificationRule:
        """See `Policy`; never asked."""
        return H2ORule()

    def replacement_rule(self) -> ReplacementRule:
        """See `Policy`."""
        return LeastRecentlyUsed()


@dataclasses.dataclass(frozen=True, slots=True)
class ImportantPart:
    """The important share of the prefix is loaded: AS+H2O, IMPRESS step by step, and ours.

    `codes`: from its codes.
    """

    name: str
    identification: IdentificationRule
    replacement: Callable[[], ReplacementRule]
    probes: bool = False
    reorders: bool = False
    scores: bool = False
    codes: bool = False
    stores: bool = True

    def exact(self, wish: Wish) -> bool:
        """See `Policy`."""
        return wish.retention >= 1.0 and self.bits(wish) == EXACT_BITS

    def bits(self, wish: Wish) -> float:
        """See `Policy`."""
        return wish.bits if self.codes else EXACT_BITS

    def tokens_to_load(self, num_tokens: int, retention: float) -> int:
        """See `Policy`."""
        return retained_tokens(num_tokens, retention)

    def identification_rule(self) -> IdentificationRule:
        """See `Policy`."""
        return self.identification

    def replacement_rule(self) -> ReplacementRule:
        """See `Policy`."""
        return self.replacement()


def make_policy(config: ImpressConfig) -> Policy:
    """The policy that the configuration names."""
    name = config.policy
    h2o, paper = H2ORule(), PaperRule(config.alpha)

    def score() -> ReplacementRule:
        return ImportanceScore(config.half_life)

    policies: dict[str, Policy] = {
        "recompute": Recompute(),
        "as": WholePrefix(),
        "as+h2o+lru": ImportantPart(name, h2o, LeastRecentlyUsed),
        "as+h2o+lfu": ImportantPart(name, h2o, LeastFrequentlyUsed),
        "paper+itf": ImportantPart(name, paper, LeastFrequentlyUsed, probes=True),
        "paper+itf+reorder": ImportantPart(
            name, paper, LeastFrequentlyUsed, probes=True, reorders=True
        ),
        "paper": ImportantPart(name, paper, score, probes=True, reorders=True, scores=True),
        "impress": ImportantPart(name, h2o, score, scores=True, codes=True),
    }
    return policies[name]
