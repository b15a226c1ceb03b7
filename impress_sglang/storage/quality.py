"""How a stored KV was computed, and what of that a request takes."""

from __future__ import annotations

import dataclasses
import sys

from impress_sglang.options import EXACT_BITS


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """The approximations that a KV rests on.

    `depth` counts them: 0 is exact, 1 was computed after an approximation of an exact prefix, 2
    after one of a prefix of depth 1. `retention` is the smallest share of a prefix that any of them
    used, 1.0 if all was used; `bits` the fewest bits per element, on average, that any of them had.
    """

    depth: int = 0
    retention: float = 1.0
    bits: float = EXACT_BITS

    def __post_init__(self) -> None:
        assert self.depth >= 0 and 0.0 < self.retention <= 1.0 and 0.0 < self.bits <= EXACT_BITS
        assert self.depth or (self.retention == 1.0 and self.bits == EXACT_BITS)

    def suffices(self, least: Quality) -> bool:
        """Whether a request that takes `least` and better takes this."""
        return (
            self.depth <= least.depth
            and self.retention >= least.retention
            and self.bits >= least.bits
        )

    def after(self, retention: float, bits: float = EXACT_BITS) -> Quality:
        """Of what is computed after a prefix of this quality, of which so much is used."""
        if retention == 1.0 and bits == EXACT_BITS:
            return self
        return Quality(self.depth + 1, min(self.retention, retention), min(self.bits, bits))

    def worst(self, other: Quality) -> Quality:
        """Of what rests on both."""
        return Quality(
            max(self.depth, other.depth),
            min(self.retention, other.retention),
            min(self.bits, other.bits),
        )


EXACT = Quality()
# Everything suffices it.
ANYTHING = Quality(sys.maxsize, sys.float_info.min, sys.float_info.min)
