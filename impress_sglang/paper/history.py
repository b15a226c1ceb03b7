"""Moving averages of what was selected: which tokens of a segment tend to matter.

Kept per layer, head group and token, updated at every access. Each access tells for *every* token
whether it was selected, because the probe column is read whole (and all keys where a layer falls
back), so the average is not biased towards tokens that happened to be loaded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.loops.types import Float32s, Indices
from impress_sglang.tiers.rules import AVERAGE_WEIGHT

# Averages of zeros and ones are kept as bytes: the error is smaller than the change by an access.
STEPS = 255
_MAX_COUNT = 255


class TokenHistory:
    """Averages of one segment, [L, head groups, t], in logical order of the tokens.

    `average` is the share of accesses that selected the token. Tokens are ordered by `order_key`:
    the same, or with `by_importance` (the paper's key) the token's column sum in units of the mean
    over the access's part of the segment. `ssd_bytes` counts the bytes read for selected tokens
    since the segment got its present order.
    """

    def __init__(
        self, num_layers: int, num_head_groups: int, num_tokens: int, *, by_importance: bool = False
    ) -> None:
        self.ssd_bytes = 0
        shape = (num_layers, num_head_groups, num_tokens)
        self._selected = np.zeros(shape, np.uint8)
        self._importance = np.zeros(shape, np.float16) if by_importance else None
        self.accesses = np.zeros(num_tokens, np.uint8)
        """How often each token was part of an access, at most 255."""
        self._means: Float32s | None = None

    @property
    def average(self) -> npt.NDArray[np.float32]:
        """How likely each token is selected, float32 [L, head groups, t]."""
        return self._selected.astype(np.float32) / np.float32(STEPS)

    @property
    def order_key(self) -> npt.NDArray[np.float32]:
        """The key by which tokens are ordered, descending, float32 [L, head groups, t]."""
        key = self._selected if self._importance is None else self._importance
        return key.astype(np.float32)

    def note(
        self,
        layer: int,
        start: int,
        num_tokens: int,
        selected: Indices,
        first: int,
        importance: Tensor | None,
    ) -> None:
        """Update the averages by one layer of an access to the tokens from `start` on.

        Layers of an access must come in ascending order from 0.

        Args:
            layer: number of the layer, from 0.
            start: first token of the access, counted from the start of the segment.
            num_tokens: number of tokens of the access.
            selected: int64 [head groups, k], the selected tokens of a prefix, distinct in a head
                group; those that belong to the access are `first` to `first + num_tokens`.
            first: the number of the token `start` in the prefix.
            importance: scores [H, num_tokens], grouped by head group; None if there are none: then
                all tokens count alike.
        """
        part = slice(start, start + num_tokens)
        accesses = self.accesses[part]
        if layer == 0:
            accesses += accesses < _MAX_COUNT
            self._means = None
        weight = np.maximum(1.0 / np.maximum(accesses, 1), AVERAGE_WEIGHT).astype(np.float32)
        average = self._selected[layer, :, part]
        seen = np.zeros(average.shape, np.float32)
        for own, wanted in zip(seen, selected - first, strict=True):
            own[wanted[(wanted >= 0) & (wanted < num_tokens)]] = STEPS
        average[:] = np.rint(average + weight * (seen - average))
        if self._importance is not None:
            sums = self._importance[layer, :, part]
            sums[:] = sums + weight * (_relative(importance, sums.shape) - sums)

    def token_means(self) -> Float32s:
        """Mean of `average` over layers and head groups, float32 [t]; as of the last access."""
        if self._means is None:
            self._means = self._selected.mean((0, 1), dtype=np.float32) / np.float32(STEPS)
        return self._means


def _relative(importance: Tensor | None, shape: tuple[int, ...]) -> Float32s:
    """Column sums by head group in units of their mean, within the range of float16."""
    if importance is None:
        return np.ones(shape, np.float32)
    num_head_groups, num_tokens = shape
    summed = importance.reshape(num_head_groups, -1, num_tokens).sum(1, dtype=torch.float32)
    relative = summed / summed.mean(-1, keepdim=True).clamp_min(1e-20)
    return np.minimum(relative.cpu().numpy(), np.float32(6e4))
