"""Runs one layer of one request through probe -> select -> load.

In: the layer's queries and new keys, and the source of the stored prefix. Out: the k keys and
values per head that attention uses, in the slots that the caller names.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from impress_sglang.importance.selectors import TokenSelector
from impress_sglang.storage.layout import KVShape
from impress_sglang.tiers.fence import to_device
from impress_sglang.transfer.scoring import Scorer, scorer_for
from impress_sglang.transfer.slots import LayerSlots, Slots, head_index
from impress_sglang.transfer.source import PrefixSource


@dataclasses.dataclass(slots=True)
class LoadStats:
    """What loading one request's prefix took, and attention; milliseconds of wall clock.

    `layers_by_fallback` read all keys; `layers_by_probe` chose their tokens without that.
    """

    layers_by_probe: int = 0
    layers_by_fallback: int = 0
    layers_whole: int = 0
    probe_ms: float = 0.0
    load_ms: float = 0.0
    attention_ms: float = 0.0

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

    queries [n, Hq, D] and new_keys [n, G, D] of the new tokens, resident_keys [c, G, D] of the
    resident tokens; all after rotation, in the model's dtype. If resident_rows, int64 [c], is set,
    resident_keys is a pool, and these are the rows of the resident tokens in it.
    """

    queries: Tensor
    new_keys: Tensor
    resident_keys: Tensor
    scaling: float
    resident_rows: Tensor | None = None


class PrefixLoader:
    """Loads the tokens of a prefix that a layer uses, as an identification rule selects them."""

    def __init__(self, shape: KVShape, rule: TokenSelector, scorer: Scorer | None = None) -> None:
        """`scorer`: None for the one that fits the device of the queries."""
        self._shape = shape
        self._rule = rule
        self._scorer = scorer

    def load(
        self,
        layer: int,
        source: PrefixSource,
        inputs: LayerInputs,
        slots: LayerSlots,
        stats: LoadStats,
    ) -> Tensor:
        """Fill slots with the tokens of the prefix that this layer uses, one for each slot.

        Row j of a head gets that head's own j-th token.

        Returns:
            int64 [head groups, u] on the CPU, ascending: the tokens that the heads of each head
            group use.

        Raises:
            PrefixUnreadable: the source could not give a chunk; what is in the slots is undefined.
        """
        k = len(slots)
        if k == source.num_tokens:
            stats.layers_whole += 1
            with stats.timed("load_ms"):
                return self.load_whole(layer, source, slots)
        if self._scorer is None:
            self._scorer = scorer_for(inputs.queries.device)
        evidence = LayerEvidence(self._shape, layer, source, inputs, stats, self._scorer)
        began, loading = time.perf_counter(), stats.load_ms
        tokens = self._rule.select(evidence, k)
        # Time that the rule spent reading is counted as loading.
        stats.probe_ms += (time.perf_counter() - began) * 1e3 - (stats.load_ms - loading)
        if evidence.all_keys is None:
            stats.layers_by_probe += 1
        else:
            stats.layers_by_fallback += 1
        with stats.timed("load_ms"):
            selected = self._load_tokens(layer, source, tokens, evidence, slots)
        source.note_selection(layer, selected, evidence.scores)
        return selected

    def load_whole(self, layer: int, source: PrefixSource, slots: LayerSlots) -> Tensor:
        """Fill slots with all tokens of the prefix; see `load`."""
        shape = self._shape
        if shape.probe_kv_heads:
            slots.keys.only(shape.probe_kv_heads).put(source.read_probe(layer))
        source.read(layer, None, keys=slots.keys.only(shape.other_kv_heads), values=slots.values)
        source.note_whole(layer)
        return torch.arange(source.num_tokens).expand(shape.num_head_groups, -1)

    def _load_tokens(
        self,
        layer: int,
        source: PrefixSource,
        sets: Tensor,
        evidence: LayerEvidence,
        slots: LayerSlots,
    ) -> Tensor:
        """Load the sets [1, k] or [G, k]; returns the tokens [head groups, u] of head groups."""
        shape = self._shape
        if shape.num_head_groups >= len(sets):
            selected = sets.expand(shape.num_head_groups, -1)
            self._fill(layer, source, selected, evidence, slots)
            return selected
        # A head group with several heads loads what any of its heads uses.
        selected = sets.unique()[None]
        union = LayerSlots.fresh(selected.shape[1], shape, slots.values.pool.device)
        self._fill(layer, source, selected, evidence, union)
        for own, found in ((slots.keys, union.keys), (slots.values, union.values)):
            own.put(_pick(found.pool, sets, selected[0]))
        return selected

    def _fill(
        self,
        layer: int,
        source: PrefixSource,
        selected: Tensor,
        evidence: LayerEvidence,
        slots: LayerSlots,
    ) -> None:
        """Load the tokens [head groups, u]; keys that the rule has read are not read again."""
        shape, everything = self._shape, evidence.all_keys
        others = slots.keys.only(shape.other_kv_heads) if everything is None else None
        source.read(layer, selected, keys=others, values=slots.values)
        if everything is not None:
            slots.keys.put(rows_of_head_groups(everything, selected))
        elif shape.probe_kv_heads:
            probe = rows_of_head_groups(evidence.probe_keys, selected)
            slots.keys.only(shape.probe_kv_heads).put(probe)


class LayerEvidence:
    """Reads and scores a layer's keys on demand; see `importance.selectors.Evidence`."""

    def __init__(
        self,
        shape: KVShape,
        layer: int,
        source: PrefixSource,
        inputs: LayerInputs,
        stats: LoadStats,
        scorer: Scorer,
    ) -> None:
        self.layer = layer
        self.num_tokens = source.num_tokens
        self.group_size = shape.group_size
        self.all_keys: Tensor | None = None
        """[m, G, Dk]; None until they are read."""
        self.scores: Tensor | None = None
        """The scores that were computed last."""
        self._scorer = scorer
        self._probe_keys: Tensor | None = None
        self._probe_scores: Tensor | None = None
        self._shape = shape
        self._source = source
        self._inputs = inputs
        self._stats = stats

    @property
    def probe_keys(self) -> Tensor:
        """[m, probe heads, Dk] on the queries' device; see `PrefixSource.read_probe`."""
        if self._probe_keys is None:
            with self._stats.timed("load_ms"):
                probe = self._source.read_probe(self.layer)
                self._probe_keys = probe.to(self._inputs.queries.device)
        return self._probe_keys

    def probe_scores(self) -> Tensor:
        """See `Evidence.probe_scores`."""
        if self._probe_scores is None:
            heads = self._shape.probe_kv_heads
            self._probe_scores = self._column_sums(self.probe_keys, heads)
            self.scores = self._probe_scores
        return self._probe_scores

    def exact_scores(self) -> Tensor:
        """See `Evidence.exact_scores`; probe heads that were scored are not scored again."""
        shape = self._shape
        probe = self.probe_keys if shape.probe_kv_heads else None
        with self._stats.timed("load_ms"):
            others = self._read_others()
            self.all_keys = others if probe is None else join_keys(shape, probe, others)
        if probe is None:
            self.scores = self._column_sums(self.all_keys, range(shape.num_kv_heads))
            return self.scores
        scores = self.probe_scores().new_empty(shape.num_query_heads, self.num_tokens)
        scores[self._query_heads(shape.probe_kv_heads)] = self.probe_scores()
        if shape.other_kv_heads:
            other_queries = self._query_heads(shape.other_kv_heads)
            scores[other_queries] = self._column_sums(others, shape.other_kv_heads)
        self.scores = scores
        return scores

    def _read_others(self) -> Tensor:
        """All keys [m, heads, Dk] of the heads that the probe column does not have."""
        shape = self._shape
        like = torch.empty(0, dtype=shape.dtype, device=self._inputs.queries.device)
        slots = Slots.fresh(self.num_tokens, len(shape.other_kv_heads), shape.key_dim, like)
        self._source.read(self.layer, None, keys=slots)
        return slots.pool

    def _column_sums(self, keys: Tensor, kv_heads: Sequence[int]) -> Tensor:
        inputs, heads = self._inputs, tuple(kv_heads)
        queries = inputs.queries
        if len(heads) < self._shape.num_kv_heads:
            queries = queries[:, self._query_heads(heads)]
        return self._scorer.column_sums(
            queries,
            keys,
            inputs.resident_keys,
            inputs.new_keys,
            heads,
            inputs.scaling,
            resident_rows=inputs.resident_rows,
        )

    def _query_heads(self, kv_heads: Sequence[int]) -> Tensor:
        """Query heads that share the given KV heads, grouped by KV head, on the queries' device."""
        size = self._shape.group_size
        heads = tuple(h * size + g for h in kv_heads for g in range(size))
        return head_index(heads, self._inputs.queries.device)


def rows_of_head_groups(whole: Tensor, tokens: Tensor) -> Tensor:
    """Pick the rows of tokens [head groups, k] from those of all tokens [m, G, D]: [k, G, D]."""
    index = to_device(tokens, whole.device)
    if len(tokens) == 1:
        return whole.index_select(0, index[0])
    heads = torch.arange(whole.shape[1], device=whole.device)
    return whole[index.T, heads]


def join_keys(shape: KVShape, probe: Tensor, other: Tensor) -> Tensor:
    """Join the keys of probe and of other heads to [rows, G, D], in the order of the heads."""
    joined = probe.new_empty(probe.shape[0], shape.num_kv_heads, probe.shape[2])
    joined[:, head_index(shape.probe_kv_heads, probe.device)] = probe
    joined[:, head_index(shape.other_kv_heads, probe.device)] = other
    return joined


def _pick(rows: Tensor, sets: Tensor, known: Tensor) -> Tensor:
    """Pick each head's set of tokens [G, k] from rows [u, G, D] of the tokens `known` [u]."""
    position = to_device(torch.searchsorted(known, sets), rows.device).T
    heads = torch.arange(rows.shape[1], device=rows.device)
    return rows[position, heads]
