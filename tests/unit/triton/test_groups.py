"""The kernel restores coded keys and values as the codec says."""

from __future__ import annotations

import pytest
import torch

from impress_sglang.codes.groups.codec import (
    GROUP_TOKENS,
    GroupLayout,
    code_keys,
    code_values,
    encode_layer,
    restore,
)
from impress_sglang.triton import groups as kernels
from tests.unit.triton.conftest import compile_launches

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64, 64), (3, 80, 48), (2, 128, 64), (2, 96, 80)]


@pytest.mark.parametrize("rate", [5, 6])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((dtype, SHAPES[0]) for dtype in DTYPES), *((torch.float32, own) for own in SHAPES[1:])],
    ids=str,
)
@pytest.mark.parametrize("span", [(0, 150), (70, 75), (100, 129), (10, 10)], ids=str)
def test_slots_hold_what_the_codec_restores(
    device: str,
    span: tuple[int, int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    rate: int,
) -> None:
    """With gaps between groups, and between rows of the pools.

    Bit by bit in float32, where no device contracts a product and a sum to one rounding.
    """
    heads, *dims = shape
    kvs = [torch.randn(150, heads, dim) * 3 + torch.randn(heads, dim) * 10 for dim in dims]
    energy, layout = torch.rand(heads, dims[0]) ** 4, GroupLayout(*shape, rate)
    groups = encode_layer(layout, *kvs, energy)
    groups = torch.nn.functional.pad(groups, (4, 2)).to(device)[:, 4:-2]
    memory = torch.zeros(157, heads + 1, max(dims) + 16, dtype=dtype)
    found, expected = ([memory.clone() for _ in range(2)] for _ in range(2))
    found = [own.to(device) for own in found]
    slots = torch.randperm(157)[slice(*span)]
    first = span[0] // GROUP_TOKENS

    pools = [own[:, :heads, :dim] for own, dim in zip(found, dims, strict=True)]
    kernels.restore(layout, groups[first:], span[0] % GROUP_TOKENS, slots.to(device), *pools)

    coded = code_keys(kvs[0], rate, energy), code_values(kvs[1], rate)
    for pool, right, own, dim in zip(found, expected, coded, dims, strict=True):
        right[slots, :heads, :dim] = restore(own)[slice(*span)].to(dtype)
        # Steps of the dtype at the largest number: the interpreter cuts off, and rounds not.
        exact = dtype == torch.float32 and device == "cpu"
        slack = 0.0 if exact else 4 * torch.finfo(dtype).eps * float(right.abs().max())
        assert torch.allclose(pool.cpu().float(), right.float(), rtol=0, atol=slack)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 48)])
def test_the_kernel_compiles_for_an_h100(dims: tuple[int, int]) -> None:
    layout = GroupLayout(8, *dims, 6)
    groups = torch.zeros(2, layout.group_bytes, dtype=torch.uint8)
    pools = [torch.zeros(9, 8, dim, dtype=torch.bfloat16) for dim in dims]
    (found,) = compile_launches(
        kernels, lambda: kernels.restore(layout, groups, 3, torch.arange(9), *pools)
    ).values()
    assert "st.global" in found.asm["ptx"]
