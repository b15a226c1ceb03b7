"""Quality of stored KVs, and the quality that a request accepts."""

from __future__ import annotations

import dataclasses
import sys

from impress_sglang.config import EXACT_BITS

# Bits and share of exact KVs.
_ALL = EXACT_BITS, 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """The approximations that a KV rests on.

    `depth` counts them: 0 is exact, 1 was computed after an approximation of an exact prefix, 2
    after one of a prefix of depth 1. `bits` is the lowest average per element of any of them.
    `recompute_ratio` is the lowest recomputed share of reused tokens that are stored after other
    tokens: such a KV is blended. It is 1.0 if there were none.
    """

    depth: int = 0
    bits: float = EXACT_BITS
    recompute_ratio: float = 1.0

    def __post_init__(self) -> None:
        assert self.depth >= 0 and 0.0 < self.bits <= EXACT_BITS
        assert 0.0 <= self.recompute_ratio <= 1.0
        assert self.depth or (self.bits, self.recompute_ratio) == _ALL

    @property
    def blended(self) -> bool:
        """Whether it rests on reused tokens that are stored after other tokens."""
        return self.recompute_ratio < 1.0

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key, best first; blended KVs have larger errors than all others."""
        return -self.recompute_ratio, self.depth, -self.bits

    def is_at_least(self, worst: Quality) -> bool:
        """Whether a request that accepts `worst` and better accepts this."""
        return (
            self.depth <= worst.depth
            and self.bits >= worst.bits
            and self.recompute_ratio >= worst.recompute_ratio
        )

    def after(self, bits: float, recompute_ratio: float = 1.0) -> Quality:
        """Quality of KVs computed after a prefix of this quality, loaded in `bits` bits.

        `recompute_ratio`: recomputed share of tokens in between that are stored after other tokens.
        """
        if (bits, recompute_ratio) == _ALL:
            return self
        return self.worst(Quality(self.depth + 1, bits, recompute_ratio))

    def worst(self, other: Quality) -> Quality:
        """Quality of KVs that rest on both."""
        return Quality(
            max(self.depth, other.depth),
            min(self.bits, other.bits),
            min(self.recompute_ratio, other.recompute_ratio),
        )


EXACT = Quality()
# Every quality suffices for it.
ANYTHING = Quality(sys.maxsize, sys.float_info.min, 0.0)
