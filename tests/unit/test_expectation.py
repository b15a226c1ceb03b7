"""Chances of blocks: learnt from what requests wanted, and what is worth reading by them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from impress_sglang.importance.averages import AVERAGE_WEIGHT, STEPS
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
from tests.unit.test_history import averaged

BLOCK = 4096
FIRST_REQUESTS = round(1 / AVERAGE_WEIGHT)
# Each update rounds by half a step at most, and later ones forget that with their weight.
NEAR = 1.001 / 2 / AVERAGE_WEIGHT / STEPS

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
    assert history.codes.shape == (shape.num_layers, layout.layer_bytes // BLOCK)
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
