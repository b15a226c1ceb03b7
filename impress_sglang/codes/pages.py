"""Where groups of equal size are on disk, in pages that begin at a block of the drive; no I/O.

Without a basis a group is `codes.groups.layout.GroupLayout`, with one the row of a token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Pages:
    """Sizes, in bytes, of the groups of a layer, which stand one after another in pages.

    The last page has the remaining groups. `block_bytes` is what a drive reads at once.
    """

    num_tokens: int
    group_tokens: int
    group_bytes: int
    page_groups: int
    block_bytes: int

    def __post_init__(self) -> None:
        assert self.num_tokens > 0

    @property
    def num_groups(self) -> int:
        """Number of groups, the last of which may have fewer tokens."""
        return -(-self.num_tokens // self.group_tokens)

    @functools.cached_property
    def page_bytes(self) -> int:
        """Bytes of a page; the last one may be shorter."""
        return _in_blocks(self.page_groups * self.group_bytes, self.block_bytes)

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return -(-self.num_groups // self.page_groups)

    @functools.cached_property
    def layer_bytes(self) -> int:
        """Bytes of all pages."""
        whole = self.num_pages - 1
        rest = self.num_groups - whole * self.page_groups
        return whole * self.page_bytes + _in_blocks(rest * self.group_bytes, self.block_bytes)

    def group_offset(self, group: int) -> int:
        """Byte where a group begins."""
        page, place = divmod(group, self.page_groups)
        return page * self.page_bytes + place * self.group_bytes

    def put_groups(self, groups: Tensor, memory: Tensor) -> None:
        """Write all groups, uint8 [groups, group_bytes], into uint8 [layer_bytes], with zeros."""
        memory.zero_()
        for number, page in enumerate(groups.split(self.page_groups)):
            start = number * self.page_bytes
            memory[start : start + page.numel()] = page.reshape(-1)

    def groups_in(self, memory: Tensor) -> Tensor:
        """The groups, uint8 [n, group_bytes], of some pages, of which the last may be shorter.

        Padding of a page that is shorter may look like groups behind the last one.
        """
        size = self.page_groups * self.group_bytes
        if size == self.page_bytes:
            joined = memory[: len(memory) // self.group_bytes * self.group_bytes]
        else:
            pages = memory.split(self.page_bytes)
            whole = (min(size, len(own) // self.group_bytes * self.group_bytes) for own in pages)
            joined = torch.cat([own[:end] for own, end in zip(pages, whole, strict=True)])
        return joined.view(-1, self.group_bytes)


@functools.lru_cache(maxsize=16)
def page_groups_for(
    sizes: Sequence[int], block_bytes: int, *, grain: int, most: int, padding: float
) -> int:
    """Groups of a page: the fewest, a multiple of `grain`, that leave little padding.

    Args:
        sizes: bytes of a group in each layer; pages of all have as many.
        block_bytes: see `Pages`.
        grain: see above.
        most: if more padding is left with fewer.
        padding: the largest share of whole pages that may be padding.
    """
    for count in range(grain, most, grain):
        pages = sum(_in_blocks(count * own, block_bytes) for own in sizes)
        if pages - count * sum(sizes) <= padding * pages:
            return count
    return most


def _in_blocks(size: int, block_bytes: int) -> int:
    return -(-size // block_bytes) * block_bytes
