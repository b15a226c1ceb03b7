"""How a stored KV was computed, and what of that a request takes."""

from __future__ import annotations

import dataclasses
import sys

from impress_sglang.options import EXACT_BITS

# Retention, bits and share of what is exact.
_ALL = 1.0, EXACT_BITS, 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """The approximations that a KV rests on.

    `depth` counts them: 0 is exact, 1 was computed after an approximation of an exact prefix, 2
    after one of a prefix of depth 1. `retention` is the smallest share of a prefix that any of them
    used, 1.0 if all was used; `bits` the fewest bits per element, on average, that any of them had.
    `share` is the smallest share that was computed again where tokens were reused that are stored
    behind other ones, 1.0 if none were: that has been blended.
    """

    depth: int = 0
    retention: float = 1.0
    bits: float = EXACT_BITS
    share: float = 1.0

    def __post_init__(self) -> None:
        assert self.depth >= 0 and 0.0 < self.retention <= 1.0 and 0.0 < self.bits <= EXACT_BITS
        assert 0.0 <= self.share <= 1.0
        assert self.depth or (self.retention, self.bits, self.share) == _ALL

    @property
    def blended(self) -> bool:
        """Whether it rests on tokens that are stored behind other ones."""
        return self.share < 1.0

    @property
    def rank(self) -> tuple[float, ...]:
        """By which the best goes first; what was blended errs more than all that was not."""
        return -self.share, self.depth, -self.retention, -self.bits

    def suffices(self, least: Quality) -> bool:
        """Whether a request that takes `least` and better takes this."""
        return (
            self.depth <= least.depth
            and self.retention >= least.retention
            and self.bits >= least.bits
            and self.share >= least.share
        )

    def after(self, retention: float, bits: float = EXACT_BITS, share: float = 1.0) -> Quality:
        """Of what is computed after a prefix of this quality, of which so much is used.

        `share`: of tokens between that are stored behind other ones so much is computed again.
        """
        own = retention, bits, share
        if own == _ALL:
            return self
        return self.worst(Quality(self.depth + 1, *own))

    def worst(self, other: Quality) -> Quality:
        """Of what rests on both."""
        return Quality(
            max(self.depth, other.depth),
            min(self.retention, other.retention),
            min(self.bits, other.bits),
            min(self.share, other.share),
        )


EXACT = Quality()
# Everything suffices it.
ANYTHING = Quality(sys.maxsize, sys.float_info.min, sys.float_info.min, 0.0)
