"""Compiled loops restore rows as the coder says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.codes.rows.basis import Basis
from impress_sglang.codes.rows.coder import (
    GAIN_TABLE,
    encode_layer,
    kvs_of,
)
from impress_sglang.codes.rows.row import CURVES
from impress_sglang.loops import rows as loops
from impress_sglang.transfer.basis_codec import BasisCodec, RowRestorer
from tests.unit.row_factory import (
    components_of,
    decode_layer,
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
@pytest.mark.parametrize("contiguous", [True, False])
def test_slots_hold_what_the_coder_restores(
    basis: Basis, dtype: torch.dtype, halves: bool, rotated: int, contiguous: bool
) -> None:
    check(basis, 21, dtype, rotated, halves=halves, contiguous=contiguous)


def check(
    basis: Basis,
    tokens: int,
    dtype: torch.dtype,
    rotated: int,
    *,
    halves: bool,
    contiguous: bool,
) -> None:
    """Restore all layers into slots here and there; everything else stays as it was."""
    own = random_turns(rotated, tokens, halves=halves)
    restorer = RowRestorer(BasisCodec(basis, own.rotation), torch.device("cpu"), kernels=False)
    generator = torch.Generator().manual_seed(1)
    slots = torch.randperm(tokens + 5, generator=generator)[:tokens]
    below = wanted = None
    for layer in range(basis.num_layers):
        rows = random_rows(basis, layer, tokens)
        pools = [
            torch.randn(tokens + 5, HEADS, dim + (not contiguous), generator=generator).to(dtype)
            for dim in (KEY_DIM, VALUE_DIM)
        ]
        expected = [pool.clone() for pool in pools]
        views = [
            [pool[..., :dim] for pool, dim in zip(some, (KEY_DIM, VALUE_DIM), strict=True)]
            for some in (pools, expected)
        ]
        below = restorer.put(layer, rows, below, own.turns, slots, *views[0])
        wanted = decode_layer(basis, layer, wanted, rows)
        assert below.dtype == torch.bfloat16
        torch.testing.assert_close(below, wanted)
        keys, values = kvs_of(basis, layer, wanted)
        views[1][0][slots] = own.rotation.move(keys, own.turns).to(dtype)
        views[1][1][slots] = values.to(dtype)
        for found, one in zip(pools, expected, strict=True):
            # A product and a sum may be rounded once.
            torch.testing.assert_close(found, one, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


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
