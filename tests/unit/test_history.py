"""Moving averages of selections: the mean at first, then an exponential average, per token.

Chances of blocks: learnt from what requests wanted, and what is worth reading by them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from impress_sglang.importance.averages import AVERAGE_WEIGHT, STEPS
from impress_sglang.importance.history import TokenHistory
from impress_sglang.storage.layout import Column, KVShape, SegmentLayout
from impress_sglang.transfer.expectation import (
    LEAST_CHANCE,
    ORDERED_REST,
    ORDERED_SHARES,
    BlockHistory,
    first_shares,
    likely_blocks,
)
from tests.unit import kv_factory as kv

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


def test_importance_is_kept_of_each_head_group() -> None:
    history = TokenHistory(1, 2, 2, by_importance=True)
    scores = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 3.0]])
    note(history, 0, [0], [0], start=0, count=2, scores=scores)

    np.testing.assert_allclose(history.order_key, [[[1.5, 0.5], [0, 2]]], **CLOSE)


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


def test_token_means_follow_each_access() -> None:
    history = TokenHistory(2, 1, 2)
    for expected, *by_layer in (([1.0, 0.5], [0], [0, 1]), ([0.75, 0.5], [1], [0])):
        for layer, selected in enumerate(by_layer):
            note(history, layer, selected, start=0, count=2)

        np.testing.assert_allclose(history.token_means(), expected, rtol=0, atol=NEAR)


def test_importance_of_scores_that_vanish_or_tower_stays_finite() -> None:
    history = TokenHistory(1, 1, 200_000, by_importance=True)
    peak = torch.zeros(1, 200_000)

    note(history, 0, [0], start=0, count=200_000, scores=peak)
    assert not history.order_key.any()
    peak[0, 7] = 1e4
    note(history, 0, [0], start=0, count=200_000, scores=peak)

    assert np.isfinite(history.order_key).all()
    assert history.order_key[0, 0].argmax() == 7


def test_key_selected_pays_no_heed_to_the_scores() -> None:
    history = TokenHistory(1, 1, 3)

    note(history, 0, [1], start=0, count=3, scores=torch.tensor([[9.0, 0.0, 5.0]]))

    assert history.average[0, 0].tolist() == [0, 1, 0]


def test_memory_is_what_is_said() -> None:
    assert TokenHistory(3, 2, 100).num_bytes == 3 * 2 * 100 + 100
    both = TokenHistory(3, 2, 100, by_importance=True)
    assert both.num_bytes == 3 * 2 * 100 * (1 + 2) + 100


BLOCK = 4096
FIRST_REQUESTS = round(1 / AVERAGE_WEIGHT)

# Rows of keys and of values of 1 KiB; a chunk of 8 tokens has two blocks.
SHAPE = kv.make_shape(query_heads=4, kv_heads=4, key_dim=85, value_dim=64, probe=(3,))
SHAPES = {
    "two blocks": SHAPE,
    "padding": kv.make_shape(),
    "no other keys": kv.make_shape(query_heads=2, kv_heads=1, probe=(0,)),
    "rows of several blocks": kv.make_shape(query_heads=2, key_dim=500, value_dim=1500),
    "no probe heads": kv.make_shape(key_dim=16, probe=()),
    "head groups, cut rows": kv.make_shape(
        query_heads=3, kv_heads=3, key_dim=128, value_dim=160, dtype=torch.bfloat16, probe=()
    ),
}
CHUNK_TOKENS, NUM_TOKENS, NUM_CHUNKS = 8, 83, 11


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> KVShape:
    return SHAPES[request.param]


def layout_of(shape: KVShape) -> SegmentLayout:
    return SegmentLayout(shape, CHUNK_TOKENS, NUM_TOKENS, BLOCK)


def split(shape: KVShape, layer_shares: np.ndarray) -> dict[Column, np.ndarray]:
    """Shares of a layer by column; one without heads has as many chunks, which are empty."""
    return dict(enumerate(layer_shares.reshape(len(kv.columns_of(shape)), NUM_CHUNKS)))


@pytest.mark.parametrize("retention", [0.05, 0.25, 0.5, 1.0])
def test_without_an_order_each_chunk_is_expected_to_be_wanted_as_much(
    shape: KVShape, retention: float
) -> None:
    shares = first_shares(layout_of(shape), retention, ordered=False)

    layers = shares.reshape(shape.num_layers, -1)
    assert (layers == layers[0]).all()
    for column, own in split(shape, layers[0]).items():
        assert own.tolist() == [1.0 if column == kv.PROBE else retention] * len(own)


@pytest.mark.parametrize("retention", [0.1, 0.25])
def test_with_an_order_the_first_part_has_most(shape: KVShape, retention: float) -> None:
    """By the middle of a chunk: up to once the retention, up to twice, and the rest."""
    shares = first_shares(layout_of(shape), retention, ordered=True)

    layers = shares.reshape(shape.num_layers, -1)
    assert (layers == layers[0]).all()
    (once, first), (twice, second) = ORDERED_SHARES
    for column, own in split(shape, layers[0]).items():
        if column == kv.PROBE:
            assert (own == 1.0).all(), "every probe reads all of it"
            continue
        for chunk, share in enumerate(own):
            middle = (chunk + 0.5) * CHUNK_TOKENS / NUM_TOKENS / retention
            assert share == (first if middle < once else second if middle < twice else ORDERED_REST)
        assert (np.diff(own) <= 0).all() and own[0] > own[-1]


def test_chances_begin_with_what_is_expected_of_the_chunks(shape: KVShape) -> None:
    """A block is wanted if one of its rows is, as if they were wanted independently."""
    layout = layout_of(shape)
    pick = np.random.default_rng(4)
    shares = pick.random(shape.num_layers * len(kv.columns_of(shape)) * NUM_CHUNKS)
    shares[::7], shares[::11] = 0.0, 1.0

    history = BlockHistory(layout, shares)

    assert history.codes.dtype == np.uint8
    assert history.codes.shape == (shape.num_layers, layout.layer_bytes(0) // BLOCK)
    for layer, own in enumerate(shares.reshape(shape.num_layers, -1)):
        expected: list[float] = []
        for column, by_chunk in split(shape, own).items():
            rows = max(1, round(BLOCK / max(kv.row_size(shape, column), 1)))
            for chunk, share in enumerate(by_chunk):
                size = kv.chunk_disk_bytes(shape, column, CHUNK_TOKENS, NUM_TOKENS, chunk)
                expected += [1 - (1 - share) ** rows] * (size // BLOCK)
        np.testing.assert_allclose(history.codes[layer] / STEPS, expected, atol=0.51 / STEPS)


KEY_BLOCKS, VALUE_BLOCKS = slice(11, 14), slice(40, 43)


def fresh() -> BlockHistory:
    layout = layout_of(SHAPE)
    return BlockHistory(layout, first_shares(layout, 0.25, ordered=False))


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=60))
def test_chances_are_those_of_the_definition(wanted: list[list[bool]]) -> None:
    history = fresh()
    for own in wanted:
        history.note(0, values=False, blocks=KEY_BLOCKS, wanted=np.array(own))

    expected = [averaged([own[block] for own in wanted]) for block in range(3)]
    np.testing.assert_allclose(history.codes[0, KEY_BLOCKS] / STEPS, expected, atol=NEAR)


def test_a_block_that_is_always_or_never_wanted_becomes_certain() -> None:
    """Rounding must not stop it short."""
    history = fresh()
    for _ in range(FIRST_REQUESTS):
        for wanted in ([True, False, False], [False, True, True]):
            history.note(0, values=False, blocks=KEY_BLOCKS, wanted=np.array(wanted))
    for _ in range(200):
        history.note(0, values=False, blocks=KEY_BLOCKS, wanted=np.array([True, False, True]))

    found = history.codes[0, KEY_BLOCKS] / STEPS
    np.testing.assert_allclose(found, [1.0, 0.0, 1.0], atol=NEAR)


def test_keys_and_values_and_layers_are_counted_apart() -> None:
    """Where all keys are read, values have fewer requests that say something, or more."""
    history, wanted = fresh(), np.array([True, False, True])
    before = history.codes.copy()
    for _ in range(4):
        history.note(1, values=True, blocks=VALUE_BLOCKS, wanted=wanted)
    history.note(1, values=False, blocks=KEY_BLOCKS, wanted=wanted)

    assert history.codes[1, KEY_BLOCKS].tolist() == [STEPS, 0, STEPS], "the first one of keys"
    history.note(1, values=False, blocks=KEY_BLOCKS, wanted=~wanted)
    history.note(1, values=True, blocks=VALUE_BLOCKS, wanted=~wanted)

    np.testing.assert_allclose(history.codes[1, KEY_BLOCKS] / STEPS, 0.5, atol=NEAR)
    np.testing.assert_allclose(history.codes[1, VALUE_BLOCKS] / STEPS, [0.8, 0.2, 0.8], atol=NEAR)
    history.codes[1, KEY_BLOCKS] = before[1, KEY_BLOCKS]
    history.codes[1, VALUE_BLOCKS] = before[1, VALUE_BLOCKS]
    assert np.array_equal(history.codes, before), "nothing else has changed"


CODES = arrays.arrays(np.uint8, st.integers(0, 60))
CASES = CODES.flatmap(
    lambda codes: st.tuples(
        st.just(codes),
        arrays.arrays(np.bool_, len(codes)),
        st.sampled_from([0.0, 0.05, 0.2, 1.0, 10.0]) | st.floats(0, 5),
    )
)


@given(CASES)
def test_what_is_likely_keeps_the_bound_and_is_the_likeliest(
    case: tuple[np.ndarray, np.ndarray, float],
) -> None:
    codes, candidates, waste_budget = case
    given_codes, given_candidates = codes.copy(), candidates.copy()

    found = likely_blocks(codes, candidates, waste_budget)

    assert not (found & ~candidates).any(), "others are there, or nobody needs them"
    chances = codes.astype(np.int64)
    in_vain, wanted = (STEPS - chances)[found].sum(), chances[candidates].sum()
    assert in_vain <= waste_budget * wanted
    assert not (found & (chances < round(LEAST_CHANCE * STEPS))).any(), "hardly ever wanted"
    left = candidates & ~found
    if found.any() and left.any():
        assert chances[found].min() > chances[left].max()
    # As many as possible: with the next likeliest ones as well the bound would be broken.
    if left.any() and chances[left].max() >= round(LEAST_CHANCE * STEPS):
        more = candidates & (chances >= chances[left].max())
        assert (STEPS - chances)[more].sum() > waste_budget * wanted
    assert np.array_equal(codes, given_codes) and np.array_equal(candidates, given_candidates)


def test_without_waste_only_what_is_certain_is_read() -> None:
    codes = np.array([STEPS, STEPS - 1, 0, STEPS, 128, STEPS], np.uint8)
    candidates = np.array([True, True, True, False, True, True])

    assert likely_blocks(codes, candidates, 0.0).tolist() == [True, *[False] * 4, True]
    assert not likely_blocks(codes[1:3], candidates[1:3], 0.0).any()


def test_the_bound_is_kept_over_all_layers_together() -> None:
    """Not for each: what is certain in one layer pays for what is not in another."""
    codes = np.array([[STEPS] * 8, [STEPS // 2] * 8], np.uint8)
    candidates = np.ones((2, 8), np.bool_)

    assert not likely_blocks(codes[1], candidates[1], 0.5).any()
    assert likely_blocks(codes, candidates, 0.5).all()
