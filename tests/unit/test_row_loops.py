"""Codes by a basis: the quantiser, the bytes of a row, and compiled loops that restore rows."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba.core import config

from impress_sglang.codes.coding import Rows
from impress_sglang.codes.rows.basis import Basis
from impress_sglang.codes.rows.coder import GAIN_TABLE, encode_layer
from impress_sglang.codes.rows.row import BOUNDS, CURVES, GAINS, LEVELS, RowLayout
from impress_sglang.loops import heaps, jit, placing
from impress_sglang.loops import rows as loops
from impress_sglang.loops.jit import compiled
from impress_sglang.transfer.basis_codec import BasisCodec
from impress_sglang.transfer.sources import Piece
from tests.unit.codes_factory import check_rows, components_of, random_basis, random_rows, turned

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
    for bits, error in LEAST_ERRORS.items():
        assert errors[bits] == pytest.approx(error, rel=0.01)
    ratios = [high / low for high, low in itertools.pairwise(errors[4:])]
    assert ratios == pytest.approx([4] * len(ratios), rel=0.07)


def descending(max_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    widths = st.lists(st.integers(1, 8), max_size=max_size)
    return widths.map(lambda bits: tuple(sorted(bits, reverse=True)))


@given(descending(40), st.randoms(use_true_random=False))
def test_a_row_is_what_its_description_says(bits: tuple[int, ...], chance: Random) -> None:
    codes = [chance.randrange(2**count) for count in bits]
    gains = [chance.randrange(32) for _ in range(GAINS)]
    word = sum(gain << 5 * i for i, gain in enumerate(gains))
    row = bytearray(word.to_bytes(4, "little"))
    areas: dict[int, list[int]] = {4: [], 2: [], 1: []}
    for code, count in zip(codes, bits, strict=True):
        left = count
        for _, width in PARTS[count]:
            left -= width
            areas[width].append(code >> left & (1 << width) - 1)
    for width, elements in areas.items():
        area = [0] * (-(-len(elements) * width // 8))
        for e, value in enumerate(elements):
            area[e % len(area)] |= value << (e // len(area)) * width
        row += bytes(area)
    packed = RowLayout(bits).pack(*(torch.tensor([part]).byte() for part in (codes, gains)))
    assert bytes(packed[0].numpy()) == bytes(row)


HEADS, KEY_DIM, VALUE_DIM, ROTATED = 3, 10, 7, 6
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(scope="module")
def basis() -> Basis:
    return random_basis((HEADS, KEY_DIM), (HEADS, VALUE_DIM))


@given(descending(150), st.integers(0, 4))
def test_components_are_those_of_the_coder(bits: tuple[int, ...], tokens: int) -> None:
    basis = random_basis((1, 1), (1, 1), [bits])
    rows = random_rows(basis, 0, tokens)
    tables, count = basis.layouts[0].tables(), len(bits)
    parts, found = torch.zeros(tokens, tables.parts).byte(), torch.full((tokens, count), 9.0)
    arrays = tables.areas, tables.runs, tables.bounds, CURVES, GAIN_TABLE
    loops.unpack(rows.numpy(), *arrays, parts.numpy(), found.numpy())
    torch.testing.assert_close(found, components_of(basis, 0, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("rotated", [ROTATED, KEY_DIM])
@pytest.mark.parametrize("gap", [0, 1])
def test_slots_hold_what_the_coder_restores(
    basis: Basis, dtype: torch.dtype, halves: bool, rotated: int, gap: int
) -> None:
    turns = turned(rotated, 21, halves=halves)
    check_rows(basis, turns, 21, dtype, gap=gap, kernels=False)


def test_decoder_restores_what_a_rounding_encoder_returns(basis: Basis) -> None:
    """Bit by bit, also where tokens are restored among others."""
    generator = torch.Generator().manual_seed(3)
    rotation, turns = turned(ROTATED, 20)
    codec = BasisCodec(basis, rotation, kernels=False)
    encoded = decoded = None
    for layer in range(basis.num_layers):
        kvs = [5 * torch.randn(40, HEADS, dim, generator=generator) for dim in (KEY_DIM, VALUE_DIM)]
        rows, encoded = encode_layer(basis, layer, encoded, kvs)
        pools = [torch.zeros(20, HEADS, dim) for dim in (KEY_DIM, VALUE_DIM)]
        into = Rows(pools[0], pools[1], torch.arange(20))
        piece = Piece([rows[7:27]], 0, 0, 20)
        decoded, _ = codec.restore(layer, [piece], into, (decoded, turns))
        torch.testing.assert_close(decoded, encoded[7:27])


def test_the_compiled_loops_are_used_where_numba_is_installed() -> None:
    assert all(hasattr(loop, "nopython_signatures") for loop in (placing.place, heaps.lowest))


def test_loops_are_compiled_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read-only container: no folder for what is compiled."""
    monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", "numba.core.caching.IPythonCacheLocator")

    @compiled("(int64,)")
    def successor(number: int) -> int:
        return number + 1

    assert successor(41) == 42 and hasattr(successor, "nopython_signatures")
    assert "NUMBA_CACHE_DIR" in caplog.text


def test_nothing_is_said_where_nothing_is_to_be_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NUMBA_DISABLE_JIT, for a debugger."""
    monkeypatch.setattr(config, "DISABLE_JIT", 1)
    assert compiled("(int64,)")(abs) is abs and not caplog.text


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_what_was_kept_may_be_damaged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a power failure, files that were just written may be empty."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))

    def successor(number: int) -> int:
        return number + 1

    for warned in (False, True):
        found: Any = compiled("(int64,)")(successor)
        assert found(41) == 42 and hasattr(found, "nopython_signatures")
        assert ("NUMBA_CACHE_DIR" in caplog.text) == warned
        (kept,) = tmp_path.rglob(f"*.{kind}")
        kept.write_bytes(b"")


def test_a_loop_is_compiled_anew_if_one_that_it_calls_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another file."""
    monkeypatch.setattr(jit, "_FOLDER", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    head = "from impress_sglang.loops.jit import compiled\n"
    loop = '@compiled("(int64,)", makes_arrays=False)\ndef {}(number): return {}\n'
    (tmp_path / "outer_loop.py").write_text(
        f"{head}from inner_loop import inner\n" + loop.format("outer", "10 * inner(number)")
    )
    for added, right in ((1, 20), (22, 230), (22, 230)):
        (tmp_path / "inner_loop.py").write_text(head + loop.format("inner", f"number + {added}"))
        for name in ("inner_loop", "outer_loop"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        outer: Any = importlib.import_module("outer_loop").outer
        assert outer(1) == right and hasattr(outer, "nopython_signatures")
