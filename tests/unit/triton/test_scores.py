"""Scores from kernels, against the torch reference; all scratch memory begins as NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from impress_sglang.paper.scores import column_sums as oracle
from impress_sglang.triton import scores
from impress_sglang.triton.scores import column_sums
from tests.unit.triton.conftest import compiled

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SCALING = 0.1

# What numpy says of arithmetic with infinities in the interpreter.
pytestmark = pytest.mark.filterwarnings("error:invalid value:RuntimeWarning")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read before it was written, or never written, shows."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return (2 * torch.randn(shape)).to(device, dtype)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=5e-5, atol=1e-6)


class Request:
    """Random queries and keys, and what the reference says of them."""

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
    ) -> None:
        self.heads = tuple(range(key_heads))
        self.queries = random(new, heads, dim, dtype=dtype, device=device)
        self.prefix, self.resident, self.new = (
            random(tokens, key_heads, dim, dtype=dtype, device=device)
            for tokens in (prefix, resident, new)
        )

    def expected(self) -> Tensor:
        return oracle(self.queries, self.prefix, self.resident, self.new, SCALING)

    def found(self, **other: Any) -> Tensor:
        given = {
            "queries": self.queries,
            "prefix_keys": self.prefix,
            "resident_keys": self.resident,
            "new_keys": self.new,
            "heads": self.heads,
            "resident_rows": torch.arange(len(self.resident), device=self.queries.device),
        }
        return column_sums(**{**given, **other}, scaling=SCALING)

    def check(self, **other: Any) -> None:
        """Sums are those of the reference."""
        assert_same(self.found(**other), self.expected())


def in_rows(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The same keys in rows of a pool that is NaN everywhere else, and these rows."""
    pool = keys.new_full((2 * len(keys) + 3, *keys.shape[1:]), math.nan)
    # Where rows begin in memory is not aligned.
    rows = torch.randperm(len(pool), device=keys.device)[1 : len(keys) + 1]
    pool[rows] = keys
    return pool, rows


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
        (6, 40, 33, 6, 2, 80, SINGLE),
        (18, 10, 0, 1, 1, 128, SINGLE),
        (3, 20, 0, 1, 1, 256, SINGLE),
    ],
)
def test_equals_the_reference(
    device: str, n: int, m: int, c: int, heads: int, key_heads: int, dim: int, dtype: torch.dtype
) -> None:
    Request(device, n, m, c, heads, key_heads, dim, dtype).check()


@pytest.mark.parametrize(
    ("m", "c", "dtype"), [(70, 66, BRAIN), (200, 3, HALF), (129, 130, SINGLE), (1, 0, HALF)]
)
def test_resident_keys_are_taken_from_their_rows(
    device: str, m: int, c: int, dtype: torch.dtype
) -> None:
    request = Request(device, 7, m, c, 6, 2, dtype=dtype)
    pool, rows = in_rows(request.resident)
    request.check(resident_keys=pool, resident_rows=rows)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_very_large_logits_do_not_overflow(device: str, dtype: torch.dtype) -> None:
    request = Request(device, 9, 50, 3, 2, 1, dtype=dtype)
    for keys in (request.queries, request.prefix, request.resident, request.new):
        keys *= 100

    found = request.found()

    assert torch.isfinite(found).all()
    assert (found.sum(1) <= 9 * (1 + 1e-5)).all()
    # Of such logits float32 has hardly a digit behind the point.
    torch.testing.assert_close(found, request.expected(), rtol=5e-2, atol=1e-3)


TYPES = {HALF: "*fp16", BRAIN: "*bf16", SINGLE: "*fp32"}


@pytest.mark.skipif(not isinstance(scores.row_sums, triton.JITFunction), reason="interpreted")
@pytest.mark.parametrize(
    ("dtype", "heads", "dim"), [(BRAIN, 8, 128), (HALF, 6, 80), (SINGLE, 2, 256)]
)
def test_kernels_compile_for_hopper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype, heads: int, dim: int
) -> None:
    """The interpreter lets things pass that the compiler does not; no GPU is needed for that."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name in ("row_sums", "weight_sums"):
        kernel, launched = getattr(scores, name), list[Any]()
        with monkeypatch.context() as patch:
            for other in ("row_sums", "weight_sums"):
                patch.setattr(scores, other, Launches(launched if other == name else []))
            Request("cpu", 100, 200, 70, heads, 2, dim, dtype).found()
        ((arguments, constants),) = launched
        constants["WIDEN"] = False
        names = [own for own in kernel.arg_names if own not in constants]
        kinds = {
            own: TYPES[each.dtype]
            if isinstance(each, Tensor)
            else ("i32" if isinstance(each, int) else "fp32")
            for own, each in zip(names, arguments, strict=True)
        }
        aligned = [own for own, kind in kinds.items() if kind[0] == "*"]
        code = compiled(kernel, kinds, constants, aligned)
        assert "tf32" not in code.asm["ptx"]
        assert code.metadata.shared <= 227 * 1024


class Launches:
    """Stands in for a kernel, and notes what it is launched with."""

    def __init__(self, found: list[Any]) -> None:
        self._found = found

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        assert all(grid)
        return lambda *arguments, **constants: self._found.append((arguments, constants))
