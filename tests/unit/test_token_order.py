"""The order of a segment's tokens, and what reading it is expected to take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.paper.token_order import chunk_shares, expected_bytes, mapping_lists
from impress_sglang.storage.layout import KVShape, SegmentLayout
from tests.unit.kv_factory import make_shape

# A row of other keys takes a quarter of a block, a row of values half of one.
SHAPE = make_shape(layers=2, kv_heads=2, query_heads=2, key_dim=256, value_dim=256)
# A row of keys takes a quarter of a block, a row of values half of one, of each of two heads.
HEAD_GROUPS = make_shape(layers=2, kv_heads=2, query_heads=4, key_dim=256, value_dim=512, probe=())
BLOCK = 4096


def averages(*layers: Sequence[float]) -> np.ndarray:
    """Of one head group."""
    return np.array(layers, np.float32)[:, None]


def layout(num_tokens: int, shape: KVShape = SHAPE, chunk_tokens: int = 8) -> SegmentLayout:
    return SegmentLayout(shape, chunk_tokens, num_tokens, BLOCK)


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


@given(first=SOME, gap=st.sampled_from([0, 6000, 2 * BLOCK]))
def test_an_order_by_average_never_costs_more(first: list[float], gap: int) -> None:
    average = averages(first, first[::-1])
    where = layout(len(first))

    before = expected_bytes(average, None, where, gap)
    after = expected_bytes(average, mapping_lists(average, [0]), where, gap)

    assert after <= before * (1 + 1e-9)
    assert after <= expected_bytes(average, mapping_lists(-average, [0]), where, gap) * (1 + 1e-9)


def test_shares_of_chunks_are_those_of_their_head_group() -> None:
    where = layout(50, HEAD_GROUPS)
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
