"""How a stored KV was computed, and what of that a request takes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """The approximations that a KV rests on.

    `depth` counts them: 0 is exact, 1 was computed after a partly loaded exact prefix, 2 after a
    partly loaded prefix of depth 1. `retention` is the smallest share of a prefix that any of them
    used, 1.0 if there is none.
    """

    depth: int = 0
    retention: float = 1.0

    def __post_init__(self) -> None:
        assert self.depth >= 0 and 0.0 < self.retention <= 1.0
        assert self.depth or self.retention == 1.0

    def suffices(self, least: Quality) -> bool:
        """Whether a request that takes `least` and better takes this."""
        return self.depth <= least.depth and self.retention >= least.retention

    def after(self, retention: float) -> Quality:
        """Of what is computed after a prefix of this quality, if `retention` of it is used."""
        if retention == 1.0:
            return self
        return Quality(self.depth + 1, min(self.retention, retention))

    def worst(self, other: Quality) -> Quality:
        """Of what rests on both."""
        return Quality(max(self.depth, other.depth), min(self.retention, other.retention))


EXACT = Quality()
