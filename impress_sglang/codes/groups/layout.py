"""Where the parts of a group are among its bytes: pure arithmetic.

With T = GROUP_TOKENS, P pairs of keys, and w = rate - 4 bits more of each value, a group has

    ranges of keys [G, 2, Dk] and of values [T, G, 2], float16 (low, step)
    the number of pairs of each channel of keys [G, Dk]
    upper bits of keys [G, T / 2, Dk], and their pairs [T / 4, P]: by head and channel, the upper
    upper bits of values [G, T / 2, Dv], and the next w bits of each [G, T w / 8, Dv]

packed by `codes.groups.codec.pack`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from impress_sglang.codes.groups.codec import (
    CODE_BITS,
    DIM_GRAIN,
    GROUP_TOKENS,
    LEAST_BITS,
    num_pairs,
)

_HALF_BYTES = 2


@dataclasses.dataclass(frozen=True)
class GroupLayout:
    """Sizes and places, in bytes, of the parts of a group."""

    num_heads: int
    key_dim: int
    value_dim: int
    rate: int

    def __post_init__(self) -> None:
        assert not self.key_dim % DIM_GRAIN and not self.value_dim % DIM_GRAIN
        assert LEAST_BITS < self.rate <= LEAST_BITS + 2

    @functools.cached_property
    def num_pairs(self) -> int:
        """Pairs of keys, of all heads."""
        return num_pairs(self.num_heads * self.key_dim, self.rate)

    @property
    def more_bits(self) -> int:
        """Bits of each value behind its upper ones."""
        return self.rate - LEAST_BITS

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of the parts, in their order."""
        heads, rows = self.num_heads, GROUP_TOKENS // CODE_BITS
        return (
            2 * _HALF_BYTES * heads * self.key_dim,
            2 * _HALF_BYTES * heads * GROUP_TOKENS,
            heads * self.key_dim,
            heads * self.key_dim * rows * LEAST_BITS,
            self.num_pairs * rows * 2,
            heads * self.value_dim * rows * LEAST_BITS,
            heads * self.value_dim * rows * self.more_bits,
        )

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """Where the parts begin, and where the last one ends."""
        return tuple(itertools.accumulate(self.sizes, initial=0))

    @property
    def group_bytes(self) -> int:
        """Bytes of a group."""
        return self.places[-1]
