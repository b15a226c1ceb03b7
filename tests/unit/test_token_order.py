"""The order of a segment's tokens, and what reading it is expected to take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.paper.token_order import chunk_shares, expected_bytes, mapping_lists
from impress_sglang.storage.layout import KVShape, SegmentLayout
from tests.unit.kv_factory import head_group_of, kv_of, make_shape, row_size

# A row of other keys takes a quarter of a block, a row of values half of one.
SHAPE = make_shape(layers=2, kv_heads=2, query_heads=2, key_dim=256, value_dim=256)
# A row of keys takes a quarter of a block, a row of values half of one, of each of two heads.
HEAD_GROUPS = make_shape(layers=2, kv_heads=2, query_heads=4, key_dim=256, value_dim=512, probe=())
# There are no other keys, and a row of values takes three blocks.
LONG_ROWS = make_shape(layers=2, kv_heads=1, query_heads=1, value_dim=3072)
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


def test_entries_are_as_wide_as_the_file_has_them() -> None:
    assert mapping_lists(np.zeros((1, 1, 1 << 16), np.float32), [0]).dtype == np.dtype("<u2")
    assert mapping_lists(np.zeros((1, 1, (1 << 16) + 1), np.float32), [0]).dtype == np.dtype("<u4")


def brute_force(
    average: np.ndarray, mapping: np.ndarray | None, where: SegmentLayout, gap_bytes: int
) -> float:
    """Every selection with its probability, and the units that it touches."""
    layers, _, tokens = average.shape
    total = 0.0
    for column in kv_of(where.shape):
        row_bytes, head_group = row_size(where.shape, column), head_group_of(where.shape, column)
        if not row_bytes:
            continue
        # The largest of a block, a row and a gap, but a gap is inside one chunk.
        unit = max(BLOCK, min(gap_bytes, where.chunk_tokens * row_bytes))
        rows = max(1, round(unit / row_bytes))
        for layer, chosen in itertools.product(
            range(layers), itertools.product([False, True], repeat=tokens)
        ):
            chance, touched = 1.0, set()
            for token, selected in enumerate(chosen):
                p = float(np.clip(average[layer, head_group, token], 0, 1))
                chance *= p if selected else 1 - p
                if selected:
                    row = token if mapping is None else int(mapping[layer, head_group, token])
                    touched.add(row // rows)
            total += chance * len(touched) * rows * row_bytes
    return total


@pytest.mark.parametrize("shape", [SHAPE, HEAD_GROUPS, LONG_ROWS])
@pytest.mark.parametrize("gap_bytes", [0, 6000, 1 << 20])
def test_expected_bytes_are_those_of_all_selections(gap_bytes: int, shape: KVShape) -> None:
    pick = np.random.default_rng(5)
    where = layout(9, shape)
    for _ in range(3):
        average = (1.2 * pick.random((2, shape.num_head_groups, 9))).astype(np.float32)
        mapping = mapping_lists(average, [0, 5])

        for order in (None, mapping):
            expected = brute_force(average, order, where, gap_bytes)
            assert expected_bytes(average, order, where, gap_bytes) == pytest.approx(expected)


@given(first=SOME, gap=st.sampled_from([0, 6000, 2 * BLOCK]))
def test_an_order_by_average_never_costs_more(first: list[float], gap: int) -> None:
    average = averages(first, first[::-1])
    where = layout(len(first))

    before = expected_bytes(average, None, where, gap)
    after = expected_bytes(average, mapping_lists(average, [0]), where, gap)

    assert after <= before * (1 + 1e-9)
    assert after <= expected_bytes(average, mapping_lists(-average, [0]), where, gap) * (1 + 1e-9)


def test_shares_of_chunks_by_hand() -> None:
    """Three chunks of 4, 4 and 2 rows; probe columns are read whole at each access."""
    average = averages([1.0, 0, 0, 0, 0.5, 0, 0, 0.5, 0, 1.5], [0.0] * 10)
    where = layout(10, chunk_tokens=4)

    shares = chunk_shares(average, mapping_lists(average, [0]), where)

    # The largest come first: 1 (from 1.5), 1, 0.5, 0.5 and then nothing.
    own, nothing = [0.75, 0.0, 0.0], [0.0] * 3
    assert shares.tolist() == [*[1.0] * 3, *own, *own, *[1.0] * 3, *nothing, *nothing]
    logical = np.tile(np.arange(10, dtype=np.uint16), (2, 1, 1))
    assert chunk_shares(average, logical, where)[3:6].tolist() == [0.25, 0.25, 0.5]


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
