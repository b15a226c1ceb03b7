"""Where groups, or rows, of equal size are on disk, in pages that begin at a block; no I/O."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Pages(NamedTuple):
    """Sizes, in bytes, of the groups of a part of a layer, which stand one after another in pages.

    The last page has the remaining groups. `block_bytes` is what a drive reads at once.
    """

    num_tokens: int
    group_tokens: int
    group_bytes: int
    page_groups: int
    block_bytes: int

    @property
    def num_groups(self) -> int:
        """Number of groups, the last of which may have fewer tokens."""
        return -(-self.num_tokens // self.group_tokens)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.page_groups * self.group_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; the last one may be shorter."""
        return _in_blocks(self.page_groups * self.group_bytes, self.block_bytes)

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return -(-self.num_groups // self.page_groups)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return self.page_offset(self.num_pages)

    def page_offset(self, page: int) -> int:
        """Byte where a page begins, or where the last one ends."""
        if page < self.num_pages:
            return page * self.page_bytes
        whole = self.num_pages - 1
        rest = self.num_groups - whole * self.page_groups
        return whole * self.page_bytes + _in_blocks(rest * self.group_bytes, self.block_bytes)

    def group_offset(self, group: int) -> int:
        """Byte where a group begins."""
        page, place = divmod(group, self.page_groups)
        return page * self.page_bytes + place * self.group_bytes

    def groups_of(self, start: int, stop: int) -> range:
        """The groups that have the tokens [start, stop)."""
        return range(start // self.group_tokens, -(-stop // self.group_tokens))

    def put_groups(self, groups: Tensor, memory: Tensor) -> None:
        """Write all groups, uint8 [groups, group_bytes], into uint8 [num_bytes], with zeros."""
        if groups.numel() < len(memory):
            memory.zero_()
        count = self.num_pages - 1
        pages, rest = groups.tensor_split([count * self.page_groups])
        whole = self._whole(memory, count)
        # Torch takes longer to copy bytes.
        whole.numpy()[:] = pages.reshape(whole.shape).numpy()
        memory[count * self.page_bytes :][: rest.numel()] = rest.reshape(-1)

    def groups_in(self, memory: Tensor) -> Tensor:
        """The groups, uint8 [n, group_bytes], of some pages, of which the last may be shorter.

        Padding of a page that is shorter may look like groups behind the last one.
        """
        size = self.page_groups * self.group_bytes
        if size == self.page_bytes:
            joined = memory[: len(memory) // self.group_bytes * self.group_bytes]
        else:
            count, rest = divmod(len(memory), self.page_bytes)
            more = min(size, rest // self.group_bytes * self.group_bytes)
            joined = memory.new_empty(count * size + more)
            joined[: count * size].view(count, size).copy_(self._whole(memory, count))
            joined[count * size :] = memory[len(memory) - rest :][:more]
        return joined.view(-1, self.group_bytes)

    def _whole(self, memory: Tensor, count: int) -> Tensor:
        """The groups of the first pages of some memory, uint8 [count, bytes]."""
        pages = memory[: count * self.page_bytes].view(count, self.page_bytes)
        return pages[:, : self.page_groups * self.group_bytes]


@functools.lru_cache(maxsize=16)
def page_groups_for(
    sizes: Sequence[int], block_bytes: int, *, grain: int, most: int, padding: float
) -> int:
    """Groups of a page: the fewest, a multiple of `grain`, that leave little padding.

    `sizes` are bytes of a group in each layer; pages of all have as many. At most the share
    `padding` of whole pages is padding, unless that takes more than `most`.
    """
    for count in range(grain, most, grain):
        pages = sum(_in_blocks(count * own, block_bytes) for own in sizes)
        if pages - count * sum(sizes) <= padding * pages:
            return count
    return most


def _in_blocks(size: int, block_bytes: int) -> int:
    return -(-size // block_bytes) * block_bytes
