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

from impress_sglang import loops
from impress_sglang.importance.averages import STEPS, moved, moved_codes, weights

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
        self._means: npt.NDArray[np.float32] | None = None

    @property
    def average(self) -> npt.NDArray[np.float32]:
        """How likely each token is selected, float32 [L, head groups, t]."""
        average: npt.NDArray[np.float32] = self._selected.astype(np.float32) / np.float32(STEPS)
        return average

    @property
    def order_key(self) -> npt.NDArray[np.float32]:
        """The key by which tokens are ordered, descending, float32 [L, head groups, t]."""
        key = self._selected if self._importance is None else self._importance
        return key.astype(np.float32)

    @property
    def num_bytes(self) -> int:
        """Bytes of the averages."""
        importance = 0 if self._importance is None else self._importance.nbytes
        return self._selected.nbytes + importance + self.accesses.nbytes

    def note(
        self,
        layer: int,
        start: int,
        num_tokens: int,
        selected: npt.NDArray[np.int64],
        first: int,
        importance: Tensor | None,
    ) -> None:
        """Update the averages by one layer of an access to the tokens from `start` on.

        Layers of an access must come in ascending order from 0.

        Args:
            layer: number of the layer, from 0.
            start: first token of the access, counted from the start of the segment.
            num_tokens: number of tokens of the access.
            selected: int64 [head groups, k], contiguous, the selected tokens of a prefix, distinct
                in a head group; those that belong to the access are `first` to `first +
                num_tokens`.
            first: the number of the token `start` in the prefix.
            importance: scores [H, num_tokens], grouped by head group; None if there are none: then
                all tokens count alike.
        """
        stop = start + num_tokens
        part = self.accesses[start:stop]
        if layer == 0:
            part += part < _MAX_COUNT
            self._means = None
        of_fewest, of_most = moved_codes(int(part.min())), moved_codes(int(part.max()))
        if of_fewest is of_most:
            loops.move_averages(
                self._selected[layer], selected, first, first + num_tokens, start, *of_fewest
            )
        else:
            average = self._selected[layer, :, start:stop]
            head_groups, places = np.nonzero((selected >= first) & (selected < first + num_tokens))
            seen = np.zeros(average.shape, np.float32)
            seen[head_groups, selected[head_groups, places] - first] = STEPS
            average[:] = np.rint(moved(average, seen, weights(part)))
        if self._importance is not None:
            sums = self._importance[layer, :, start:stop]
            sums[:] = moved(sums, _relative(importance, sums.shape), weights(part))

    def token_means(self) -> npt.NDArray[np.float32]:
        """Mean of `average` over layers and head groups, float32 [t]; as of the last access."""
        if self._means is None:
            self._means = self._selected.mean((0, 1), dtype=np.float32) / np.float32(STEPS)
        return self._means


def _relative(importance: Tensor | None, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Column sums by head group in units of their mean, within the range of float16."""
    if importance is None:
        return np.ones(shape, np.float32)
    num_head_groups, num_tokens = shape
    summed = importance.reshape(num_head_groups, -1, num_tokens).sum(1, dtype=torch.float32)
    relative = summed / summed.mean(-1, keepdim=True).clamp_min(1e-20)
    return np.minimum(relative.cpu().numpy(), np.float32(6e4))
