"""Rectangular attention, against a dense softmax in float64.

Keys that are moved are those that the model would have computed at their new place.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.plugin.rectangular import rectangular_attention
from tests.unit.reading import dense_weights

SIZES = [(1, 1), (1, 9), (5, 5), (5, 6), (3, 40), (32, 33)]


@pytest.mark.parametrize(("n", "kv"), SIZES)
@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), *((True, width) for width in (None, 0, 1, 4, 100))]
)
def test_equals_the_dense_reference(
    n: int, kv: int, heads: int, key_heads: int, causal: bool, window: int | None
) -> None:
    """A window hides what is further back."""
    queries, keys, values = (
        torch.randn(size) for size in ((n, heads, 16), (kv, key_heads, 16), (kv, key_heads, 24))
    )
    seen = {"causal": causal, "window": window}

    found = rectangular_attention(queries, keys, values, scaling=0.3, **seen)

    weights = torch.from_numpy(dense_weights(queries, keys, 0.3, **seen))
    of_heads = values.double().repeat_interleave(heads // key_heads, 1)
    right = torch.einsum("nhm,mhd->nhd", weights, of_heads).float()
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


POSITIONS = 4096


def table(dim: int, *, base: float = 1e4, scale: float = 1.0, factor: float = 1.0) -> Tensor:
    """As of rotary embeddings: cosines and sines [positions, dim], `scale`d as YaRN does."""
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim) / factor
    angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequencies
    return scale * torch.cat([angles.cos(), angles.sin()], -1).float()


def rotated(keys: Tensor, positions: Tensor, cos_sin: Tensor, *, halves: bool) -> Tensor:
    """What a model does to keys [n, G, D], element by element."""
    dim = cos_sin.shape[1]
    out = keys.clone()
    for row, position in enumerate(positions.tolist()):
        for pair in range(dim // 2):
            i, j = (pair, pair + dim // 2) if halves else (2 * pair, 2 * pair + 1)
            cos, sin = cos_sin[position, pair], cos_sin[position, pair + dim // 2]
            out[row, :, i] = keys[row, :, i] * cos - keys[row, :, j] * sin
            out[row, :, j] = keys[row, :, j] * cos + keys[row, :, i] * sin
    return out


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("dim", [16, 8])
@pytest.mark.parametrize("scaled", [{}, {"scale": 1.37}, {"factor": 8.0, "base": 5e5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_key_is_the_computed_one(
    halves: bool, dim: int, scaled: dict[str, float], dtype: torch.dtype
) -> None:
    """Of whole and of partly rotated heads, forward and backward.

    On a CPU the table has the dtype of the model: a quotient of its own rows undoes that.
    """
    generator = torch.Generator().manual_seed(dim)
    plain = torch.randn(50, 3, 16, generator=generator)
    old, new = torch.randint(0, POSITIONS, (2, 50), generator=generator)
    given = table(dim, **scaled).to(dtype)
    rotation, rows = KeyRotation(lambda count: given, halves=halves), given.float()

    moved = rotation.move(rotated(plain, old, rows, halves=halves), rotation.factors(old, new))

    expected = rotated(plain, new, rows, halves=halves)
    assert torch.allclose(moved, expected, rtol=0, atol=2e-6 * 4)
    assert torch.equal(moved[..., dim:], plain[..., dim:])
