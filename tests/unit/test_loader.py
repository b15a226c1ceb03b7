"""One layer through probe -> select -> load: which rows come back, and which bytes were read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.importance.selectors import Evidence, H2OSelector, PaperSelector, TokenSelector
from impress_sglang.storage.layout import Column, KVShape
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.slots import Slots
from impress_sglang.transfer.source import PrefixSource
from tests.unit import dense
from tests.unit import kv_factory as kv
from tests.unit.memory_source import MemorySource
from tests.unit.reading import LoadedLayer, load_layer

SHAPES = {
    "mha": kv.make_shape(query_heads=5, kv_heads=5, probe=(0, 1, 2)),
    "gqa": kv.make_shape(query_heads=12, kv_heads=4, key_dim=16, probe=(0,)),
    "gqa-apart": kv.make_shape(query_heads=8, kv_heads=4, value_dim=12, probe=(1, 3)),
    "mqa": kv.make_shape(query_heads=4, kv_heads=1, probe=(0,)),
    "all-probed": kv.make_shape(query_heads=4, kv_heads=2, probe=(0, 1)),
}
# Without probe heads: nothing can be asked of the probe column.
HEAD_GROUPS = {
    "no-probe": kv.make_shape(query_heads=6, kv_heads=3, key_dim=16, value_dim=12, probe=()),
    "no-probe-mha": kv.make_shape(query_heads=3, kv_heads=3, probe=()),
    "no-probe-mqa": kv.make_shape(query_heads=4, kv_heads=1, probe=()),
}
EVERY = SHAPES | HEAD_GROUPS
M, N, C = 60, 6, 5


@dataclasses.dataclass
class FixedRule:
    """Answers what the test says, and keeps the scores that it asks for."""

    tokens: Tensor  # [1, k] or [G, k]
    asks: Sequence[str] = ("probe",)
    evidence: str = "probe"
    probe_scores: Tensor | None = None
    scores: Tensor | None = None

    def select(self, evidence: Evidence, k: int) -> Tensor:
        assert self.tokens.shape[1] == k
        if "probe" in self.asks:
            self.probe_scores = evidence.probe_scores().clone()
        if "exact" in self.asks:
            self.scores = evidence.exact_scores().clone()
        return self.tokens


def shared(tokens: Sequence[int]) -> FixedRule:
    """One set for all heads, after a look at the probe column."""
    return FixedRule(torch.tensor([list(tokens)]))


def fallback(tokens: Tensor) -> FixedRule:
    """A set per head, after a look at everything."""
    return FixedRule(tokens, ("probe", "exact"))


class CountingSource:
    """Counts how often each row of each column is asked for, and keeps what it is told."""

    def __init__(self, source: PrefixSource, shape: KVShape) -> None:
        self._source = source
        self.num_tokens = source.num_tokens
        self.stats = source.stats
        self._shape = shape
        self.selections: list[tuple[int, list[list[int]], Tensor | None]] = []
        self.whole_layers: list[int] = []
        self.reads = {
            (layer, column): torch.zeros(self.num_tokens, dtype=torch.int64)
            for layer in range(shape.num_layers)
            for column in kv.columns_of(shape)
        }

    def read_probe(self, layer: int) -> Tensor:
        self.reads[layer, kv.PROBE] += 1
        return self._source.read_probe(layer)

    def read(
        self,
        layer: int,
        tokens: Tensor | None,
        *,
        keys: Slots | None = None,
        values: Slots | None = None,
    ) -> None:
        if tokens is not None:
            assert tokens.shape[0] == kv.head_groups_of(self._shape)
            assert tokens.device.type == "cpu"
            for own in tokens:
                assert torch.equal(own, own.unique()), "ascending and distinct"
        for column in kv.kv_of(self._shape):
            if (values if kv.holds_values(self._shape, column) else keys) is not None:
                head_group = kv.head_group_of(self._shape, column)
                own = slice(None) if tokens is None else tokens[head_group]
                self.reads[layer, column][own] += 1
        self._source.read(layer, tokens, keys=keys, values=values)

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor | None) -> None:
        scores = None if importance is None else importance.clone()
        self.selections.append((layer, selected.tolist(), scores))
        self._source.note_selection(layer, selected, importance)

    def note_whole(self, layer: int) -> None:
        self.whole_layers.append(layer)
        self._source.note_whole(layer)

    def counts(self, layer: int, column: Column) -> list[int]:
        return self.reads[layer, column].tolist()


class Setting:
    def __init__(self, shape: KVShape, num_tokens: int = M) -> None:
        self.shape = shape
        self.keys, self.values = kv.random_kvs(shape, num_tokens, seed=1)
        memory = MemorySource(shape, list(self.keys), list(self.values))
        self.source = CountingSource(memory, shape)
        queries, heads, dim = shape.num_query_heads, shape.num_kv_heads, shape.key_dim
        generator = torch.Generator().manual_seed(2)
        self.inputs = LayerInputs(
            queries=torch.randn(N, queries, dim, generator=generator),
            new_keys=torch.randn(N, heads, dim, generator=generator),
            resident_keys=torch.randn(C, heads, dim, generator=generator),
            scaling=0.5,
        )
        self.stats = LoadStats()

    def reference_scores(self, layer: int) -> np.ndarray:
        """Column sums [Hq, m] of all heads."""
        own = self.inputs
        keys = self.keys[layer], own.resident_keys, own.new_keys
        return dense.column_sums(own.queries, *keys, own.scaling)

    def probe_query_heads(self) -> list[int]:
        group = self.shape.num_query_heads // self.shape.num_kv_heads
        probed = kv.heads_of(self.shape, kv.PROBE)
        return [h for h in range(self.shape.num_query_heads) if h // group in probed]

    @property
    def head_group_heads(self) -> list[list[int]]:
        """KV heads of each head group."""
        everything = list(range(self.shape.num_kv_heads))
        return [everything] if self.shape.probe_kv_heads else [[head] for head in everything]

    def load(self, layer: int, rule: TokenSelector, k: int) -> LoadedLayer:
        return load_layer(
            PrefixLoader(self.shape, rule), layer, self.source, self.inputs, k, self.stats
        )

    def check(self, layer: int, loaded: LoadedLayer, tokens: Tensor) -> None:
        """Each head has the rows of its set, and each head group those of its heads."""
        sets = tokens.expand(self.shape.num_kv_heads, -1)
        count = sets.shape[1]
        assert loaded.keys.shape == (count, self.shape.num_kv_heads, self.shape.key_dim)
        assert loaded.values.shape == (count, self.shape.num_kv_heads, self.shape.value_dim)
        for head, own in enumerate(sets):
            assert torch.equal(loaded.keys[:, head], self.keys[layer][own, head])
            assert torch.equal(loaded.values[:, head], self.values[layer][own, head])
        assert loaded.selected.tolist() == self.selected(tokens)
        assert loaded.selected.dtype == torch.int64
        assert loaded.selected.device.type == "cpu"

    def selected(self, tokens: Tensor) -> list[list[int]]:
        """The tokens of any head of each head group."""
        sets = tokens.expand(self.shape.num_kv_heads, -1)
        return [sorted(set(sets[heads].flatten().tolist())) for heads in self.head_group_heads]


@pytest.fixture(params=SHAPES)
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(EVERY[request.param])


either = pytest.mark.parametrize("setting", EVERY, indirect=True)


@either
@pytest.mark.parametrize("layer", [0, 1])
def test_all_tokens_are_returned_exactly_and_nothing_is_probed(
    setting: Setting, layer: int
) -> None:
    """Keys of probe heads are keys, too."""
    rule = shared([0])

    loaded = setting.load(layer, rule, M)

    setting.check(layer, loaded, torch.arange(M)[None])
    assert rule.probe_scores is None
    probes = 1 if setting.shape.probe_kv_heads else 0
    assert setting.source.counts(layer, kv.PROBE) == [probes] * M
    for column in kv.kv_of(setting.shape):
        assert setting.source.counts(layer, column) == [1] * M
    assert dataclasses.replace(setting.stats, load_ms=0.0) == LoadStats(layers_whole=1)
    assert (setting.source.whole_layers, setting.source.selections) == ([layer], [])


def own_tokens(shape: KVShape, k: int) -> Tensor:
    """Another ascending set for each KV head."""
    generator = torch.Generator().manual_seed(7)
    heads = range(shape.num_kv_heads)
    return torch.stack([torch.randperm(M, generator=generator)[:k].sort().values for _ in heads])


@pytest.mark.parametrize("one_set", [False, True])
@pytest.mark.parametrize("k", [1, 9, M - 1])
@pytest.mark.parametrize("asks", [["probe"], ["exact"], ["probe", "exact"], []])
def test_each_head_gets_the_rows_of_the_rule(
    setting: Setting, k: int, asks: list[str], one_set: bool
) -> None:
    """Its own, or those of one set for all."""
    tokens = own_tokens(setting.shape, k)[: 1 if one_set else None]

    loaded = setting.load(0, FixedRule(tokens, asks), k)

    setting.check(0, loaded, tokens)
    fallen = int("exact" in asks)
    assert setting.stats.layers_by_fallback == fallen
    assert setting.stats.layers_by_probe == 1 - fallen
    assert setting.stats.layers_whole == 0


def picked(shape: KVShape, column: Column, tokens: Tensor) -> list[int]:
    """How often each row is read where the heads of its head group take these tokens."""
    heads = slice(None) if shape.probe_kv_heads else [kv.head_group_of(shape, column)]
    chosen = set(tokens[heads].flatten().tolist())
    return [int(t in chosen) for t in range(M)]


@either
@pytest.mark.parametrize("alike", [True, False])
def test_rows_are_read_that_any_head_of_a_head_group_picked(setting: Setting, alike: bool) -> None:
    """The probe column once; without probe heads each head's own k rows and no more."""
    tokens = own_tokens(setting.shape, 9)
    if alike:
        tokens = tokens[:1].expand_as(tokens)

    setting.load(1, FixedRule(tokens[:1] if alike else tokens, ()), 9)

    probes = 1 if setting.shape.probe_kv_heads else 0
    assert setting.source.counts(1, kv.PROBE) == [probes] * M
    for column in kv.kv_of(setting.shape):
        assert setting.source.counts(1, column) == picked(setting.shape, column, tokens)
        if not probes:
            assert sum(setting.source.counts(1, column)) == 9
    for column in kv.columns_of(setting.shape):
        assert not setting.source.reads[0, column].any(), "no other layer"


def test_fallback_reads_every_key_once_and_the_values_that_any_head_picked(
    setting: Setting,
) -> None:
    tokens = own_tokens(setting.shape, 9)

    setting.load(0, fallback(tokens), 9)

    assert setting.source.counts(0, kv.PROBE) == [1] * M
    for column in kv.kv_of(setting.shape):
        expected = picked(setting.shape, column, tokens)
        keys = not kv.holds_values(setting.shape, column)
        assert setting.source.counts(0, column) == ([1] * M if keys else expected)


def test_evidence_is_read_and_scored_once_however_often_it_is_asked_for(setting: Setting) -> None:
    class Doubting:
        evidence = "probe"

        def select(self, evidence: Evidence, k: int) -> Tensor:
            assert (evidence.layer, evidence.num_tokens) == (1, M)
            group = setting.shape.num_query_heads // setting.shape.num_kv_heads
            assert evidence.group_size == group
            assert torch.equal(evidence.probe_scores(), evidence.probe_scores())
            return torch.arange(k)[None]

    setting.load(1, Doubting(), 5)

    assert setting.source.counts(1, kv.PROBE) == [1] * M


@pytest.mark.parametrize("mode", ["shared", "fallback"])
def test_source_is_told_what_was_selected_and_by_which_scores(setting: Setting, mode: str) -> None:
    """Once a layer: the tokens of each head group, and the newest scores asked for."""
    tokens = own_tokens(setting.shape, 5)
    rule = shared(tokens[0].tolist()) if mode == "shared" else fallback(tokens)

    for layer in (0, 1):
        loaded = setting.load(layer, rule, 5)

        assert len(setting.source.selections) == layer + 1
        told_layer, selected, scores = setting.source.selections[-1]
        assert told_layer == layer
        assert selected == loaded.selected.tolist()
        assert selected == setting.selected(rule.tokens)
        heads = setting.probe_query_heads() if mode == "shared" else slice(None)
        expected = setting.reference_scores(layer)[heads]
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-7)
    assert setting.source.whole_layers == []


@pytest.mark.parametrize("k", [5, 15, 45])
@pytest.mark.parametrize("alpha", [0.01, 1.0])
def test_papers_rule_loads_the_tokens_of_the_dense_reference(
    setting: Setting, k: int, alpha: float
) -> None:
    """End to end: dense scores in float64, sets by sorting, Jaccard of Python sets, the vote."""
    scores = setting.reference_scores(1)
    probe = scores[setting.probe_query_heads()]
    sets = [set(np.argsort(-row)[:k].tolist()) for row in probe]
    pairs = [
        len(sets[a] & sets[b]) / len(sets[a] | sets[b]) for a in range(len(sets)) for b in range(a)
    ]
    j = (k / M) / (2 - k / M)
    agreed = not pairs or sum(pairs) / len(pairs) > j**alpha

    loaded = setting.load(1, PaperSelector(alpha), k)

    assert (setting.stats.layers_by_probe, setting.stats.layers_by_fallback) == (
        (1, 0) if agreed else (0, 1)
    )
    if agreed:
        rank = [(sum(t in s for s in sets), probe[:, t].sum()) for t in range(M)]
        best = sorted(sorted(range(M), key=lambda t: rank[t], reverse=True)[:k])
        own = [best] * setting.shape.num_kv_heads
    else:
        by_head = scores.reshape(setting.shape.num_kv_heads, -1, M).sum(1)
        own = [sorted(np.argsort(-row)[:k].tolist()) for row in by_head]
    setting.check(1, loaded, torch.tensor(own))


@either
@pytest.mark.parametrize("k", [1, 5, 15, 45])
def test_each_head_gets_its_best_tokens_of_the_dense_reference(setting: Setting, k: int) -> None:
    by_head = setting.reference_scores(1).reshape(setting.shape.num_kv_heads, -1, M).sum(1)
    own = [sorted(np.argsort(-row)[:k].tolist()) for row in by_head]

    loaded = setting.load(1, H2OSelector(), k)

    setting.check(1, loaded, torch.tensor(own))


def test_stats_add_up_over_layers(setting: Setting) -> None:
    one, alone = shared([4]), fallback(own_tokens(setting.shape, 1))

    setting.load(0, one, 1)
    assert setting.stats.probe_ms > 0 and setting.stats.load_ms > 0
    earlier = dataclasses.replace(setting.stats)
    setting.load(1, alone, 1)
    setting.load(1, one, 1)
    setting.load(1, one, M)

    assert setting.stats.layers_by_probe == 2
    assert setting.stats.layers_by_fallback == 1
    assert setting.stats.layers_whole == 1
    assert setting.stats.probe_ms > earlier.probe_ms
    assert setting.stats.load_ms > earlier.load_ms


def test_reading_for_a_rule_is_loading_and_not_probing() -> None:
    setting = Setting(SHAPES["gqa"])
    read = setting.source.read_probe

    def slowly(layer: int) -> Tensor:
        time.sleep(0.2)
        return read(layer)

    setting.source.read_probe = slowly  # type: ignore[method-assign]

    setting.load(0, PaperSelector(1.0), 5)

    assert setting.stats.load_ms >= 200 > setting.stats.probe_ms > 0


@pytest.mark.parametrize("broken", ["read_probe", "read"])
@pytest.mark.parametrize("mode", ["whole", "shared", "fallback"])
def test_nothing_is_noted_of_a_failure(setting: Setting, mode: str, broken: str) -> None:
    """Which reaches the caller, whichever column cannot be read."""
    tokens = own_tokens(setting.shape, 4)
    rule = fallback(tokens) if mode == "fallback" else shared(tokens[0].tolist())

    def fail(*_: object, **__: object) -> None:
        raise SegmentUnreadable("ab12", "a test")

    setattr(setting.source, broken, fail)

    with pytest.raises(SegmentUnreadable):
        setting.load(0, rule, M if mode == "whole" else 4)

    assert not setting.source.selections and not setting.source.whole_layers
