"""Policies: what is stored, and how much of a stored prefix a request loads.

A policy decides counts at admission; it moves nothing. All policies share attention, I/O and
tiers, so that a difference between two servers is a difference of policy (the paper's baselines).
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from impress_sglang.config import ImpressConfig
from impress_sglang.importance.selection import retained_tokens


class Policy(Protocol):
    """The contract; tests/unit/test_policies.py runs it on every implementation.

    * `tokens_to_load(m)` is 0 (do not use the stored prefix) or between 1 and m; it depends on m
      alone, and does not fall when m grows.
    * `exact` says that it is m whenever it is not 0. Only then may KVs loaded or computed on top be
      used where SGLang expects exact ones, and approximate KVs are never loaded.
    * `stores` says whether computed prefixes are written to SSD.
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
    def exact(self) -> bool:
        """Whether a loaded prefix is always whole."""
        ...

    def tokens_to_load(self, num_tokens: int) -> int:
        """How many tokens of a stored prefix of `num_tokens` tokens each layer uses."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """ReComp: nothing is stored; what left the device pool is computed again."""

    name: str = "recompute"
    stores: bool = False
    exact: bool = True

    def tokens_to_load(self, num_tokens: int) -> int:
        """See `Policy`."""
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class WholePrefix:
    """AS-like (AttentionStore): the whole prefix is loaded."""

    name: str = "as"
    stores: bool = True
    exact: bool = True

    def tokens_to_load(self, num_tokens: int) -> int:
        """See `Policy`."""
        return num_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class ImportantPart:
    """IMPRESS: the important share `retention` of the prefix is loaded."""

    retention: float
    name: str = "impress"
    stores: bool = True

    @property
    def exact(self) -> bool:
        """True at retention 1.0."""
        return self.retention >= 1.0

    def tokens_to_load(self, num_tokens: int) -> int:
        """See `Policy`."""
        return retained_tokens(num_tokens, self.retention)


def make_policy(config: ImpressConfig) -> Policy:
    """The policy that the configuration names."""
    if config.policy == "recompute":
        return Recompute()
    if config.policy == "as":
        return WholePrefix()
    return ImportantPart(config.retention)
