"""Where the codes of a layer are: pure arithmetic, no I/O.

A coded layer is a base and planes above it, each made of pages, which begin at a block:

    base    page after page; a page has some groups, and a group is its ranges and its codes:
            keys [G, 2, Dk], values [GROUP_TOKENS, G, 2], float16 (low, step),
            the sections of pairs of keys [G, Dk],
            then with T = GROUP_TOKENS upper bits of keys [T, G, Dk / 2] and a section of them
            [T, G, Dk / 8], upper bits of values [T, G, Dv / 2] and a section of them [T, G, Dv / 8]
    planes  of each plane and KV head its units: keys [u, Dk / 8], then values [u, Dv / 8]

A group is `GROUP_TOKENS` tokens of all heads; the base is always wanted whole, so it is long and in
sequence. A *unit* is u neighbouring tokens of one head in one plane: it is read, cached and raised
by itself. u is chosen so that a unit fills a block of the drive, the least that a read costs. The
last group and the last unit are padded; the last page has the remaining groups.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from impress_sglang.codes.pages import Pages
from impress_sglang.codes.planes.codec import (
    BASE_BITS,
    CHANNEL_BITS,
    DIM_GRAIN,
    GROUP_TOKENS,
    NUM_PLANES,
    PLANE_BITS,
)

_HALF_BYTES = 2
# Tokens of a unit are a multiple of this, so that the tiles of a kernel fit into units and groups.
UNIT_GRAIN = 16
# At most this share of a page of the base is padding, unless the page has `MAX_PAGE_GROUPS`.
PADDING_SHARE = 1 / 128
MAX_PAGE_GROUPS = 8


@dataclasses.dataclass(frozen=True)
class CodeLayout(Pages):
    """Sizes, in bytes, of the codes of one layer of `num_tokens` tokens; its pages are the base."""

    num_tokens: int
    num_heads: int
    key_dim: int
    value_dim: int
    block_bytes: int

    group_tokens = GROUP_TOKENS

    def __post_init__(self) -> None:
        assert self.num_tokens > 0
        assert not self.key_dim % DIM_GRAIN and not self.value_dim % DIM_GRAIN

    @property
    def num_groups(self) -> int:
        """Number of groups, the last of which may have fewer tokens."""
        return -(-self.num_tokens // GROUP_TOKENS)

    @functools.cached_property
    def group_range_bytes(self) -> int:
        """Bytes of the ranges of one group, and of the sections of its keys' pairs behind them."""
        return self.group_bounds_bytes + self.num_heads * self.key_dim

    @functools.cached_property
    def group_bounds_bytes(self) -> int:
        """Bytes of the ranges alone."""
        return 2 * _HALF_BYTES * self.num_heads * (self.key_dim + GROUP_TOKENS)

    @functools.cached_property
    def group_base_bytes(self) -> int:
        """Bytes of the codes of one group in the base."""
        return GROUP_TOKENS * self.num_heads * (self.key_dim + self.value_dim) * BASE_BITS // 8

    @functools.cached_property
    def base_places(self) -> tuple[int, int, int, int]:
        """Where the codes of a group begin in it: upper bits and section, of keys and of values."""
        rows = GROUP_TOKENS * self.num_heads
        sizes = [
            rows * dim * bits // 8
            for dim in (self.key_dim, self.value_dim)
            for bits in (CHANNEL_BITS, BASE_BITS - CHANNEL_BITS)
        ]
        first, second, third, fourth, end = itertools.accumulate(
            sizes, initial=self.group_range_bytes
        )
        assert end == self.group_bytes
        return first, second, third, fourth

    @functools.cached_property
    def group_bytes(self) -> int:
        """Bytes of one group in the base."""
        return self.group_range_bytes + self.group_base_bytes

    @functools.cached_property
    def page_groups(self) -> int:
        """Groups of a page of the base: the fewest that leave little padding."""
        groups = 1
        while groups < MAX_PAGE_GROUPS:
            size = groups * self.group_bytes
            if self.in_blocks(size) - size <= PADDING_SHARE * size:
                break
            groups *= 2
        return groups

    @functools.cached_property
    def token_unit_bytes(self) -> int:
        """Bytes of one token in a unit."""
        return (self.key_dim + self.value_dim) * PLANE_BITS // 8

    @functools.cached_property
    def unit_tokens(self) -> int:
        """Number of tokens of a unit."""
        fitting = self.block_bytes // self.token_unit_bytes
        return max(1, fitting // UNIT_GRAIN) * UNIT_GRAIN

    @functools.cached_property
    def unit_bytes(self) -> int:
        """Bytes of one unit, without padding."""
        return self.unit_tokens * self.token_unit_bytes

    @functools.cached_property
    def unit_stride(self) -> int:
        """Bytes from the start of one unit to the start of the next."""
        return self.in_blocks(self.unit_bytes)

    @functools.cached_property
    def num_units(self) -> int:
        """Number of units of one head in one plane."""
        return -(-self.num_tokens // self.unit_tokens)

    @property
    def total_units(self) -> int:
        """Number of units of all heads in all planes."""
        return NUM_PLANES * self.num_heads * self.num_units

    @property
    def planes_bytes(self) -> int:
        """Bytes of all planes."""
        return self.total_units * self.unit_stride

    @property
    def layer_bytes(self) -> int:
        """Bytes of all codes of the layer."""
        return self.base_bytes + self.planes_bytes
