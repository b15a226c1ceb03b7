"""Identification rules: which tokens of a prefix a layer uses.

A rule is a small object behind `IdentificationRule`; the loader asks it and never looks inside. It
decides on what evidence it asks for: scores from the probe stream, or from all keys, or none.
docs/identification.md compares them.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from impress_sglang.importance.selection import (
    agreed_tokens,
    own_tokens,
    similarity_threshold,
)

# Tokens at the start of a sequence that the baselines keep.
SINK_TOKENS = 4


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
    """What a rule may ask of a layer; asking costs a read and a matrix product, once.

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
        """[Hp, m], of the query heads that the probe stream has keys for."""
        ...

    def exact_scores(self) -> Tensor:
        """[Hq, m], of all query heads; reads all keys."""
        ...


class IdentificationRule(Protocol):
    """The contract; tests/unit/test_identify.py runs it on every implementation.

    Implementations must be pure: same evidence, same answer. `evidence` says what they ask for
    first: probe (the probe stream), keys (all keys) or nothing.
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


def stored_probe(
    rule: str, num_query_heads: int, num_kv_heads: int, *, probe_heads: int, sketch_bits: int
) -> tuple[tuple[int, ...], int]:
    """What a store keeps for `--impress-identify`: probe KV heads, and bits of a sketch (or 0).

    Baselines that look at nothing use the sketch's layout, in which each head has its own streams.
    """
    if rule == "paper":
        return probe_kv_heads(num_query_heads, num_kv_heads, probe_heads), 0
    return (), sketch_bits


@dataclasses.dataclass(frozen=True, slots=True)
class PaperRule:
    """IMPRESS 4.3: vote if the probe heads' sets are more alike than t = j**alpha, else H2O."""

    alpha: float

    evidence: ClassVar[str] = "probe"

    def select(self, evidence: Evidence, k: int) -> Tensor:
        """See `IdentificationRule.select`."""
        threshold = similarity_threshold(k, evidence.num_tokens, self.alpha)
        agreed = agreed_tokens(evidence.probe_scores(), k, threshold)
        if agreed is not None:
            return agreed[None]
        return own_tokens(evidence.exact_scores(), evidence.group_size, k)


@dataclasses.dataclass(frozen=True, slots=True)
class SketchRule:
    """Each KV head takes its own top k by the scores of sketched keys of all heads."""

    evidence: ClassVar[str] = "probe"

    def select(self, evidence: Evidence, k: int) -> Tensor:
        """See `IdentificationRule.select`."""
        return own_tokens(evidence.probe_scores(), evidence.group_size, k)


@dataclasses.dataclass(frozen=True, slots=True)
class H2ORule:
    """The AS+H2O baselines of the paper: all keys are read, each KV head takes its own top k."""

    evidence: ClassVar[str] = "keys"

    def select(self, evidence: Evidence, k: int) -> Tensor:
        """See `IdentificationRule.select`."""
        return own_tokens(evidence.exact_scores(), evidence.group_size, k)


@dataclasses.dataclass(frozen=True, slots=True)
class RecentRule:
    """A baseline that looks at nothing: the first `SINK_TOKENS` tokens and the last ones.

    Without the first ones, on which attention rests, answers collapse (StreamingLLM,
    https://arxiv.org/abs/2309.17453).
    """

    evidence: ClassVar[str] = "nothing"

    def select(self, evidence: Evidence, k: int) -> Tensor:
        """See `IdentificationRule.select`."""
        sinks = min(SINK_TOKENS, k)
        recent = torch.arange(evidence.num_tokens - (k - sinks), evidence.num_tokens)
        return torch.cat([torch.arange(sinks), recent])[None]


@dataclasses.dataclass(frozen=True, slots=True)
class RandomRule:
    """The negative control: random tokens, the same for the same layer and length.

    With `sinks` the first `SINK_TOKENS` tokens are among them.
    """

    sinks: bool

    evidence: ClassVar[str] = "nothing"

    def select(self, evidence: Evidence, k: int) -> Tensor:
        """See `IdentificationRule.select`."""
        num_tokens = evidence.num_tokens
        generator = torch.Generator().manual_seed(evidence.layer * 1_000_003 + num_tokens)
        order = torch.randperm(num_tokens, generator=generator)
        if self.sinks:
            order = torch.cat([torch.arange(min(SINK_TOKENS, k)), order[order >= SINK_TOKENS]])
        return order[:k].sort().values[None]


def make_rule(name: str, alpha: float) -> IdentificationRule:
    """The rule that `--impress-identify` names; `alpha` is the paper's exponent."""
    rules: dict[str, IdentificationRule] = {
        "sketch": SketchRule(),
        "paper": PaperRule(alpha),
        "recent": RecentRule(),
        "random": RandomRule(sinks=True),
        "random-nosink": RandomRule(sinks=False),
    }
    return rules[name]
