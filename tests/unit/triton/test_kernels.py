"""Kernels restore codes as codecs say, and copy pages from anywhere in memory to anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from impress_sglang.codes.coding import Rows
from impress_sglang.codes.groups.codec import GroupLayout
from impress_sglang.tiers.copying import PageCopier
from impress_sglang.transfer.basis_codec import BasisCodec
from impress_sglang.transfer.sources import Piece
from impress_sglang.triton import groups as group_kernels
from impress_sglang.triton import rows as row_kernels
from tests.unit.codes_factory import check_groups, check_rows, random_basis, random_rows, turned
from tests.unit.triton.conftest import compile_launches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GROUP_SHAPES = [(1, 64, 64), (3, 80, 48), (2, 128, 64), (2, 96, 80)]


@pytest.mark.parametrize("rate", [5, 6])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, GROUP_SHAPES[0]) for dtype in DTYPES),
        *((torch.float32, shape) for shape in GROUP_SHAPES[1:]),
    ],
    ids=str,
)
@pytest.mark.parametrize("span", [(0, 150), (70, 75), (100, 129), (10, 10)], ids=str)
def test_slots_hold_what_groups_say(
    device: str, span: tuple[int, int], shape: tuple[int, int, int], dtype: torch.dtype, rate: int
) -> None:
    """Bit by bit in float32, where no device contracts a product and a sum to one rounding."""
    layout, exact = GroupLayout(*shape, rate), dtype == torch.float32 and device == "cpu"
    # Steps of the dtype at the largest number: the interpreter cuts off, and rounds not.
    eps = 0.0 if exact else 4 * torch.finfo(dtype).eps
    to = {"device": device, "gap": 16, "eps": eps}
    check_groups(group_kernels.restore, layout, slice(*span), dtype, **to)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 48)])
def test_the_kernel_of_groups_compiles_for_an_h100(dims: tuple[int, int]) -> None:
    layout = GroupLayout(8, *dims, 6)
    groups = torch.zeros(2, layout.group_bytes, dtype=torch.uint8)
    pools = [torch.zeros(9, 8, dim, dtype=torch.bfloat16) for dim in dims]
    (found,) = compile_launches(
        group_kernels, lambda: group_kernels.restore(layout, groups, 3, torch.arange(9), *pools)
    ).values()
    assert "st.global" in found.asm["ptx"]


# Heads, dimensions of keys and of values, rotated dimensions.
ROW_SHAPES = [(2, 10, 7, 6), (1, 32, 16, 32), (3, 9, 12, 8)]


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((dtype, ROW_SHAPES[0]) for dtype in DTYPES),
        *((torch.float32, shape) for shape in ROW_SHAPES[1:]),
    ],
    ids=str,
)
def test_slots_hold_what_rows_say(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int, int], tokens: int, halves: bool
) -> None:
    heads, key_dim, value_dim, rotated = shape
    basis = random_basis((heads, key_dim), (heads, value_dim))
    turns = turned(rotated, tokens, halves=halves)
    check_rows(basis, turns, tokens, dtype, gap=1, kernels=True, device=device)


@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (8, 128)])
def test_kernels_of_rows_compile_for_an_h100(heads: int, dim: int) -> None:
    """In layers behind the first."""
    basis = random_basis((heads, dim), (heads, dim), [(8,) * 40] * 2)
    rotation, turns = turned(dim, 9)
    codec = BasisCodec(basis, rotation, kernels=True)
    keys, values = (torch.zeros(9, heads, dim, dtype=torch.bfloat16) for _ in range(2))
    below = torch.zeros(9, 2 * heads * dim, dtype=torch.bfloat16)
    piece, rows = Piece([random_rows(basis, 1, 9)], 0, 0, 9), Rows(keys, values, torch.arange(9))
    found = compile_launches(row_kernels, lambda: codec.restore(1, [piece], rows, (below, turns)))
    assert found.keys() == {"_unpack_kernel", "_restore_kernel"}
    assert all("st.global" in each.asm["ptx"] for each in found.values())
    assert "mma" in found["_restore_kernel"].asm["ptx"]


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("size", [3, 70, 128, 4096, 12_000, 16_384])
def test_pages(device: str, size: int, by_kernel: bool) -> None:
    """Pages of memory of the host and of the device go to memory of both, in one launch."""
    device = device if by_kernel else "cpu"
    chosen = np.random.permutation(12)
    sources, found = torch.randint(0, 256, (2, 2, 12, size), dtype=torch.uint8)
    expected = found.clone()
    for numbers, place in ((chosen[:5], 0), (chosen[5:9], 1)):
        expected[place, numbers[::-1].copy()] = sources[1 - place, torch.from_numpy(numbers)]
    sources, found = (
        [pair[0].to(device), pair[1].pin_memory() if device == "cuda" else pair[1]]
        for pair in (sources, found)
    )
    from_host, from_device = (pages.data_ptr() + chosen * size for pages in reversed(sources))
    to_device, to_host = (pages.data_ptr() + chosen * size for pages in found)
    copier = PageCopier(size, torch.device(device), kernels=by_kernel)
    copier.copy(
        np.concatenate([from_host[:5], from_device[5:9]]),
        np.concatenate([to_device[4::-1], to_host[8:4:-1]]),
    )
    for copied, wanted in zip(found, expected, strict=True):
        assert torch.equal(copied.cpu(), wanted)
