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

    With the key `selected` an entry is the share of accesses that selected the token; with
    `importance` (the paper's) it is the token's column sum in units of the mean of all tokens.
    `ssd_bytes` counts what was read for selected tokens since the segment got its present order.
    """

    def __init__(self, num_layers: int, num_tokens: int, key: str) -> None:
        self.ssd_bytes = 0
        self._key = key
        self._average = np.zeros((num_layers, num_tokens), np.float16)
        self._accesses = np.zeros(num_tokens, np.uint8)
        self._means: npt.NDArray[np.float32] | None = None

    @property
    def average(self) -> npt.NDArray[np.float32]:
        """The averages, float32 [L, t]."""
        return self._average.astype(np.float32)

    @property
    def accesses(self) -> npt.NDArray[np.uint8]:
        """How often each token was part of an access, at most 255."""
        return self._accesses

    @property
    def num_bytes(self) -> int:
        """Memory of the averages."""
        return self._average.nbytes + self._accesses.nbytes

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
        average = self._average[layer, start:stop].astype(np.float32)
        average += weight * (self._observed(selected, importance) - average)
        self._average[layer, start:stop] = average

    def token_means(self) -> npt.NDArray[np.float32]:
        """Mean over layers, float32 [t], at most 1; as of the last access."""
        if self._means is None:
            self._means = np.minimum(self._average.mean(0, dtype=np.float32), np.float32(1.0))
        return self._means

    def _observed(
        self, selected: npt.NDArray[np.int64], importance: Tensor
    ) -> npt.NDArray[np.float32]:
        if self._key == "selected":
            seen = np.zeros(importance.shape[1], np.float32)
            seen[selected] = 1.0
            return seen
        summed = importance.sum(0, dtype=torch.float32)
        relative = summed / summed.mean().clamp_min(1e-20)
        return np.minimum(relative.cpu().numpy(), np.float32(6e4))
