"""One layer through probe -> select -> load: which rows come back, and which bytes were read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.errors import ChunkUnreadable
from impress_sglang.importance.identify import PaperRule, ProbeVerdict
from impress_sglang.storage.layout import KVShape, Stream
from impress_sglang.storage.reader import ChunkReader
from impress_sglang.tiers.rules import LeastFrequentlyUsed
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.source import MemorySource, PrefixSource, SegmentSource, Staging
from tests.unit.kv_factory import (
    heads_of,
    make_cache,
    make_info,
    make_shape,
    open_span,
    random_kvs,
    random_mapping,
    write_kvs,
)

SHAPES = {
    "mha": make_shape(query_heads=5, kv_heads=5, probe=(0, 1, 2)),
    "gqa": make_shape(query_heads=12, kv_heads=4, key_dim=16, probe=(0,)),
    "gqa-apart": make_shape(query_heads=8, kv_heads=4, value_dim=12, probe=(1, 3)),
    "mqa": make_shape(query_heads=4, kv_heads=1, probe=(0,)),
    "all-probed": make_shape(query_heads=4, kv_heads=2, probe=(0, 1)),
}
M, N, C = 60, 6, 5


@dataclasses.dataclass
class FixedRule:
    """Answers what the test says, and keeps the scores that it was asked about."""

    tokens: Tensor | None
    per_head: Tensor | None = None
    probe_scores: Tensor | None = None
    scores: Tensor | None = None

    def judge(self, probe_scores: Tensor, k: int) -> ProbeVerdict:
        self.probe_scores = probe_scores.clone()
        return ProbeVerdict(1.0, 0.0, self.tokens)

    def fall_back(self, scores: Tensor, group_size: int, k: int) -> Tensor:
        self.scores = scores.clone()
        assert self.per_head is not None
        return self.per_head


class CountingSource:
    """Counts how often each row of each stream is asked for, and keeps what it is told."""

    def __init__(self, source: PrefixSource, layers: int) -> None:
        self._source = source
        self.num_tokens = source.num_tokens
        self.stats = source.stats
        self.selections: list[tuple[int, list[int], Tensor]] = []
        self.whole_layers: list[int] = []
        self.reads = {
            (layer, stream): torch.zeros(self.num_tokens, dtype=torch.int64)
            for layer in range(layers)
            for stream in Stream
        }

    def read(
        self, layer: int, streams: Sequence[Stream], tokens: Tensor | None = None
    ) -> list[Tensor]:
        if tokens is not None:
            assert torch.equal(tokens, tokens.unique()), "ascending and distinct"
        for stream in streams:
            self.reads[layer, stream][slice(None) if tokens is None else tokens] += 1
        return self._source.read(layer, streams, tokens)

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor) -> None:
        self.selections.append((layer, selected.tolist(), importance.clone()))
        self._source.note_selection(layer, selected, importance)

    def note_whole(self, layer: int) -> None:
        self.whole_layers.append(layer)
        self._source.note_whole(layer)


class Setting:
    def __init__(self, shape: KVShape, num_tokens: int = M) -> None:
        self.shape = shape
        self.keys, self.values = random_kvs(shape, num_tokens, seed=1)
        self.source = CountingSource(MemorySource(shape, self.keys, self.values), shape.num_layers)
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
        """Column sums [Hq, m] of all heads, one query at a time."""
        group = self.shape.num_query_heads // self.shape.num_kv_heads
        q, x, c = (
            t.double().numpy()
            for t in (self.inputs.queries, self.inputs.new_keys, self.inputs.resident_keys)
        )
        p = self.keys[layer].double().numpy()
        total = np.zeros((self.shape.num_query_heads, len(p)))
        for head in range(self.shape.num_query_heads):
            g = head // group
            for i in range(N):
                seen = np.concatenate([p[:, g], c[:, g], x[: i + 1, g]])
                weights = np.exp(seen @ q[i, head] * self.inputs.scaling)
                total[head] += weights[: len(p)] / weights.sum()
        return total

    def probe_query_heads(self) -> list[int]:
        group = self.shape.num_query_heads // self.shape.num_kv_heads
        return [
            h for h in range(self.shape.num_query_heads) if h // group in self.shape.probe_kv_heads
        ]


@pytest.fixture(params=SHAPES)
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(SHAPES[request.param])


@pytest.mark.parametrize("layer", [0, 1])
def test_all_tokens_are_returned_exactly_and_nothing_is_probed(
    setting: Setting, layer: int
) -> None:
    rule = FixedRule(None)

    loaded = PrefixLoader(setting.shape, rule).load(
        layer, setting.source, setting.inputs, M, setting.stats
    )

    assert torch.equal(loaded.keys, setting.keys[layer])
    assert torch.equal(loaded.values, setting.values[layer])
    assert rule.probe_scores is None
    for stream in Stream:
        assert setting.source.reads[layer, stream].tolist() == [1] * M
    assert dataclasses.replace(setting.stats, load_ms=0.0) == LoadStats(layers_whole=1)
    assert loaded.selected.tolist() == list(range(M))
    assert (setting.source.whole_layers, setting.source.selections) == ([layer], [])


@pytest.mark.parametrize("tokens", [[0], [M - 1], [2, 3, 17, 41, 59], list(range(M - 1))])
def test_shared_tokens_are_the_rows_of_the_verdict(setting: Setting, tokens: list[int]) -> None:
    rule = FixedRule(torch.tensor(tokens))

    loaded = PrefixLoader(setting.shape, rule).load(
        1, setting.source, setting.inputs, len(tokens), setting.stats
    )

    assert torch.equal(loaded.keys, setting.keys[1][tokens])
    assert torch.equal(loaded.values, setting.values[1][tokens])
    assert loaded.selected.tolist() == tokens
    assert loaded.selected.dtype == torch.int64
    assert setting.stats.layers_by_probe == 1
    assert setting.stats.layers_by_fallback == setting.stats.layers_whole == 0


def test_shared_path_reads_the_probe_keys_and_the_selected_rows_only(setting: Setting) -> None:
    tokens = [2, 3, 17, 41, 59]

    PrefixLoader(setting.shape, FixedRule(torch.tensor(tokens))).load(
        1, setting.source, setting.inputs, len(tokens), setting.stats
    )

    selected = [int(t in tokens) for t in range(M)]
    assert setting.source.reads[1, Stream.PROBE_KEYS].tolist() == [1] * M
    assert setting.source.reads[1, Stream.OTHER_KEYS].tolist() == selected
    assert setting.source.reads[1, Stream.VALUES].tolist() == selected
    for stream in Stream:
        assert not setting.source.reads[0, stream].any(), "no other layer"


def own_tokens(shape: KVShape, k: int) -> Tensor:
    """Another ascending set for each KV head."""
    generator = torch.Generator().manual_seed(7)
    return torch.stack(
        [
            torch.randperm(M, generator=generator)[:k].sort().values
            for _ in range(shape.num_kv_heads)
        ]
    )


@pytest.mark.parametrize("k", [1, 9, M - 1])
def test_fallback_gives_each_head_its_own_rows(setting: Setting, k: int) -> None:
    tokens = own_tokens(setting.shape, k)

    loaded = PrefixLoader(setting.shape, FixedRule(None, tokens)).load(
        0, setting.source, setting.inputs, k, setting.stats
    )

    assert loaded.keys.shape == (k, setting.shape.num_kv_heads, setting.shape.key_dim)
    for head, own in enumerate(tokens):
        assert torch.equal(loaded.keys[:, head], setting.keys[0][own, head])
        assert torch.equal(loaded.values[:, head], setting.values[0][own, head])
    assert loaded.selected.tolist() == sorted(set(tokens.flatten().tolist()))
    assert setting.stats.layers_by_fallback == 1
    assert setting.stats.layers_by_probe == setting.stats.layers_whole == 0


def test_fallback_reads_every_key_once_and_the_values_that_any_head_picked(
    setting: Setting,
) -> None:
    tokens = own_tokens(setting.shape, 9)

    PrefixLoader(setting.shape, FixedRule(None, tokens)).load(
        0, setting.source, setting.inputs, 9, setting.stats
    )

    picked = set(tokens.flatten().tolist())
    assert setting.source.reads[0, Stream.PROBE_KEYS].tolist() == [1] * M
    assert setting.source.reads[0, Stream.OTHER_KEYS].tolist() == [1] * M
    assert setting.source.reads[0, Stream.VALUES].tolist() == [int(t in picked) for t in range(M)]


def test_rule_sees_the_scores_of_the_probe_heads_then_of_all(setting: Setting) -> None:
    rule = FixedRule(None, own_tokens(setting.shape, 5))

    PrefixLoader(setting.shape, rule).load(1, setting.source, setting.inputs, 5, setting.stats)

    expected = setting.reference_scores(1)
    assert rule.probe_scores is not None and rule.scores is not None
    np.testing.assert_allclose(
        rule.probe_scores.numpy(), expected[setting.probe_query_heads()], rtol=1e-4, atol=1e-7
    )
    np.testing.assert_allclose(rule.scores.numpy(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shared", [True, False])
def test_source_is_told_what_was_selected_and_by_which_scores(
    setting: Setting, shared: bool
) -> None:
    """Once a layer: the tokens of any head, and the scores of the probe heads alone."""
    tokens = own_tokens(setting.shape, 5)
    rule = FixedRule(tokens[0] if shared else None, tokens)
    loader = PrefixLoader(setting.shape, rule)

    for layer in (0, 1):
        loaded = loader.load(layer, setting.source, setting.inputs, 5, setting.stats)

        assert len(setting.source.selections) == layer + 1
        told_layer, selected, scores = setting.source.selections[-1]
        assert told_layer == layer
        assert selected == loaded.selected.tolist()
        expected = setting.reference_scores(layer)[setting.probe_query_heads()]
        np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-4, atol=1e-7)
    assert setting.source.whole_layers == []


def test_without_resident_tokens(setting: Setting) -> None:
    shape = setting.shape
    inputs = dataclasses.replace(
        setting.inputs, resident_keys=torch.empty(0, shape.num_kv_heads, shape.key_dim)
    )
    rule = FixedRule(torch.tensor([1, 2]))

    loaded = PrefixLoader(shape, rule).load(0, setting.source, inputs, 2, setting.stats)

    assert torch.equal(loaded.keys, setting.keys[0][[1, 2]])
    assert rule.probe_scores is not None
    assert bool((rule.probe_scores.sum(1) < N).all())


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

    loaded = PrefixLoader(setting.shape, PaperRule(alpha)).load(
        1, setting.source, setting.inputs, k, setting.stats
    )

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
    for head, tokens in enumerate(own):
        assert torch.equal(loaded.keys[:, head], setting.keys[1][tokens, head])
        assert torch.equal(loaded.values[:, head], setting.values[1][tokens, head])


def test_the_rule_takes_both_paths_in_the_test_above() -> None:
    """Guards it: if one path were never taken, it would prove half of what it says."""
    stats = LoadStats()
    for name in ("mha", "gqa-apart"):
        for alpha in (0.01, 1.0):
            setting = Setting(SHAPES[name])
            PrefixLoader(setting.shape, PaperRule(alpha)).load(
                1, setting.source, setting.inputs, 45, stats
            )

    assert stats.layers_by_probe > 0
    assert stats.layers_by_fallback > 0


def test_stats_add_up_over_layers(setting: Setting) -> None:
    shape = setting.shape
    shared = PrefixLoader(shape, FixedRule(torch.tensor([4])))
    alone = PrefixLoader(shape, FixedRule(None, own_tokens(shape, 1)))

    shared.load(0, setting.source, setting.inputs, 1, setting.stats)
    assert setting.stats.probe_ms > 0 and setting.stats.load_ms > 0
    earlier = dataclasses.replace(setting.stats)
    alone.load(1, setting.source, setting.inputs, 1, setting.stats)
    shared.load(1, setting.source, setting.inputs, 1, setting.stats)
    shared.load(0, setting.source, setting.inputs, M, setting.stats)

    assert setting.stats.layers_by_probe == 2
    assert setting.stats.layers_by_fallback == 1
    assert setting.stats.layers_whole == 1
    assert setting.stats.probe_ms > earlier.probe_ms
    assert setting.stats.load_ms > earlier.load_ms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [True, False])
def test_rows_from_ssd_are_the_stored_bits(
    tmp_path: Path, dtype: torch.dtype, shared: bool
) -> None:
    """Through files and caches, in half precision, with memory that later reads use again."""
    shape = dataclasses.replace(SHAPES["gqa-apart"], dtype=dtype)
    setting = Setting(shape)
    info = make_info(shape, range(M), generation=1)
    path = write_kvs(tmp_path, info, setting.keys, setting.values, mapping=random_mapping(info, 1))
    cache = make_cache(shape, device_chunks=3, host_chunks=3, rule=LeastFrequentlyUsed())
    reader, span = ChunkReader(2), open_span(path, cache)
    source = SegmentSource(shape, [span], reader, Staging(), cache)
    tokens = own_tokens(shape, 9)
    rule = FixedRule(tokens[0] if shared else None, tokens)
    inputs = LayerInputs(
        setting.inputs.queries.to(dtype),
        setting.inputs.new_keys.to(dtype),
        setting.inputs.resident_keys.to(dtype),
        setting.inputs.scaling,
    )
    for layer in [*range(shape.num_layers)] * 2:
        cache.placement.advance()
        loaded = PrefixLoader(shape, rule).load(layer, source, inputs, 9, setting.stats)

        assert loaded.keys.dtype == loaded.values.dtype == dtype
        for head in range(shape.num_kv_heads):
            own = tokens[0 if shared else head]
            assert torch.equal(loaded.keys[:, head], setting.keys[layer][own, head])
            assert torch.equal(loaded.values[:, head], setting.values[layer][own, head])
    assert source.stats.device_chunks > 0 and source.stats.host_chunks > 0
    span.segment.close()
    reader.close()


def test_shared_path_takes_no_other_bytes_from_ssd(tmp_path: Path) -> None:
    """Chunks of 8 tokens: all of the probe keys, and the chunks of tokens 3 and 20."""
    shape = SHAPES["gqa-apart"]
    setting = Setting(shape)
    path = write_kvs(tmp_path, make_info(shape, range(M)), setting.keys, setting.values)
    cache = make_cache(shape)
    reader, span = ChunkReader(2), open_span(path, cache)
    source = SegmentSource(shape, [span], reader, Staging(), cache)

    PrefixLoader(shape, FixedRule(torch.tensor([3, 20]))).load(
        0, source, setting.inputs, 2, setting.stats
    )

    # Each chunk of these small heads is one disk block: 8 of the probe keys, 2 and 2 of the rest.
    assert source.stats.ssd_bytes == (8 + 2 + 2) * 4096
    assert source.stats.selected_chunks == 4
    # Two probe heads and two others of 8 numbers, four heads of 12 numbers.
    assert source.stats.important_bytes == 2 * (2 * 8 + 2 * 8 + 4 * 12) * 4
    assert np.flatnonzero(span.history.average[0]).tolist() == [3, 20]
    span.segment.close()
    reader.close()


class BrokenSource(CountingSource):
    """Cannot give one stream."""

    def __init__(self, setting: Setting, broken: Stream) -> None:
        super().__init__(MemorySource(setting.shape, setting.keys, setting.values), 2)
        self._broken = broken

    def read(
        self, layer: int, streams: Sequence[Stream], tokens: Tensor | None = None
    ) -> list[Tensor]:
        if self._broken in streams:
            raise ChunkUnreadable("ab12", "test")
        return super().read(layer, streams, tokens)


@pytest.mark.parametrize("broken", Stream)
@pytest.mark.parametrize("mode", ["whole", "shared", "fallback"])
def test_an_unreadable_chunk_reaches_the_caller(broken: Stream, mode: str) -> None:
    setting = Setting(SHAPES["gqa-apart"])
    tokens = own_tokens(setting.shape, 4)
    rule = FixedRule(tokens[0] if mode == "shared" else None, tokens)
    k = M if mode == "whole" else 4

    source = BrokenSource(setting, broken)

    with pytest.raises(ChunkUnreadable):
        PrefixLoader(setting.shape, rule).load(0, source, setting.inputs, k, setting.stats)

    assert not source.selections and not source.whole_layers, "nothing is noted of a failure"


def test_head_order_of_the_shapes_here_is_not_trivial() -> None:
    """Guards the tests above: one shape's probe heads do not come first."""
    assert heads_of(SHAPES["gqa-apart"], Stream.OTHER_KEYS) == [0, 2]
