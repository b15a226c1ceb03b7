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
    count, heads, dim = queries.shape
    assert len(positions) == count
    at = torch.from_numpy(positions).to(queries.device)
    scaled = queries.float() * scaling
    peak = scaled.new_full((heads, count, 1), float("-inf"))
    total, weighted = torch.zeros_like(peak), None
    start = 0
    for keys, values in tiles:
        key_heads, stop = keys.shape[1], start + len(keys)
        own_keys = keys.float().permute(1, 2, 0)
        own_values = values.float().transpose(0, 1)
        if weighted is None:
            weighted = scaled.new_zeros(heads, count, values.shape[2])
        for rows in tiles_of(count, QUERY_TILE):
            # Queries before the tile of keys see nothing of it.
            if start > positions[rows.stop - 1]:
                continue
            # Query heads of one key head are next to each other.
            part = scaled[rows].transpose(0, 1).reshape(key_heads, -1, dim)
            logits = torch.bmm(part, own_keys).view(heads, rows.stop - rows.start, -1)
            if stop - 1 > positions[rows.start]:
                keys_at = torch.arange(start, stop, device=logits.device)
                logits.masked_fill_(keys_at > at[rows, None], float("-inf"))
            # After the first tile every query has seen a key, so that its peak is finite.
            old = peak[:, rows]
            new = torch.maximum(old, logits.amax(-1, keepdim=True))
            fade = (old - new).exp_()
            weights = logits.sub_(new).exp_()
            total[:, rows].mul_(fade).add_(weights.sum(-1, keepdim=True))
            added = torch.bmm(weights.view(key_heads, -1, stop - start), own_values)
            weighted[:, rows].mul_(fade).add_(added.view(heads, rows.stop - rows.start, -1))
            old.copy_(new)
        start = stop
        del keys, values, own_keys, own_values
    assert weighted is not None and start > int(positions[-1])
    return (weighted / total).transpose(0, 1).to(queries.dtype)
