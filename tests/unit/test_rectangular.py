"""Rectangular attention, against a dense softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.attention.rectangular import rectangular_attention


def dense_attention(
    queries: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool, window: int | None
) -> np.ndarray:
    """One query and one head at a time, as the definition says."""
    q, k, v = (t.double().numpy() for t in (queries, keys, values))
    group = q.shape[1] // k.shape[1]
    output = np.zeros((*q.shape[:2], v.shape[2]))
    for i in range(len(q)):
        position = len(k) - len(q) + i
        first = 0 if window is None else max(0, position - window)
        seen = slice(first, position + 1) if causal else slice(0, len(k))
        for head in range(q.shape[1]):
            logits = k[seen, head // group] @ q[i, head] * scaling
            weights = np.exp(logits - logits.max())
            output[i, head] = weights @ v[seen, head // group] / weights.sum()
    return output


def inputs(
    n: int, kv: int, heads: int, key_heads: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def make(rows: int, count: int, dim: int) -> Tensor:
        return torch.randn(rows, count, dim, generator=generator).to(dtype)

    return make(n, heads, 16), make(kv, key_heads, 16), make(kv, key_heads, 24)


def check(found: Tensor, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


SIZES = [(1, 1), (1, 9), (5, 5), (5, 6), (3, 40), (32, 33)]


@pytest.mark.parametrize(("n", "kv"), SIZES)
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), *((True, own) for own in (None, 0, 1, 4, 100))]
)
def test_equals_the_dense_reference(
    n: int, kv: int, heads: int, key_heads: int, causal: bool, window: int | None
) -> None:
    """A window hides what is further back."""
    tensors = inputs(n, kv, heads, key_heads)

    found = rectangular_attention(*tensors, scaling=0.3, causal=causal, window=window)

    check(found, dense_attention(*tensors, 0.3, causal, window))


def test_scaling_defaults_to_one_over_the_root_of_the_dimension() -> None:
    tensors = inputs(3, 10, 4, 2)

    found = rectangular_attention(*tensors, scaling=None, causal=True)

    check(found, dense_attention(*tensors, 0.25, True, None))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize(("n", "kv"), [(1, 9), (5, 5), (3, 40)])
def test_half_precision_stays_within_its_rounding(
    n: int, kv: int, dtype: torch.dtype, tolerance: float
) -> None:
    tensors = inputs(n, kv, 6, 2, dtype)

    found = rectangular_attention(*tensors, scaling=0.3, causal=True)

    assert found.dtype == dtype
    expected = dense_attention(*tensors, 0.3, True, None)
    np.testing.assert_allclose(found.float().numpy(), expected, rtol=tolerance, atol=tolerance)


def test_keys_of_another_dtype_are_taken_in_that_of_the_queries() -> None:
    """A pool may hold KVs in another precision than the model computes in."""
    queries, keys, values = inputs(3, 10, 4, 2)

    found = rectangular_attention(
        queries, keys.bfloat16(), values.bfloat16(), scaling=0.3, causal=True
    )

    assert found.dtype == torch.float32
    expected = dense_attention(queries, keys.bfloat16(), values.bfloat16(), 0.3, True, None)
    check(found, expected)
