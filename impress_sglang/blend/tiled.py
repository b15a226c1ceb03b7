"""Causal attention over keys that come in tiles, in memory that does not grow with their number.

For KVs that do not fit on the device together: only one tile is on it at a time. The softmax is
kept as a running maximum and sum (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), all in
float32, so that the result is that of `rectangular_attention` up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Tokens of a tile of keys, and of queries that are scored with it at once: they bound the scores to
# 256 x 1,024 per query head, 32 MiB for 32 heads.
KEY_TILE = 1024
QUERY_TILE = 256


def tiles_of(count: int, size: int = KEY_TILE) -> Iterator[slice]:
    """The tiles of `count` tokens, in order; the last one may be shorter."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def tiled_attention(
    queries: Tensor,
    tiles: Iterable[tuple[Tensor, Tensor]],
    *,
    positions: npt.NDArray[np.int64],
    scaling: float,
) -> Tensor:
    """Attention of the tokens at some positions over all tokens up to their own.

    Args:
        queries: [n, Hq, D].
        tiles: keys [t, Hk, D] and values [t, Hk, Dv] of the positions from 0 on, without a gap, on
            the device of the queries; each is released before the next one is requested. Hq is a
            multiple of Hk.
        positions: int64 [n] of the queries, ascending.
        scaling: factor of the logits.

    Returns:
        [n, Hq, Dv] in the dtype of the queries.
    """
    softmax, position = None, 0
    for keys, values in tiles:
        if softmax is None:
            softmax = _RunningSoftmax(queries, keys.shape[1], values.shape[2], positions, scaling)
        softmax.add(keys.float().permute(1, 2, 0), values.float().transpose(0, 1), position)
        position += len(keys)
        del keys, values
    assert softmax is not None and position > int(positions[-1])
    return softmax.output().to(queries.dtype)


class _RunningSoftmax:
    """Attention over the tiles so far: for each query head and query a peak, a sum and values.

    Invariant: after the first tile every query has seen a key, so that its peak is finite.
    """

    def __init__(
        self,
        queries: Tensor,
        key_heads: int,
        value_dim: int,
        positions: npt.NDArray[np.int64],
        scaling: float,
    ) -> None:
        count, heads, dim = queries.shape
        assert len(positions) == count
        grouped = queries.view(count, key_heads, heads // key_heads, dim).permute(1, 2, 0, 3)
        self._queries = grouped.float() * scaling
        self._positions = torch.from_numpy(positions).to(queries.device)
        # For each tile of queries, its rows, its first and its last position.
        self._ends = [
            (rows, int(positions[rows.start]), int(positions[rows.stop - 1]))
            for rows in tiles_of(count, QUERY_TILE)
        ]
        self._peak = self._queries.new_full((*grouped.shape[:3], 1), float("-inf"))
        self._sum = torch.zeros_like(self._peak)
        self._weighted = self._queries.new_zeros(*grouped.shape[:3], value_dim)

    def add(self, keys: Tensor, values: Tensor, position: int) -> None:
        """Add keys [Hk, D, t] and values [Hk, t, Dv] of the positions from `position` on."""
        for rows, first, last in self._ends:
            # Queries before the tile of keys see nothing of it.
            if position <= last:
                hides = position + keys.shape[2] - 1 > first
                self._add_to(rows, keys, values, position if hides else None)

    def _add_to(self, rows: slice, keys: Tensor, values: Tensor, position: int | None) -> None:
        """Add keys for some queries; `position`: of the first key if some are masked, else None."""
        queries = self._queries[:, :, rows]
        heads, group, count, _ = queries.shape
        logits = torch.bmm(queries.flatten(1, 2), keys).view(heads, group, count, -1)
        if position is not None:
            keys_at = torch.arange(position, position + keys.shape[2], device=logits.device)
            logits.masked_fill_(keys_at > self._positions[rows, None], float("-inf"))
        old = self._peak[:, :, rows]
        peak = torch.maximum(old, logits.amax(-1, keepdim=True))
        fade = (old - peak).exp_()
        weights = logits.sub_(peak).exp_()
        self._sum[:, :, rows].mul_(fade).add_(weights.sum(-1, keepdim=True))
        added = torch.bmm(weights.flatten(1, 2), values).view(heads, group, count, -1)
        self._weighted[:, :, rows].mul_(fade).add_(added)
        old.copy_(peak)

    def output(self) -> Tensor:
        """float32 [n, Hq, Dv]."""
        return (self._weighted / self._sum).permute(2, 0, 1, 3).flatten(1, 2)
