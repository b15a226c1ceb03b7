"""Moving averages of selections: the mean at first, then an exponential average, per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.paper.history import (
    AVERAGE_WEIGHT,
    STEPS,
    TokenHistory,
    chunk_shares,
    mapping_lists,
)
from impress_sglang.storage.layout import SegmentLayout
from tests.unit.kv_factory import make_shape

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
    k = max(len(own) for own in selected) + 2
    tokens = [
        [
            *range(first > 0),
            *(first + token for token in sorted(own)),
            *range(first + count, first + count + k),
        ]
        for own in selected
    ]
    history.note(layer, start, count, np.array([own[:k] for own in tokens]), first, scores)


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


def test_without_scores_all_tokens_count_alike() -> None:
    """A layer that is used whole, or a rule that looks at nothing."""
    history = TokenHistory(1, 1, 3, by_importance=True)
    note(history, 0, [0, 1], start=0, count=2, scores=torch.tensor([[3.0, 1.0]]))
    note(history, 0, [0, 1], start=0, count=2)

    np.testing.assert_allclose(history.order_key[0, 0], [1.25, 0.75, 0], **CLOSE)
    assert history.average[0, 0].tolist() == [1, 1, 0]


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
            for own, selected in zip(seen[head_groups * layer :], drawn, strict=False):
                for token in range(count):
                    own[start + token].append(float(token in selected))

    expected = np.array([[averaged(token) for token in own] for own in seen])
    np.testing.assert_allclose(
        history.average, expected.reshape(2, head_groups, size), rtol=0, atol=NEAR
    )
    assert history.accesses.tolist() == [len(token) for token in seen[0]]


def test_importance_is_the_column_sum_over_the_mean_of_all_tokens() -> None:
    history = TokenHistory(1, 1, 6, by_importance=True)
    scores = torch.tensor([[1.0, 0.0, 3.0, 0.0], [1.0, 0.0, 1.0, 2.0]])  # sums 2, 0, 4, 2

    note(history, 0, [0], start=1, count=4, scores=scores)
    np.testing.assert_allclose(history.order_key[0, 0], [0, 1, 0, 2, 1, 0], **CLOSE)
    note(history, 0, [0], start=1, count=4, scores=100 * scores.flip(1))

    np.testing.assert_allclose(history.order_key[0, 0], [0, 1, 1, 1, 1, 0], **CLOSE)


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

    found = chunk_shares(average, mapping, where)

    assert found.shape == (where.total_chunks,)
    for layer, head_group in np.ndindex(2, 2):
        by_row = np.sort(average[layer, head_group])[::-1]
        for column in (1 + head_group, 3 + head_group):
            first = where.chunk_index(layer, column, 0)
            means = [by_row[start : start + 8].mean() for start in range(0, 50, 8)]
            np.testing.assert_allclose(found[first : first + 7], means, rtol=1e-6)
