"""A part of a layer: from scores to tokens, through probe, select and load; and its history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.loops.types import Indices
from impress_sglang.paper import history as history_module
from impress_sglang.paper.history import AVERAGE_WEIGHT, STEPS, TokenHistory, mapping_lists
from impress_sglang.paper.scores import agreed_tokens, retained_tokens, top_tokens
from impress_sglang.storage.layout import KVShape, SegmentLayout
from tests.unit import kv_factory as kv
from tests.unit.kv_factory import make_shape
from tests.unit.reading import LoadedLayer, asking, dense_sums, load_layer, request_of


@pytest.mark.parametrize(
    ("num_tokens", "retention", "k"),
    [
        (5, 0.25, 2),
        (10, 1.0, 10),
        (10, 1e-9, 1),
        (30, 0.1, 3),  # 0.1 * 30 is a little more than 3 in binary
        (3, 1 / 3, 1),
        (10**6, 0.3, 300_000),
    ],
)
def test_retained_tokens(num_tokens: int, retention: float, k: int) -> None:
    assert retained_tokens(num_tokens, retention) == k


@given(m=st.integers(1, 30), num_heads=st.integers(1, 5), seed=st.integers(0, 999))
def test_vote_prefers_votes_then_summed_score(m: int, num_heads: int, seed: int) -> None:
    """A token outside has no more votes, or as many and no higher sum, than any inside."""
    # Multiples of 1/8: sums are exact, and ties do occur.
    pick = np.random.default_rng(seed)
    scores, k = torch.tensor(pick.integers(0, 41, (num_heads, m)) / 8), int(pick.integers(1, m + 1))
    agreed = agreed_tokens(scores, k, threshold=-1.0)

    assert agreed is not None
    found, sets = agreed.tolist(), top_tokens(scores, k).tolist()
    assert len(found) == k
    assert found == sorted(set(found))
    votes, sums = [sum(token in row for row in sets) for token in range(m)], scores.sum(0).tolist()
    rank = list(zip(votes, sums, strict=True))
    outside = set(range(m)) - set(found)
    assert all(rank[out] <= rank[kept] for out in outside for kept in found)


SHAPES = {
    "mha": kv.make_shape(query_heads=5, kv_heads=5, probe=(0, 1)),
    "mha-one": kv.make_shape(query_heads=5, kv_heads=5, probe=(0,)),
    "gqa": kv.make_shape(query_heads=12, kv_heads=4, key_dim=16, probe=(0,)),
    "gqa-two": kv.make_shape(query_heads=8, kv_heads=4, value_dim=12, probe=(0, 1)),
    "mqa": kv.make_shape(query_heads=4, kv_heads=1, probe=(0,)),
    "all-probed": kv.make_shape(query_heads=4, kv_heads=2, probe=(0, 1)),
    "no-probe": kv.make_shape(query_heads=6, kv_heads=3, key_dim=16, value_dim=12, probe=()),
    "no-probe-mqa": kv.make_shape(query_heads=4, kv_heads=1, probe=()),
}
M, C = 60, 5


class Setting:
    """A source of KVs in memory, and a request of it: what is asked of it, and what is noted."""

    def __init__(self, shape: KVShape) -> None:
        self.shape, self.num_tokens = shape, M
        self.keys, self.values = kv.random_kvs(shape, M, seed=1)
        self.asking = asking(shape, 2, C)
        self.asked: list[tuple[str, list[list[int]] | None]] = []
        self.noted: list[tuple[int, list[list[int]], Tensor | None]] = []
        self.report: dict[str, Any] = {}

    def read_probe(self, layer: int) -> Tensor:
        self.asked.append(("probe", None))
        return self.keys[layer][:, list(self.shape.probe_kv_heads)]

    def read(
        self, layer: int, tokens: Indices | None, *, keys: bool = True, values: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        self.asked += [
            (kind, None if tokens is None else tokens.tolist())
            for kind, asked in (("keys", keys), ("values", values))
            if asked
        ]
        others = list(self.shape.other_kv_heads)
        rows = torch.arange(M)[None] if tokens is None else torch.from_numpy(tokens)
        index = rows.expand(self.shape.num_kv_heads, -1).T
        heads = torch.arange(self.shape.num_kv_heads)
        found = self.keys[layer][index, heads][:, others] if keys and others else None
        return found, self.values[layer][index, heads] if values else None

    def record_selection(self, layer: int, selected: Indices, importance: Tensor | None) -> None:
        self.noted.append((layer, selected.tolist(), importance))

    def scores(self, layer: int) -> np.ndarray:
        """Column sums [Hq, m] of all heads, in float64."""
        asking = self.asking
        keys = self.keys[layer], asking.resident_keys, asking.new_keys
        return dense_sums(asking.queries, *keys, asking.scaling)

    def load(self, layer: int, k: int, alpha: float = 0.6) -> LoadedLayer:
        request = request_of(self.shape, alpha, self, k, C)
        self.report = request.report
        return load_layer(request, layer, self.asking)

    def check(self, layer: int, loaded: LoadedLayer, tokens: Tensor) -> None:
        """Each head has the rows of its set, and each head group those of its heads."""
        sets = tokens.expand(self.shape.num_kv_heads, -1)
        for head, rows in enumerate(sets):
            assert torch.equal(loaded.keys[:, head], self.keys[layer][rows, head])
            assert torch.equal(loaded.values[:, head], self.values[layer][rows, head])
        everything = sorted(set(sets.flatten().tolist()))
        groups = [everything] if self.shape.probe_kv_heads else sets.tolist()
        assert loaded.selected.tolist() == groups
        assert (loaded.selected.dtype, loaded.selected.device.type) == (torch.int64, "cpu")


@pytest.fixture(params=SHAPES)
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(SHAPES[request.param])


@pytest.mark.parametrize("layer", [0, 1])
def test_all_tokens_are_loaded_exactly_and_nothing_is_scored(setting: Setting, layer: int) -> None:
    """Keys of probe heads are keys, too."""
    loaded = setting.load(layer, M)

    setting.check(layer, loaded, torch.arange(M)[None])
    probes = [("probe", None)] * bool(setting.shape.probe_kv_heads)
    everything = [list(range(M))] * kv.head_groups_of(setting.shape)
    assert setting.asked == [*probes, ("keys", everything), ("values", everything)]
    assert setting.report["layers_whole"] == 1 and not setting.report["probe_ms"]
    assert not setting.report["layers_by_probe"] + setting.report["layers_by_fallback"]
    assert setting.noted == [(layer, everything, None)]


@pytest.mark.parametrize("k", [1, 5, 15, 45, M - 1])
@pytest.mark.parametrize("alpha", [0.01, 0.6, 1.0])
def test_the_tokens_are_those_of_the_dense_reference(
    setting: Setting, k: int, alpha: float
) -> None:
    """End to end: dense scores in float64, sets by sorting, Jaccard of Python sets, the vote.

    All keys are read only if there is no agreement, and keys that were read are not read again.
    """
    scores = setting.scores(1)
    probed, size = setting.shape.probe_kv_heads, setting.shape.group_size
    probe = scores[[head for head in range(len(scores)) if head // size in probed]]
    sets = [set(np.argsort(-row)[:k].tolist()) for row in probe]
    pairs = [
        len(sets[a] & sets[b]) / len(sets[a] | sets[b]) for a in range(len(sets)) for b in range(a)
    ]
    j = (k / M) / (2 - k / M)
    agreed = bool(sets) and (not pairs or sum(pairs) / len(pairs) > j**alpha)

    loaded = setting.load(1, k, alpha)

    report = setting.report
    assert (report["layers_by_probe"], report["layers_by_fallback"]) == (agreed, not agreed)
    assert report["probe_ms"] > 0 and report["load_ms"] > 0
    if agreed:
        rank = [(sum(t in s for s in sets), probe[:, t].sum()) for t in range(M)]
        best = sorted(sorted(range(M), key=lambda t: rank[t], reverse=True)[:k])
        chosen = [best] * setting.shape.num_kv_heads
    else:
        by_head = scores.reshape(setting.shape.num_kv_heads, -1, M).sum(1)
        chosen = [sorted(np.argsort(-row)[:k].tolist()) for row in by_head]
    setting.check(1, loaded, torch.tensor(chosen))
    selected = loaded.selected.tolist()
    keys = ("keys", selected if agreed else None)
    assert setting.asked == [("probe", None)] * bool(sets) + [keys, ("values", selected)]
    ((layer, noted, importance),) = setting.noted
    assert (layer, noted) == (1, selected)
    np.testing.assert_allclose(importance, probe if agreed else scores, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("broken", ["read_probe", "read"])
@pytest.mark.parametrize(("k", "alpha"), [(M, 1.0), (4, 1.0), (4, 0.01)])
def test_nothing_is_noted_of_a_failure(broken: str, k: int, alpha: float) -> None:
    """Which reaches the caller, whichever column cannot be read."""
    setting = Setting(SHAPES["mha"])

    def fail(*_: object, **__: object) -> None:
        raise SegmentUnreadable("ab12", "a test")

    setattr(setting, broken, fail)

    with pytest.raises(SegmentUnreadable):
        setting.load(0, k, alpha)

    assert not setting.noted


# What half precision keeps of an importance of this size, over many updates.
CLOSE = {"rtol": 5e-3, "atol": 5e-3}
# Averages of selections have steps of 1/255. Each update rounds by at most half a step, and later
# ones forget that with their weight: no error is larger than half a step over the least weight.
NEAR = 1.001 / 2 / AVERAGE_WEIGHT / STEPS


def note(
    history: TokenHistory,
    layer: int,
    *selected: list[int],
    start: int,
    count: int,
    scores: Tensor | None = None,
    first: int = 0,
) -> None:
    """A layer has selected these tokens of each head group, after the `first` of a prefix."""
    k = max(len(tokens) for tokens in selected) + 2
    tokens = [
        [
            *range(first > 0),
            *(first + token for token in sorted(of_group)),
            *range(first + count, first + count + k),
        ]
        for of_group in selected
    ]
    history.observe(layer, start, count, np.array([row[:k] for row in tokens]), first, scores)


def averaged(observations: Sequence[float]) -> float:
    """By the definition: the mean of the first ten, then a tenth of each newer one."""
    first = observations[: round(1 / AVERAGE_WEIGHT)]
    average = sum(first) / len(first) if first else 0.0
    for observed in observations[len(first) :]:
        average = (1 - AVERAGE_WEIGHT) * average + AVERAGE_WEIGHT * observed
    return average


def test_an_average_follows_a_change_after_any_number_of_accesses() -> None:
    """Also when the count of accesses, which is one byte, is full."""
    history = TokenHistory(1, 1, 1)
    for access in range(400):
        note(history, 0, [0] if access >= 360 else [], start=0, count=1)

    assert history.average[0, 0, 0] == pytest.approx(1 - 0.9**40, abs=NEAR)
    assert history.accesses.tolist() == [255]


@given(st.data())
def test_averages_are_those_of_the_definition(data: st.DataObject) -> None:
    """Any spans anywhere in a prefix, any selections, all layers and head groups."""
    size, head_groups = 8, data.draw(st.integers(1, 2))
    history = TokenHistory(2, head_groups, size)
    seen: list[list[list[float]]] = [[[] for _ in range(size)] for _ in range(2 * head_groups)]
    for _ in range(data.draw(st.integers(1, 25))):
        start = data.draw(st.integers(0, size - 1))
        count = data.draw(st.integers(1, size - start))
        first = data.draw(st.integers(0, 3))
        for layer in range(2):
            drawn = [
                sorted(data.draw(st.sets(st.integers(0, count - 1)))) for _ in range(head_groups)
            ]
            note(history, layer, *drawn, start=start, count=count, first=first)
            for observed, selected in zip(seen[head_groups * layer :], drawn, strict=False):
                for token in range(count):
                    observed[start + token].append(float(token in selected))

    expected = np.array([[averaged(token) for token in tokens] for tokens in seen])
    np.testing.assert_allclose(
        history.average, expected.reshape(2, head_groups, size), rtol=0, atol=NEAR
    )
    assert history.accesses.tolist() == [len(token) for token in seen[0]]


def test_importance_is_the_column_sum_over_the_mean_of_all_tokens() -> None:
    """Without scores all count alike: in a layer that is used whole, or for another rule."""
    history = TokenHistory(1, 1, 6, by_importance=True)
    sums = torch.tensor([[1.0, 0.0, 3.0, 0.0], [1.0, 0.0, 1.0, 2.0]])  # 2, 0, 4, 2

    for scores, expected in (
        (sums, [0, 1, 0, 2, 1, 0]),
        (None, [0, 1, 0.5, 1.5, 1, 0]),
        (100 * sums.flip(1), [0, 1, 1, 1, 1, 0]),
    ):
        note(history, 0, [0], start=1, count=4, scores=scores)
        np.testing.assert_allclose(history.order_key[0, 0], expected, **CLOSE)


SOME = st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0]), min_size=1, max_size=24)


@given(average=SOME, cuts=st.sets(st.integers(1, 23)))
def test_a_mapping_list_orders_each_node_by_average_and_keeps_ties(
    average: list[float], cuts: set[int]
) -> None:
    starts = [0, *sorted(cut for cut in cuts if cut < len(average))]
    head_groups = [average, average[::-1], np.roll(average, 1), np.roll(average[::-1], 2)]
    both = np.array(head_groups, np.float32).reshape(2, 2, -1)

    mapping = mapping_lists(both, starts)

    assert mapping.shape == both.shape
    for layer, head_group in np.ndindex(2, 2):
        for start, stop in zip(starts, [*starts[1:], len(average)], strict=True):
            tokens = range(start, stop)
            ranked = sorted(tokens, key=lambda token: -both[layer, head_group, token])
            rows = mapping[layer, head_group, ranked].tolist()
            assert rows == list(range(start, stop)), "sorted() is stable as well"


def test_shares_of_chunks_are_those_of_their_head_group() -> None:
    # A row of keys takes a quarter of a block, one of values half of one, of each of two heads.
    shape = make_shape(layers=2, kv_heads=2, query_heads=4, key_dim=256, value_dim=512, probe=())
    where = SegmentLayout(shape, 8, 50, 4096)
    average = np.random.default_rng(1).random((2, 2, 50)).astype(np.float32)
    mapping = mapping_lists(average, [0])

    found = history_module.chunk_shares(average, mapping, where)

    assert found.shape == (where.first_chunks[False][-1],)
    for layer, head_group in np.ndindex(2, 2):
        by_row = np.sort(average[layer, head_group])[::-1]
        for column in (1 + head_group, 3 + head_group):
            first = (layer * len(where.columns) + column) * where.num_chunks
            means = [by_row[start : start + 8].mean() for start in range(0, 50, 8)]
            np.testing.assert_allclose(found[first : first + 7], means, rtol=1e-6)
