"""Which tokens of a coded layer go where, for the code that restores and raises them.

Stage: load.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from impress_sglang.codes.planes.codec import GROUP_TOKENS, NUM_PLANES
from impress_sglang.codes.planes.layout import CodeLayout
from impress_sglang.loops import areas
from impress_sglang.loops.types import Indices


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


def planes_by_unit(
    raised: Tensor,
    layout: CodeLayout,
    origin: int,
    *,
    begin: int = 0,
    step: int = 1,
    none: int = -1,
) -> Indices:
    """The planes that are added, one row for each unit.

    Args:
        raised: int64 [n, 3] on the CPU, distinct: plane, head and unit.
        layout: of the layer.
        origin: the token from which tokens are counted.
        begin: what stands for the plane in row 0 of `raised`.
        step: from there to what stands for the one in the next row.
        none: what stands for a plane that is not there.

    Returns:
        int64 [units, 2 + NUM_PLANES]: head, first token, and what stands for each plane.
    """
    return areas.planes_of_units(
        raised.numpy(),
        layout.num_heads,
        layout.num_units,
        NUM_PLANES,
        layout.unit_tokens,
        origin,
        begin,
        step,
        none,
    )
