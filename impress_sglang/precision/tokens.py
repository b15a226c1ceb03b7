"""Which tokens of a coded layer go where, for the code that restores and raises them.

Stage: load.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from impress_sglang.precision.codec import GROUP_TOKENS, NUM_PLANES
from impress_sglang.precision.layout import CodeLayout


@dataclasses.dataclass(frozen=True, slots=True)
class CodedTokens:
    """The tokens [start, start + len(slots)) of a coded layer, and where they go.

    Attributes:
        layout: of the layer.
        groups: uint8 [groups, group_bytes], the groups of these tokens.
        start: the first token, counted from the start of the layer.
        slots: int64 [n] on the device of `groups` and of the pools, distinct.
    """

    layout: CodeLayout
    groups: Tensor
    start: int
    slots: Tensor

    def __post_init__(self) -> None:
        assert self.first_token + len(self.groups) * GROUP_TOKENS >= self.start + len(self.slots)

    @property
    def first_token(self) -> int:
        """The first token of the first group."""
        return self.start // GROUP_TOKENS * GROUP_TOKENS


def planes_by_unit(raised: Tensor, layout: CodeLayout, origin: int) -> Tensor:
    """The planes that are added, one row for each unit.

    Args:
        raised: int64 [n, 3] on the CPU, distinct: plane, head and unit.
        layout: of the layer.
        origin: the token from which tokens are counted.

    Returns:
        int64 [units, 2 + NUM_PLANES]: head, first token, and for each plane its row in `raised`, -1
        if it is not there.
    """
    planes, heads, numbers = raised.numpy().T
    # On whole rows, `unique` takes four times as long.
    places, entry_of = np.unique(heads * layout.num_units + numbers, return_inverse=True)
    units = np.full((len(places), 2 + NUM_PLANES), -1)
    units[:, 0], numbers = np.divmod(places, layout.num_units)
    units[:, 1] = numbers * layout.unit_tokens - origin
    units[entry_of, 2 + planes] = np.arange(len(raised))
    return torch.from_numpy(units)
