"""Compiled loops restore rows as the coder says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.codes.rows.basis import Basis
from impress_sglang.codes.rows.coder import GAIN_TABLE, encode_layer
from impress_sglang.codes.rows.row import CURVES
from impress_sglang.loops import rows as loops
from impress_sglang.transfer.basis_codec import BasisCodec, RowRestorer
from tests.unit.row_factory import (
    check_restored,
    components_of,
    random_basis,
    random_rows,
    random_turns,
)

HEADS, KEY_DIM, VALUE_DIM, ROTATED = 3, 10, 7, 6
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(scope="module")
def basis() -> Basis:
    return random_basis((HEADS, KEY_DIM), (HEADS, VALUE_DIM))


@given(st.lists(st.integers(1, 8), max_size=150), st.integers(0, 4))
def test_components_are_those_of_the_coder(bits: list[int], tokens: int) -> None:
    basis = random_basis((1, 1), (1, 1), [tuple(sorted(bits, reverse=True))])
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
    own = random_turns(rotated, 21, halves=halves)
    check_restored(basis, own, 21, dtype, gap=gap, kernels=False)


def test_decoder_restores_what_a_rounding_encoder_returns(basis: Basis) -> None:
    """Bit by bit, also where tokens are restored among others."""
    generator = torch.Generator().manual_seed(3)
    rotation = random_turns(ROTATED, 20, halves=True)
    restorer = RowRestorer(BasisCodec(basis, rotation.rotation), torch.device("cpu"), kernels=False)
    encoded = decoded = None
    for layer in range(basis.num_layers):
        kvs = [5 * torch.randn(40, HEADS, dim, generator=generator) for dim in (KEY_DIM, VALUE_DIM)]
        rows, encoded = encode_layer(basis, layer, encoded, kvs)
        pools = [torch.zeros(20, HEADS, dim) for dim in (KEY_DIM, VALUE_DIM)]
        slots = torch.arange(20)
        decoded = restorer.put(layer, rows[7:27], decoded, rotation.turns, slots, *pools)
        torch.testing.assert_close(decoded, encoded[7:27])
