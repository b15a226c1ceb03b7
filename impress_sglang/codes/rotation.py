"""Moves keys to other positions, by changing the rotation of rotary embeddings.

A rotary embedding multiplies pairs of elements, as complex numbers, by factors that depend on the
position and are one row of a table. So multiplying a key by the quotient of two rows moves it,
whatever frequencies and scale the table has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class RotationFactors:
    """Factors that rotate keys of n tokens, float32 [n, 1, rotated dimensions / 2]."""

    cos: Tensor
    sin: Tensor

    def to(self, device: torch.device) -> RotationFactors:
        return RotationFactors(self.cos.to(device), self.sin.to(device))


class KeyRotation:
    """Moves keys of a model that encodes positions by rotary embeddings."""

    def __init__(self, table: Callable[[int], Tensor], *, halves: bool) -> None:
        """`table` returns [positions, rotated dimensions] with at least the given number of rows:
        cosines of all frequencies, then their sines.
        """
        self._table = table
        self.halves = halves
        """Whether an element is paired with one of the other half of the rotated elements."""

    def prepare(self, positions: int) -> None:
        """Extend the table to `positions`, so that other threads need not extend it."""
        self._table(positions)

    def factors(self, old: Tensor, new: Tensor) -> RotationFactors:
        """Return factors that move keys from positions `old` to `new`, int64 [n] on the CPU."""
        table = self._table(int(torch.maximum(old, new).max()) + 1)
        old_cos, old_sin = self._rows(table, old)
        cos, sin = self._rows(table, new)
        norm = old_cos * old_cos + old_sin * old_sin
        return RotationFactors(
            (cos * old_cos + sin * old_sin) / norm, (sin * old_cos - cos * old_sin) / norm
        )

    def move(self, keys: Tensor, factors: RotationFactors) -> Tensor:
        """Move keys [n, G, D] to their new positions, in their dtype; computed in float32."""
        half = factors.cos.shape[-1]
        rotated, unrotated = keys[..., : 2 * half].float(), keys[..., 2 * half :]
        if self.halves:
            first, second = rotated[..., :half], rotated[..., half:]
        else:
            first, second = rotated[..., ::2], rotated[..., 1::2]
        moved = (
            first * factors.cos - second * factors.sin,
            second * factors.cos + first * factors.sin,
        )
        rotated = torch.cat(moved, -1) if self.halves else torch.stack(moved, -1).flatten(-2)
        return torch.cat([rotated.to(keys.dtype), unrotated], -1)

    @staticmethod
    def _rows(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = table[positions.to(table.device)].float()[:, None]
        cos, sin = rows.chunk(2, -1)
        return cos, sin
