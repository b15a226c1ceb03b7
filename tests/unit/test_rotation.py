"""Keys that are moved are those that the model would have computed at their new place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from impress_sglang.attention.rotation import KeyRotation

SIZE = 4096


def table(dim: int, *, base: float = 1e4, scale: float = 1.0, factor: float = 1.0) -> Tensor:
    """As of rotary embeddings: cosines and sines [positions, dim], `scale`d as YaRN does."""
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim) / factor
    angles = torch.arange(SIZE, dtype=torch.float64)[:, None] * frequencies
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
    old, new = torch.randint(0, SIZE, (2, 50), generator=generator)
    given = table(dim, **scaled).to(dtype)
    rotation, rows = KeyRotation(lambda count: given, halves=halves), given.float()

    moved = rotation.move(rotated(plain, old, rows, halves=halves), rotation.turns(old, new))

    expected = rotated(plain, new, rows, halves=halves)
    assert torch.allclose(moved, expected, rtol=0, atol=2e-6 * 4)
    assert torch.equal(moved[..., dim:], plain[..., dim:])


def test_half_precision_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(20, 2, 16, generator=generator).bfloat16()
    old, new = torch.randint(0, SIZE, (2, 20), generator=generator)
    rotation = KeyRotation(lambda count: table(16), halves=True)
    turns = rotation.turns(old, new)

    moved = rotation.move(keys, turns)

    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved, rotation.move(keys.float(), turns).bfloat16())


def test_the_table_is_asked_for_all_positions() -> None:
    asked: list[int] = []

    def grow(count: int) -> Tensor:
        asked.append(count)
        return table(16)[:count]

    KeyRotation(grow, halves=True).turns(torch.tensor([3, 99]), torch.tensor([70, 5]))
    assert asked == [100]
