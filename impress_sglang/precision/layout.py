"""Where the codes of a layer stand: pure arithmetic, no I/O.

Coded, a layer is three runs of bytes:

    ranges  of each group: keys [G, 2, Dk], then values [GROUP_TOKENS, G, 2], float16 (low, step)
    base    of each group: keys [GROUP_TOKENS, G, Dk / 2], then values [GROUP_TOKENS, G, Dv / 2]
    planes  of each plane and KV head its units: keys [u, Dk / 4], then values [u, Dv / 4]

A group is `GROUP_TOKENS` tokens of all heads; the base is always wanted whole, so it is long and in
sequence. A *unit* is u neighbouring tokens of one head in one plane: what is read, cached and
raised by itself. u is chosen so that a unit fills a block of the drive, which is what a read costs
at least. The last group and the last unit are padded.
"""

from __future__ import annotations

import dataclasses
import functools

from impress_sglang.precision.codec import BASE_BITS, GROUP_TOKENS, NUM_PLANES, PLANE_BITS

_HALF_BYTES = 2


@dataclasses.dataclass(frozen=True)
class CodeLayout:
    """Sizes, in bytes, of the codes of one layer of `num_tokens` tokens.

    `block_bytes` is what a drive reads at once.
    """

    num_tokens: int
    num_heads: int
    key_dim: int
    value_dim: int
    block_bytes: int

    def __post_init__(self) -> None:
        assert self.num_tokens > 0
        assert not self.key_dim % 4 and not self.value_dim % 4, "a byte holds four elements"

    @property
    def num_groups(self) -> int:
        """Groups, the last of which may have fewer tokens."""
        return -(-self.num_tokens // GROUP_TOKENS)

    @property
    def group_range_bytes(self) -> int:
        """Ranges of one group."""
        return 2 * _HALF_BYTES * self.num_heads * (self.key_dim + GROUP_TOKENS)

    @property
    def group_base_bytes(self) -> int:
        """Base of one group."""
        return GROUP_TOKENS * self.num_heads * (self.key_dim + self.value_dim) * BASE_BITS // 8

    @property
    def token_unit_bytes(self) -> int:
        """What one token takes of a unit."""
        return (self.key_dim + self.value_dim) * PLANE_BITS // 8

    @functools.cached_property
    def unit_tokens(self) -> int:
        """Tokens of a unit: a power of two, so that groups and units nest."""
        fitting = max(1, self.block_bytes // self.token_unit_bytes)
        return 1 << (fitting.bit_length() - 1)

    @property
    def unit_bytes(self) -> int:
        """One unit."""
        return self.unit_tokens * self.token_unit_bytes

    @property
    def num_units(self) -> int:
        """Units of one head in one plane."""
        return -(-self.num_tokens // self.unit_tokens)

    @property
    def range_bytes(self) -> int:
        """Ranges of all groups."""
        return self.num_groups * self.group_range_bytes

    @property
    def base_bytes(self) -> int:
        """Base of all groups."""
        return self.num_groups * self.group_base_bytes

    @property
    def plane_bytes(self) -> int:
        """One plane of all heads."""
        return self.num_heads * self.num_units * self.unit_bytes

    @property
    def planes_bytes(self) -> int:
        """All planes."""
        return NUM_PLANES * self.plane_bytes

    def unit_index(self, plane: int, head: int, unit: int) -> int:
        """Position of a unit among all units of the layer."""
        return (plane * self.num_heads + head) * self.num_units + unit
