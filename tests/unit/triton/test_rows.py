"""Kernels restore rows as the coder says."""

from __future__ import annotations

import pytest
import torch

from impress_sglang.transfer.basis_codec import BasisCodec, RowRestorer
from impress_sglang.triton import rows as kernels
from tests.unit.basis_factory import (
    LAYERS,
    check_restored,
    components_of,
    random_basis,
    random_rows,
    random_turns,
)
from tests.unit.triton.conftest import compile_launches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Heads, dimensions of keys and of values, rotated dimensions.
SHAPES = [(2, 10, 7, 6), (1, 32, 16, 32), (3, 9, 12, 8)]


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((dtype, SHAPES[0]) for dtype in DTYPES), *((torch.float32, own) for own in SHAPES[1:])],
    ids=str,
)
def test_slots_hold_what_the_oracle_restores(
    device: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    tokens: int,
    halves: bool,
) -> None:
    heads, key_dim, value_dim, rotated = shape
    basis, own = (
        random_basis((heads, key_dim), (heads, value_dim)),
        random_turns(rotated, tokens, halves=halves),
    )
    check_restored(basis, own, tokens, dtype, gap=1, kernels=True, device=device)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_components_are_those_of_the_coder(device: str, layer: int) -> None:
    """And zeros are behind them."""
    basis = random_basis((1, 4), (1, 3), LAYERS)
    count = len(LAYERS[layer])
    own = random_turns(2, 35)
    codec = BasisCodec(basis, own.rotation)
    tables = RowRestorer(codec, torch.device(device), kernels=True)._layers[layer]
    rows = random_rows(basis, layer, 35)
    found = kernels.unpack(rows.to(device), tables)
    assert not found.shape[1] % kernels.ALIGNED and not found[:, count:].any()
    wanted = components_of(basis, layer, rows).bfloat16()
    torch.testing.assert_close(found[:, :count].cpu(), wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (8, 128)])
def test_kernels_compile_for_an_h100(heads: int, dim: int) -> None:
    """In layers behind the first."""
    basis, own = random_basis((heads, dim), (heads, dim), [(8,) * 40] * 2), random_turns(dim, 9)
    restorer = RowRestorer(BasisCodec(basis, own.rotation), torch.device("cpu"), kernels=True)
    pools = [torch.zeros(9, heads, dim, dtype=torch.bfloat16) for _ in range(2)]
    below = torch.zeros(9, 2 * heads * dim, dtype=torch.bfloat16)
    rows, slots = random_rows(basis, 1, 9), torch.arange(9)
    found = compile_launches(
        kernels, lambda: restorer.put(1, rows, below, own.turns, slots, *pools)
    )
    assert found.keys() == {"_unpack_kernel", "_restore_kernel"}
    assert all("st.global" in each.asm["ptx"] for each in found.values())
    assert "mma" in found["_restore_kernel"].asm["ptx"]
