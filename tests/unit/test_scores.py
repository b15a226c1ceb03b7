"""Column sums of attention weights, against a dense softmax in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from impress_sglang.paper import scores as scores_module
from impress_sglang.paper.scores import column_sums


def dense_sums(
    queries: Tensor,
    prefix: Tensor,
    resident: Tensor,
    new: Tensor,
    scaling: float,
) -> np.ndarray:
    """Of the columns of the prefix, float64 [Hq, m]; one query and one head at a time."""
    q, p, c, x = (t.double().numpy() for t in (queries, prefix, resident, new))
    num_new, num_heads, _ = q.shape
    group = num_heads // p.shape[1]
    total = np.zeros((num_heads, len(p)))
    for head in range(num_heads):
        key_head = head // group
        for i in range(num_new):
            seen = np.concatenate([c[:, key_head], p[:, key_head], x[: i + 1, key_head]])
            logits = seen @ q[i, head] * scaling
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            total[head] += weights[len(c) : len(c) + len(p)]
    return total


def inputs(
    n: int, m: int, c: int, heads: int, key_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def make(rows: int, count: int) -> Tensor:
        return (2 * torch.randn(rows, count, dim, generator=generator)).to(dtype)

    return make(n, heads), make(m, key_heads), make(c, key_heads), make(n, key_heads)


def check(found: Tensor, expected: np.ndarray) -> None:
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("n", "m", "c"), [(1, 1, 0), (1, 17, 0), (7, 64, 3), (19, 50, 21), (2, 200, 1), (20, 3, 0)]
)
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_dense_reference(
    n: int, m: int, c: int, heads: int, key_heads: int, dtype: torch.dtype
) -> None:
    """The sums are taken in float32, so only the rounding of the inputs counts."""
    tensors = inputs(n, m, c, heads, key_heads, 16, dtype)

    found = column_sums(*tensors, scaling=0.25)

    assert found.shape == (heads, m)
    check(found, dense_sums(*tensors, 0.25))


@pytest.mark.parametrize("block", [1, 2, 7, 16, 17])
@pytest.mark.parametrize("c", [0, 9])
@pytest.mark.parametrize(("weights", "keys"), [(1, 1 << 22), (700, 1 << 22), (1 << 24, 1)])
def test_blocks_of_queries_and_heads_do_not_change_the_sums(
    monkeypatch: pytest.MonkeyPatch, block: int, c: int, weights: int, keys: int
) -> None:
    """More new tokens than one block: causality must hold across the cuts."""
    tensors = inputs(17, 21, c, 4, 2, 16, torch.float32)
    monkeypatch.setattr(scores_module, "QUERY_BLOCKS", (block, block))
    monkeypatch.setattr(scores_module, "MOST_WEIGHTS", weights)
    monkeypatch.setattr(scores_module, "MOST_KEYS", keys)

    found = column_sums(*tensors, scaling=0.25)

    check(found, dense_sums(*tensors, 0.25))


class Sizes(TorchDispatchMode):
    """How many numbers the results of operations have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **kwargs or {})
        self.seen.append(result.numel())
        return result


def test_a_few_queries_do_not_widen_the_keys_of_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(1, 300, 0, 16, 16, 64, torch.bfloat16)
    monkeypatch.setattr(scores_module, "MOST_KEYS", 50_000)

    with Sizes() as sizes:
        column_sums(*tensors, 0.25)

    assert max(sizes.seen) <= 50_000


def test_large_logits_do_not_overflow() -> None:
    large = [100 * own for own in inputs(4, 10, 2, 2, 2, 16, torch.float32)]

    found, expected = column_sums(*large, 0.25), dense_sums(*large, 0.25)

    assert torch.isfinite(found).all()
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-2, atol=1e-6)


def test_who_asks_nothing_weighs_nothing() -> None:
    keys = torch.randn(5, 2, 8)
    sums = column_sums(torch.zeros(0, 4, 8), keys, keys[:0], keys[:0], 1.0)
    assert sums.shape == (4, 5) and not sums.any()
