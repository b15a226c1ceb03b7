"""Keys at other positions: what rotary embeddings did to them is done again for the new place.

A rotary embedding multiplies pairs of elements, as complex numbers, by a factor of the position
that is one row of a table. So a key moves by the quotient of two rows, whatever frequencies and
scale the table has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """By what the keys of some tokens are multiplied: float32 [n, 1, rotated dimensions / 2]."""

    cos: Tensor
    sin: Tensor


class KeyRotation:
    """Moves keys of a model whose positions are rotary embeddings."""

    def __init__(self, table: Callable[[int], Tensor], *, halves: bool) -> None:
        """How the model rotates.

        Args:
            table: gives [positions, rotated dimensions], at least so many rows: cosines of all
                frequencies, then their sines.
            halves: an element and that half of the dimensions further on are a pair (NeoX), else
                neighbours are.
        """
        self._table = table
        self._halves = halves

    def turns(self, old: Tensor, new: Tensor) -> Turns:
        """What moves keys from the positions `old` to `new`, int64 [n] on the CPU."""
        table = self._table(int(torch.maximum(old, new).max()) + 1)
        old_cos, old_sin = self._rows(table, old)
        cos, sin = self._rows(table, new)
        norm = old_cos * old_cos + old_sin * old_sin
        return Turns((cos * old_cos + sin * old_sin) / norm, (sin * old_cos - cos * old_sin) / norm)

    def move(self, keys: Tensor, turns: Turns) -> Tensor:
        """Keys [n, G, D] at their new positions, in their dtype; computed in float32."""
        half = turns.cos.shape[-1]
        rotated, rest = keys[..., : 2 * half].float(), keys[..., 2 * half :]
        if self._halves:
            first, second = rotated[..., :half], rotated[..., half:]
        else:
            first, second = rotated[..., ::2], rotated[..., 1::2]
        moved = (
            first * turns.cos - second * turns.sin,
            second * turns.cos + first * turns.sin,
        )
        rotated = torch.cat(moved, -1) if self._halves else torch.stack(moved, -1).flatten(-2)
        return torch.cat([rotated.to(keys.dtype), rest], -1)

    @staticmethod
    def _rows(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = table[positions.to(table.device)].float()[:, None]
        cos, sin = rows.chunk(2, -1)
        return cos, sin
