"""Moving averages of token selection: which tokens of a segment matter, and their order.

Each access records for *every* token whether it was selected, because the probe column is read
whole (and all keys where a layer falls back): no average favours tokens that happened to be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops.types import Float32s, Floats, Indices
from impress_sglang.storage.layout import SegmentLayout
from impress_sglang.storage.segment import MappingLists
from impress_sglang.tiers.rules import AVERAGE_WEIGHT

# Averages of zeros and ones are kept as bytes: the error is smaller than the change by an access.
STEPS = 255
_MAX_COUNT = 255


class TokenHistory:
    """Averages of one segment, [L, head groups, t], in logical order of the tokens.

    `average` is the share of accesses that selected the token. Tokens are ordered by `order_key`:
    the average, or with `by_importance` (the paper's key) the token's column sum in units of the
    mean over the access's part of the segment. `ssd_bytes` counts the bytes read for selected
    tokens since the segment got its present order.
    """

    def __init__(
        self, num_layers: int, num_head_groups: int, num_tokens: int, *, by_importance: bool = False
    ) -> None:
        self.ssd_bytes = 0
        shape = (num_layers, num_head_groups, num_tokens)
        self._selected = np.zeros(shape, np.uint8)
        self._importance = np.zeros(shape, np.float16) if by_importance else None
        self.accesses = np.zeros(num_tokens, np.uint8)
        """Number of accesses that covered each token, at most 255."""

    @property
    def average(self) -> Float32s:
        """Probability that each token is selected, float32 [L, head groups, t]."""
        return self._selected.astype(np.float32) / np.float32(STEPS)

    @property
    def order_key(self) -> Float32s:
        """Sort key of the tokens, descending, float32 [L, head groups, t]."""
        key = self._selected if self._importance is None else self._importance
        return key.astype(np.float32)

    def observe(
        self,
        layer: int,
        start: int,
        num_tokens: int,
        selected: Indices,
        first: int,
        importance: Tensor | None,
    ) -> None:
        """Update the averages with one layer of an access; layers come in ascending order from 0.

        The access covers `num_tokens` tokens of the segment from `start` on; the first of these is
        token `first` of the prefix. `selected` int64 [head groups, k] are tokens of the prefix,
        distinct in a head group. `importance` are scores [H, num_tokens], grouped by head group;
        None: all tokens count alike.
        """
        part = slice(start, start + num_tokens)
        accesses = self.accesses[part]
        if layer == 0:
            accesses += accesses < _MAX_COUNT
        weight = np.maximum(1.0 / np.maximum(accesses, 1), AVERAGE_WEIGHT).astype(np.float32)
        average = self._selected[layer, :, part]
        seen = np.zeros(average.shape, np.float32)
        for row, tokens in zip(seen, selected - first, strict=True):
            row[tokens[(tokens >= 0) & (tokens < num_tokens)]] = STEPS
        average[:] = np.rint(average + weight * (seen - average))
        if self._importance is not None:
            sums = self._importance[layer, :, part]
            sums[:] = sums + weight * (_relative(importance, sums.shape) - sums)


def mapping_lists(key: Float32s, node_starts: Sequence[int]) -> MappingLists:
    """Compute mapping lists of the best known order (IMPRESS, 4.4.1): descending key in each node.

    Tokens of different nodes of the tree are never mixed: a request that shares only the first node
    would otherwise read past tokens that its prompt does not have. `node_starts` are the first
    tokens of the nodes, ascending from 0. Returns unsigned [L, head groups, t]: the row of each
    token.
    """
    num_tokens = key.shape[-1]
    mapping = np.empty(key.shape, np.int64)
    for start, stop in zip(node_starts, [*node_starts[1:], num_tokens], strict=True):
        order = np.argsort(-key[..., start:stop], axis=-1, kind="stable")
        rows = np.broadcast_to(np.arange(start, stop), order.shape)
        np.put_along_axis(mapping[..., start:stop], order, rows, axis=-1)
    return mapping.astype(np.dtype("<u2" if num_tokens <= 1 << 16 else "<u4"))


def chunk_shares(average: Float32s, mapping: MappingLists, layout: SegmentLayout) -> Floats:
    """Return the expected share of needed rows of each chunk of a segment, in the order of its ids.

    float64 [chunks of all layers]; probe columns are read whole at each access.
    """
    by_row, shape = np.empty_like(average), layout.shape
    np.put_along_axis(by_row, mapping.astype(np.int64), average, axis=-1)
    starts = np.arange(0, layout.num_tokens, layout.chunk_tokens)
    rows = np.diff([*starts, layout.num_tokens])
    means = np.add.reduceat(by_row.astype(np.float64), starts, axis=-1) / rows
    shares = np.ones((shape.num_layers, len(shape.heads), layout.num_chunks))
    for column in range(1, len(shape.heads)):
        shares[:, column] = means[:, shape.head_group_of(column)]
    return shares.reshape(-1)


def _relative(importance: Tensor | None, shape: tuple[int, ...]) -> Float32s:
    if importance is None:
        return np.ones(shape, np.float32)
    num_head_groups, num_tokens = shape
    summed = importance.reshape(num_head_groups, -1, num_tokens).sum(1, dtype=torch.float32)
    relative = summed / summed.mean(-1, keepdim=True).clamp_min(1e-20)
    return np.minimum(relative.cpu().numpy(), np.float32(6e4))
