"""Moving averages of what was selected: which tokens of a segment tend to matter.

Kept per layer and token, updated at every access. Each access says of *every* token whether it was
selected, because the probe keys are read in full (and all keys where a layer falls back), so the
average is not biased towards what happened to be loaded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Weight of the newest access; the first ones count alike, so that few accesses give their mean.
AVERAGE_WEIGHT = 0.1
_MAX_COUNT = 255


class TokenHistory:
    """Averages of one segment, float16 [L, t], in logical order of the tokens.

    `average` is the share of accesses that selected the token. `order_key` is what tokens are
    ordered by: the same, or with `by_importance` (the paper's key) the token's column sum in units
    of the mean over the access's part of the segment. `ssd_bytes` counts what was read for selected
    tokens since the segment got its present order.
    """

    def __init__(self, num_layers: int, num_tokens: int, *, by_importance: bool = False) -> None:
        self.ssd_bytes = 0
        self._selected = np.zeros((num_layers, num_tokens), np.float16)
        self._importance = np.zeros_like(self._selected) if by_importance else None
        self._accesses = np.zeros(num_tokens, np.uint8)
        self._means: npt.NDArray[np.float32] | None = None

    @property
    def average(self) -> npt.NDArray[np.float32]:
        """How likely each token is selected, float32 [L, t]."""
        return self._selected.astype(np.float32)

    @property
    def order_key(self) -> npt.NDArray[np.float32]:
        """What tokens are ordered by, descending, float32 [L, t]."""
        key = self._selected if self._importance is None else self._importance
        return key.astype(np.float32)

    @property
    def accesses(self) -> npt.NDArray[np.uint8]:
        """How often each token was part of an access, at most 255."""
        return self._accesses

    @property
    def num_bytes(self) -> int:
        """Memory of the averages."""
        importance = 0 if self._importance is None else self._importance.nbytes
        return self._selected.nbytes + importance + self._accesses.nbytes

    def note(
        self, layer: int, start: int, selected: npt.NDArray[np.int64], importance: Tensor
    ) -> None:
        """Take in one layer of an access to the tokens from `start` on.

        Layers of an access must come in ascending order from 0.

        Args:
            layer: from 0.
            start: first token of the access, counted from the start of the segment.
            selected: int64, distinct, counted from `start`.
            importance: [Hp, n] scores of the n tokens of the access.
        """
        stop = start + importance.shape[1]
        part = self._accesses[start:stop]
        self._means = None
        if layer == 0:
            part += part < _MAX_COUNT
        weight = np.maximum(1.0 / np.maximum(part, 1), AVERAGE_WEIGHT).astype(np.float32)
        seen = np.zeros(stop - start, np.float32)
        seen[selected] = 1.0
        _update(self._selected[layer, start:stop], seen, weight)
        if self._importance is not None:
            _update(self._importance[layer, start:stop], _relative(importance), weight)

    def token_means(self) -> npt.NDArray[np.float32]:
        """Mean of `average` over layers, float32 [t]; as of the last access."""
        if self._means is None:
            self._means = self._selected.mean(0, dtype=np.float32)
        return self._means


def _update(
    average: npt.NDArray[np.float16], seen: npt.NDArray[np.float32], weight: npt.NDArray[np.float32]
) -> None:
    exact = average.astype(np.float32)
    average[:] = exact + weight * (seen - exact)


def _relative(importance: Tensor) -> npt.NDArray[np.float32]:
    """Column sums in units of their mean, within the range of float16."""
    summed = importance.sum(0, dtype=torch.float32)
    relative = summed / summed.mean().clamp_min(1e-20)
    return np.minimum(relative.cpu().numpy(), np.float32(6e4))
