"""Runs one layer of one request through probe -> select -> load.

In: the layer's queries and new keys, and the source of the stored prefix. Out: the k keys and
values per head that attention uses. Where they go (slots of a pool) is the caller's business.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from impress_sglang.importance.identify import IdentificationRule
from impress_sglang.importance.scores import column_sums
from impress_sglang.storage.layout import KVShape, Stream
from impress_sglang.transfer.source import PrefixSource


@dataclasses.dataclass(slots=True)
class LoadStats:
    """What loading one request's prefix took; times in milliseconds of wall clock."""

    layers_by_probe: int = 0
    layers_by_fallback: int = 0
    layers_whole: int = 0
    probe_ms: float = 0.0
    load_ms: float = 0.0

    @contextmanager
    def timed(self, field: str) -> Iterator[None]:
        """Add the time of the block to `field`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, field, getattr(self, field) + (time.perf_counter() - start) * 1e3)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerInputs:
    """What attention of a layer knows of a request before its prefix is loaded.

    queries [n, Hq, D] and new_keys [n, G, D] of the new tokens, resident_keys [c, G, D] of prefix
    tokens that are in the device pool; all after rotation, in the model's dtype.
    """

    queries: Tensor
    new_keys: Tensor
    resident_keys: Tensor
    scaling: float


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedLayer:
    """What attention of a layer uses of a prefix.

    keys [k, G, Dk] and values [k, G, Dv] on the source's device, row j of head h is that head's own
    j-th token; selected int64 ascending on the CPU, the tokens that any head uses.
    """

    keys: Tensor
    values: Tensor
    selected: Tensor


class PrefixLoader:
    """Loads the part of a prefix that a layer uses, by an identification rule."""

    def __init__(self, shape: KVShape, rule: IdentificationRule) -> None:
        self._shape = shape
        self._rule = rule
        self._probe = list(shape.probe_kv_heads)
        self._other = list(shape.other_kv_heads)
        self._probe_queries = _query_heads(shape, self._probe)
        self._other_queries = _query_heads(shape, self._other)

    def load(
        self, layer: int, source: PrefixSource, inputs: LayerInputs, k: int, stats: LoadStats
    ) -> LoadedLayer:
        """The k tokens of the prefix that this layer uses; all of them if k is its length.

        Raises:
            ChunkUnreadable: the source could not give a chunk.
        """
        if k == source.num_tokens:
            return self._load_whole(layer, source, stats)
        with stats.timed("load_ms"):
            (probe_keys,) = source.read(layer, [Stream.PROBE_KEYS])
        with stats.timed("probe_ms"):
            scores = self._scores(inputs, probe_keys, self._probe, self._probe_queries)
            verdict = self._rule.judge(scores, k)
        if verdict.tokens is not None:
            stats.layers_by_probe += 1
            loaded = self._load_shared(layer, source, probe_keys, verdict.tokens, stats)
        else:
            stats.layers_by_fallback += 1
            loaded = self._load_per_head(layer, source, inputs, probe_keys, scores, k, stats)
        source.note_selection(layer, loaded.selected, scores)
        return loaded

    def _load_whole(self, layer: int, source: PrefixSource, stats: LoadStats) -> LoadedLayer:
        stats.layers_whole += 1
        with stats.timed("load_ms"):
            probe, other, values = source.read(layer, list(Stream))
            source.note_whole(layer)
            everything = torch.arange(source.num_tokens)
            return LoadedLayer(self._join(probe, other), values, everything)

    def _load_shared(
        self, layer: int, source: PrefixSource, probe_keys: Tensor, tokens: Tensor, stats: LoadStats
    ) -> LoadedLayer:
        with stats.timed("load_ms"):
            selected = tokens.cpu()
            other, values = source.read(layer, [Stream.OTHER_KEYS, Stream.VALUES], selected)
            probe = probe_keys.index_select(0, tokens.to(probe_keys.device))
            return LoadedLayer(self._join(probe, other), values, selected)

    def _load_per_head(
        self,
        layer: int,
        source: PrefixSource,
        inputs: LayerInputs,
        probe_keys: Tensor,
        probe_scores: Tensor,
        k: int,
        stats: LoadStats,
    ) -> LoadedLayer:
        with stats.timed("load_ms"):
            (other_keys,) = source.read(layer, [Stream.OTHER_KEYS])
        with stats.timed("probe_ms"):
            scores = probe_scores.new_empty(self._shape.num_query_heads, source.num_tokens)
            scores[self._probe_queries] = probe_scores
            if self._other:
                scores[self._other_queries] = self._scores(
                    inputs, other_keys, self._other, self._other_queries
                )
            tokens = self._rule.fall_back(scores, self._shape.group_size, k).cpu()
        with stats.timed("load_ms"):
            selected = tokens.unique()
            (values,) = source.read(layer, [Stream.VALUES], selected)
            rows = torch.searchsorted(selected, tokens).T.to(values.device)
            heads = torch.arange(self._shape.num_kv_heads, device=values.device)
            keys = self._join(probe_keys, other_keys)
            return LoadedLayer(keys[tokens.T.to(keys.device), heads], values[rows, heads], selected)

    def _scores(
        self, inputs: LayerInputs, keys: Tensor, heads: list[int], query_heads: list[int]
    ) -> Tensor:
        return column_sums(
            inputs.queries[:, query_heads],
            keys.to(inputs.queries.device, non_blocking=True),
            inputs.resident_keys[:, heads],
            inputs.new_keys[:, heads],
            inputs.scaling,
        )

    def _join(self, probe: Tensor, other: Tensor) -> Tensor:
        """Keys of probe and other heads -> [rows, G, D] in head order."""
        joined = probe.new_empty(probe.shape[0], self._shape.num_kv_heads, probe.shape[2])
        joined[:, self._probe] = probe
        joined[:, self._other] = other
        return joined


def _query_heads(shape: KVShape, kv_heads: list[int]) -> list[int]:
    """Query heads that share the given KV heads, grouped by KV head."""
    return [h * shape.group_size + g for h in kv_heads for g in range(shape.group_size)]
