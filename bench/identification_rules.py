"""Identification rules that are only compared, and what all compared rules are asked with.

The rules that the server has come from `impress_sglang.importance.identify` and run here as they
are. The others need what a server would have to keep or to know: earlier questions about the same
prefix, all keys, or the values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from impress_sglang.importance.identify import Evidence, IdentificationRule
from impress_sglang.importance.selection import (
    mean_jaccard,
    per_head_tokens,
    similarity_threshold,
    top_tokens,
    vote,
)

# Of the probe's surprise in a blend: weight, and how fast it follows from layer to layer.
SURPRISE_WEIGHT = 0.75
SURPRISE_SMOOTHING = 0.7
_LEAST_WEIGHT = 1e-9
# Tokens at the start of a sequence that the baselines keep.
SINK_TOKENS = 4


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


class History:
    """Mean log importance of each token at earlier questions about a prefix: [L, G, m]."""

    def __init__(self) -> None:
        self.questions = 0
        self._sums: Tensor | None = None

    def add(self, log_importance: Tensor) -> None:
        """Take in a question, [L, G, m]."""
        self.questions += 1
        self._sums = log_importance if self._sums is None else self._sums + log_importance

    def prior(self, layer: int) -> Tensor:
        """[G, m]; there must have been a question."""
        assert self._sums is not None
        return self._sums[layer] / self.questions


@dataclasses.dataclass(slots=True)
class LayerView:
    """One layer at one question: `Evidence` for the server's rules, and more for others.

    `weights` [Hq, n, m] are the exact attention weights that the new tokens give to the prefix;
    `sketched` [Hq, m] the scores by sketched keys, by bits; `value_norms` [G, m]. `surprise` [m] is
    how much more important than usual the tokens are to KV head 0, over the layers so far.
    """

    layer: int
    num_tokens: int
    group_size: int
    probe_kv_heads: tuple[int, ...]
    weights: Tensor
    sketched: dict[int, Tensor]
    value_norms: Tensor
    history: History
    surprise: Tensor | None = None

    def probe_scores(self) -> Tensor:
        """Scores [Hp, m] of the query heads of the probe KV heads."""
        return self.group_scores(self.probe_kv_heads)

    def exact_scores(self) -> Tensor:
        """Scores [Hq, m] of all query heads."""
        return self.weights.sum(1)

    def group_scores(self, kv_heads: tuple[int, ...]) -> Tensor:
        """Scores of the query heads of some KV heads."""
        by_group = self.exact_scores().view(-1, self.group_size, self.num_tokens)
        return by_group[list(kv_heads)].flatten(0, 1)

    def own_scores(self) -> Tensor:
        """Scores [G, m] of the KV heads: of each, the sum over its query heads."""
        return self.exact_scores().view(-1, self.group_size, self.num_tokens).sum(1)


class StudiedRule(Protocol):
    """Tokens that a layer uses, [1, k] or [G, k], and what finding them reads."""

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `IdentificationRule.select`."""
        ...

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """Bytes read beside the selected KVs, as a share of the layer's KVs of the prefix."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ServerRule:
    """A rule of the server on the exact scores of the probe heads, or of all heads."""

    rule: IdentificationRule

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `StudiedRule.select`."""
        return self.rule.select(view, k)

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """See `StudiedRule.extra_bytes`."""
        return _vote_bytes(view, k, tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Probing:
    """The paper's rule with other probe KV heads."""

    rule: ServerRule
    kv_heads: tuple[int, ...]

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `StudiedRule.select`."""
        return self.rule.select(self._probed(view), k)

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """See `StudiedRule.extra_bytes`."""
        return self.rule.extra_bytes(self._probed(view), k, tokens)

    def _probed(self, view: LayerView) -> LayerView:
        return dataclasses.replace(view, probe_kv_heads=self.kv_heads)


@dataclasses.dataclass(frozen=True, slots=True)
class Positional:
    """A rule that reads nothing to choose."""

    rule: IdentificationRule

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `StudiedRule.select`."""
        return self.rule.select(view, k)

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """See `StudiedRule.extra_bytes`."""
        return 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class CalibratedVote:
    """The paper's vote, with a threshold per layer instead of j**alpha.

    `thresholds` are similarities by share of tokens and layer; below, a layer reads all keys.
    """

    thresholds: dict[float, list[float]]

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `StudiedRule.select`."""
        scores = view.probe_scores()
        sets = top_tokens(scores, k)
        if mean_jaccard(sets, view.num_tokens) >= self._threshold(view, k):
            return vote(scores, sets, k)[None]
        return per_head_tokens(view.exact_scores(), view.group_size, k)

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """See `StudiedRule.extra_bytes`."""
        return _vote_bytes(view, k, tokens)

    def _threshold(self, view: LayerView, k: int) -> float:
        share = min(self.thresholds, key=lambda ratio: abs(ratio - k / view.num_tokens))
        return self.thresholds[share][view.layer]


@dataclasses.dataclass(frozen=True, slots=True)
class SpreadVote:
    """The paper's rule with one probe query head of each KV head: all keys are read."""

    alpha: float

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `StudiedRule.select`."""
        scores = view.exact_scores()[:: view.group_size]
        sets = top_tokens(scores, k)
        threshold = similarity_threshold(k, view.num_tokens, self.alpha)
        if mean_jaccard(sets, view.num_tokens) > threshold:
            return vote(scores, sets, k)[None]
        return per_head_tokens(view.exact_scores(), view.group_size, k)

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """See `StudiedRule.extra_bytes`."""
        return 0.5 * (1 - k / view.num_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Prior:
    """Each KV head takes what was important to it at earlier questions: the query is not asked."""

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `StudiedRule.select`."""
        return top_tokens(view.history.prior(view.layer), k)

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """See `StudiedRule.extra_bytes`."""
        return 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Blend:
    """The prior of each KV head, moved by how much this query surprises the probe head."""

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `StudiedRule.select`; the probe head itself has its exact scores."""
        assert view.surprise is not None
        blend = view.history.prior(view.layer) + SURPRISE_WEIGHT * view.surprise
        probe = view.probe_kv_heads[0]
        blend[probe] = view.own_scores()[probe]
        return top_tokens(blend, k)

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """See `StudiedRule.extra_bytes`."""
        return 0.5 * (1 - k / view.num_tokens) / len(view.value_norms)


@dataclasses.dataclass(frozen=True, slots=True)
class Sketch:
    """Each head's own top k by keys of so many bits, with a change to the scores, if any.

    `element_bits` are those of the KVs; `change` maps scores [G, m] to scores.
    """

    bits: int
    element_bits: int
    change: Callable[[LayerView, Tensor], Tensor] | None = None

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `StudiedRule.select`."""
        scores = view.sketched[self.bits].view(-1, view.group_size, view.num_tokens).sum(1)
        return top_tokens(scores if self.change is None else self.change(view, scores), k)

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """See `StudiedRule.extra_bytes`."""
        return 0.5 * self.bits / self.element_bits


@dataclasses.dataclass(frozen=True, slots=True)
class Exact:
    """H2O with another measure of importance: `score` gives [G, m]."""

    score: Callable[[LayerView], Tensor]

    def select(self, view: LayerView, k: int) -> Tensor:
        """See `StudiedRule.select`."""
        return top_tokens(self.score(view), k)

    def extra_bytes(self, view: LayerView, k: int, tokens: Tensor) -> float:
        """See `StudiedRule.extra_bytes`."""
        return 0.5 * (1 - k / view.num_tokens)


def last_tokens(count: int) -> Callable[[LayerView], Tensor]:
    """Importance to the last `count` new tokens alone."""

    def score(view: LayerView) -> Tensor:
        summed = view.weights[:, -count:].sum(1)
        return summed.view(-1, view.group_size, view.num_tokens).sum(1)

    return score


def largest_weight(view: LayerView) -> Tensor:
    """The largest weight that any new token gives, instead of the sum."""
    return view.weights.amax(1).view(-1, view.group_size, view.num_tokens).sum(1)


def by_value_norm(view: LayerView) -> Tensor:
    """Importance times the length of the value."""
    return view.own_scores() * view.value_norms


def pooled(width: int) -> Callable[[LayerView], Tensor]:
    """Importance averaged over neighbours, as SnapKV does (https://arxiv.org/abs/2404.14469)."""

    def score(view: LayerView) -> Tensor:
        scores = view.own_scores()[None]
        return functional.avg_pool1d(scores, width, 1, width // 2, count_include_pad=False)[0]

    return score


def with_prior(view: LayerView, scores: Tensor) -> Tensor:
    """Sketched scores blended with the prior, both as logarithms."""
    return log_importance(scores, view.weights.shape[1]) + view.history.prior(view.layer)


def keeping_last(count: int) -> Callable[[LayerView, Tensor], Tensor]:
    """The last `count` tokens of the prefix are always kept."""

    def change(view: LayerView, scores: Tensor) -> Tensor:
        kept = scores.clone()
        kept[:, view.num_tokens - count :] = math.inf
        return kept

    return change


def log_importance(scores: Tensor, num_new: int) -> Tensor:
    """Logarithm of the mean weight per new token."""
    return (scores / num_new).clamp_min(_LEAST_WEIGHT).log()


def follow_surprise(previous: Tensor | None, view: LayerView) -> Tensor:
    """The surprise [m] of the first probe head in this layer, smoothed over the layers before."""
    probe = view.probe_kv_heads[0]
    own = log_importance(view.own_scores()[probe], view.weights.shape[1])
    surprise = own - view.history.prior(view.layer)[probe]
    if previous is None:
        return surprise
    return SURPRISE_SMOOTHING * previous + (1 - SURPRISE_SMOOTHING) * surprise


def _vote_bytes(view: LayerView, k: int, tokens: Tensor) -> float:
    """A set per head is a fallback, or H2O: all keys. One set is the probe heads' vote."""
    unselected = 1 - k / view.num_tokens
    num_heads = len(view.value_norms)
    return unselected * (0.5 if len(tokens) > 1 else 0.5 * len(view.probe_kv_heads) / num_heads)
