"""The quantiser of a normal law, and the bytes of a row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.codes.rows.row import BOUNDS, GAINS, LEVELS, RowLayout

# Mean square errors of the best quantisers of 1 to 5 bits (Max 1960, table 1).
LEAST_ERRORS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
# The parts of a code of each number of bits, high ones first: kind and width.
PARTS = {
    8: [(0, 4), (1, 4)],
    7: [(0, 4), (2, 2), (3, 1)],
    6: [(0, 4), (2, 2)],
    5: [(0, 4), (3, 1)],
    4: [(0, 4)],
    3: [(2, 2), (3, 1)],
    2: [(2, 2)],
    1: [(3, 1)],
}


def test_errors_are_the_least_and_fall_by_four_with_each_bit() -> None:
    x = np.linspace(-8, 8, 400_001)
    weight = np.exp(-x * x / 2) / np.exp(-x * x / 2).sum()
    errors = [
        float((weight * (x - levels[np.searchsorted(bounds, x)]) ** 2).sum())
        for levels, bounds in zip(LEVELS, BOUNDS, strict=True)
    ]
    for bits, least in LEAST_ERRORS.items():
        assert errors[bits] == pytest.approx(least, rel=0.01)
    ratios = [high / low for high, low in itertools.pairwise(errors[4:])]
    assert ratios == pytest.approx([4] * len(ratios), rel=0.07)


def descending(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    own = st.lists(st.integers(1, 8), max_size=most)
    return own.map(lambda bits: tuple(sorted(bits, reverse=True)))


def drawn(layout: RowLayout, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (tokens, len(layout.bits)), generator=generator)
    gains = torch.randint(0, 32, (tokens, GAINS), generator=generator)
    return (codes % 2 ** torch.tensor(layout.bits).long()).byte(), gains.byte()


@given(descending(40), st.integers(0, 99))
def test_a_row_is_what_its_description_says(bits: tuple[int, ...], seed: int) -> None:
    """Byte by byte, in Python."""
    layout = RowLayout(bits)
    codes, gains = drawn(layout, 1, seed)
    word = sum(gain << 5 * i for i, gain in enumerate(gains[0].tolist()))
    row = bytearray(word.to_bytes(4, "little"))
    areas: dict[int, list[int]] = {4: [], 2: [], 1: []}
    for code, own in zip(codes[0].tolist(), bits, strict=True):
        left = own
        for _, width in PARTS[own]:
            left -= width
            areas[width].append(code >> left & (1 << width) - 1)
    for width, elements in areas.items():
        area = [0] * (-(-len(elements) * width // 8))
        for e, value in enumerate(elements):
            area[e % len(area)] |= value << (e // len(area)) * width
        row += bytes(area)
    assert bytes(layout.pack(codes, gains)[0].numpy()) == bytes(row)


def test_bits_that_do_not_descend_are_refused() -> None:
    with pytest.raises(AssertionError):
        RowLayout((3, 4))
