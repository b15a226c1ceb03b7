"""Column sums of attention weights: torch and kernels, against a dense softmax in float64.

All scratch memory begins as NaN.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from impress_sglang.paper import scores as reference
from impress_sglang.triton import scores
from tests.unit.reading import dense_sums
from tests.unit.triton.conftest import compile_launches

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SCALING = 0.1
# Relative and absolute errors of float32: only inputs are rounded otherwise.
NEAR = {"torch": (2e-5, 1e-7), "kernels": (5e-5, 1e-6)}

# What numpy says of arithmetic with infinities in the interpreter.
pytestmark = pytest.mark.filterwarnings("error:invalid value:RuntimeWarning")
each_kind = pytest.mark.parametrize("kind", NEAR)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read before it was written, or never written, shows."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


class Request:
    """Random queries and keys; resident keys stand in scattered rows of a pool."""

    def __init__(
        self,
        device: str,
        new: int,
        prefix: int,
        resident: int,
        heads: int,
        key_heads: int,
        dim: int = 64,
        dtype: torch.dtype = HALF,
        size: float = 2.0,
    ) -> None:
        def drawn(tokens: int, count: int) -> Tensor:
            return (size * torch.randn(tokens, count, dim)).to(device, dtype)

        self.queries, self.prefix = drawn(new, heads), drawn(prefix, key_heads)
        # Of all heads, the prefix has the first ones.
        self.resident, self.new = drawn(resident, key_heads + 1), drawn(new, key_heads + 1)

    def expected(self) -> np.ndarray:
        of_prefix = slice(self.prefix.shape[1])
        keys = self.prefix, self.resident[:, of_prefix], self.new[:, of_prefix]
        return dense_sums(self.queries, *keys, SCALING)

    def found(self, kind: str) -> Tensor:
        score = reference.column_sums if kind == "torch" else scores.column_sums
        count = len(self.resident)
        # All other rows are NaN, and where rows begin in memory is not aligned.
        pool = self.new.new_full((2 * count + 3, *self.new.shape[1:]), math.nan)
        rows = torch.randperm(len(pool), device=pool.device)[1 : count + 1]
        pool[rows] = self.resident
        return score(self.queries, self.prefix, pool, rows, self.new, scaling=SCALING)

    def check(self, kind: str) -> None:
        found, (relative, absolute) = self.found(kind), NEAR[kind]
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.cpu(), self.expected(), rtol=relative, atol=absolute)


@each_kind
@pytest.mark.parametrize(
    ("n", "m", "c", "heads", "key_heads", "dim", "dtype"),
    [
        (5, 70, 10, 3, 3, 64, HALF),
        (1, 65, 0, 4, 1, 96, HALF),
        (1, 1, 0, 1, 1, 16, HALF),
        (20, 130, 3, 8, 2, 128, BRAIN),
        (50, 64, 64, 3, 1, 80, BRAIN),
        (150, 30, 0, 2, 2, 64, HALF),
        (40, 200, 70, 5, 1, 64, BRAIN),
        (17, 40, 9, 3, 1, 256, HALF),
        (7, 129, 130, 6, 2, 64, SINGLE),
        (6, 40, 33, 6, 2, 80, SINGLE),
        (18, 10, 0, 1, 1, 128, SINGLE),
        (3, 20, 0, 1, 1, 256, SINGLE),
        (20, 3, 0, 6, 2, 16, SINGLE),
        (0, 5, 0, 4, 2, 8, SINGLE),
    ],
)
def test_sums_are_those_of_a_dense_softmax(
    device: str,
    kind: str,
    n: int,
    m: int,
    c: int,
    heads: int,
    key_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    Request(device, n, m, c, heads, key_heads, dim, dtype).check(kind)


@each_kind
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_very_large_logits_do_not_overflow(device: str, kind: str, dtype: torch.dtype) -> None:
    request = Request(device, 9, 50, 3, 2, 1, dtype=dtype, size=200.0)

    found = request.found(kind)

    assert torch.isfinite(found).all()
    # A GPU computes logits of a kernel twice, with products in another order.
    assert (found.sum(1) <= 9 * (1 + (5e-3 if kind == "kernels" else 1e-5))).all()
    # Of such logits float32 has hardly a digit behind the point.
    near = {"rtol": 5e-2, "atol": 1e-3} if kind == "kernels" else {"rtol": 1e-2, "atol": 1e-6}
    np.testing.assert_allclose(found.cpu(), request.expected(), **near)


@pytest.mark.parametrize("block", [1, 2, 7, 16, 17])
@pytest.mark.parametrize("c", [0, 9])
@pytest.mark.parametrize("weights", [1, 700])
def test_blocks_of_queries_do_not_change_the_sums(
    monkeypatch: pytest.MonkeyPatch, block: int, c: int, weights: int
) -> None:
    """More new tokens than one block: causality must hold across the cuts."""
    monkeypatch.setattr(reference, "MIN_QUERIES", block)
    monkeypatch.setattr(reference, "MAX_WEIGHTS", weights)
    Request("cpu", 17, 21, c, 4, 2, 16, SINGLE).check("torch")


@pytest.mark.skipif(not isinstance(scores.row_sums, triton.JITFunction), reason="interpreted")
@pytest.mark.parametrize(
    ("dtype", "heads", "dim"), [(BRAIN, 8, 128), (HALF, 6, 80), (SINGLE, 2, 256)]
)
def test_kernels_compile_for_hopper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype, heads: int, dim: int
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    request = Request("cpu", 100, 200, 70, heads, 2, dim, dtype)
    found = compile_launches(scores, lambda: request.found("kernels"))
    assert found.keys() == {"row_sums", "weight_sums"}
    for code in found.values():
        assert "tf32" not in code.asm["ptx"]
        assert code.metadata.shared <= 227 * 1024
