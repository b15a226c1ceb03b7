"""Moving averages of what was selected: which tokens of a segment tend to matter.

Kept per layer, lane and token, updated at every access. Each access says of *every* token whether
it was selected, because the probe stream is read whole (and all keys where a layer falls back), so
the average is not biased towards what happened to be loaded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Weight of the newest access; the first ones count alike, so that few accesses give their mean.
AVERAGE_WEIGHT = 0.1
_MAX_COUNT = 255
# Averages of zeros and ones are kept in steps of 1/255: an error below what a rare access changes.
_STEPS = 255


class TokenHistory:
    """Averages of one segment, [L, lanes, t], in logical order of the tokens.

    `average` is the share of accesses that selected the token. `order_key` is what tokens are
    ordered by: the same, or with `by_importance` (the paper's key) the token's column sum in units
    of the mean over the access's part of the segment. `ssd_bytes` counts what was read for selected
    tokens since the segment got its present order.
    """

    def __init__(
        self, num_layers: int, num_lanes: int, num_tokens: int, *, by_importance: bool = False
    ) -> None:
        self.ssd_bytes = 0
        shape = (num_layers, num_lanes, num_tokens)
        self._selected = np.zeros(shape, np.uint8)
        self._importance = np.zeros(shape, np.float16) if by_importance else None
        self._accesses = np.zeros(num_tokens, np.uint8)
        self._means: npt.NDArray[np.float32] | None = None

    @property
    def average(self) -> npt.NDArray[np.float32]:
        """How likely each token is selected, float32 [L, lanes, t]."""
        average: npt.NDArray[np.float32] = self._selected.astype(np.float32) / np.float32(_STEPS)
        return average

    @property
    def order_key(self) -> npt.NDArray[np.float32]:
        """What tokens are ordered by, descending, float32 [L, lanes, t]."""
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
        self,
        layer: int,
        lane: int,
        start: int,
        num_tokens: int,
        selected: npt.NDArray[np.int64],
        importance: Tensor | None,
    ) -> None:
        """Take in one lane of one layer of an access to the tokens from `start` on.

        Layers and lanes of an access must come in ascending order from 0.

        Args:
            layer: from 0.
            lane: of the layer.
            start: first token of the access, counted from the start of the segment.
            num_tokens: of the access.
            selected: int64, distinct, counted from `start`.
            importance: scores [H, num_tokens], None if there are none: then all count alike.
        """
        stop = start + num_tokens
        part = self._accesses[start:stop]
        self._means = None
        if layer == 0 and lane == 0:
            part += part < _MAX_COUNT
        weight = np.maximum(1.0 / np.maximum(part, 1), AVERAGE_WEIGHT).astype(np.float32)
        seen = np.zeros(num_tokens, np.float32)
        seen[selected] = _STEPS
        average = self._selected[layer, lane, start:stop]
        average[:] = np.rint(_moved(average, seen, weight))
        if self._importance is not None:
            relative = np.ones_like(seen) if importance is None else _relative(importance)
            sums = self._importance[layer, lane, start:stop]
            sums[:] = _moved(sums, relative, weight)

    def token_means(self) -> npt.NDArray[np.float32]:
        """Mean of `average` over layers and lanes, float32 [t]; as of the last access."""
        if self._means is None:
            self._means = self._selected.mean((0, 1), dtype=np.float32) / np.float32(_STEPS)
        return self._means


def _moved(
    average: npt.NDArray[np.generic],
    seen: npt.NDArray[np.float32],
    weight: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    exact = average.astype(np.float32)
    moved: npt.NDArray[np.float32] = exact + weight * (seen - exact)
    return moved


def _relative(importance: Tensor) -> npt.NDArray[np.float32]:
    """Column sums in units of their mean, within the range of float16."""
    summed = importance.sum(0, dtype=torch.float32)
    relative = summed / summed.mean().clamp_min(1e-20)
    return np.minimum(relative.cpu().numpy(), np.float32(6e4))
