"""Where groups of equal size are on disk, in pages that begin at a block of the drive; no I/O."""

from __future__ import annotations

import abc
import functools

import torch
from torch import Tensor


class Pages(abc.ABC):
    """Sizes, in bytes, of groups that stand one after another in pages.

    The last page has the remaining groups. `block_bytes` is what a drive reads at once.
    """

    block_bytes: int

    @property
    @abc.abstractmethod
    def num_groups(self) -> int:
        """Number of groups."""

    @property
    @abc.abstractmethod
    def group_bytes(self) -> int:
        """Bytes of one group."""

    @property
    @abc.abstractmethod
    def page_groups(self) -> int:
        """Groups of a page."""

    @functools.cached_property
    def page_bytes(self) -> int:
        """Bytes of a page; the last one may be shorter."""
        return self.in_blocks(self.page_groups * self.group_bytes)

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return -(-self.num_groups // self.page_groups)

    @property
    def base_bytes(self) -> int:
        """Bytes of all pages."""
        whole = self.num_pages - 1
        rest = self.num_groups - whole * self.page_groups
        return whole * self.page_bytes + self.in_blocks(rest * self.group_bytes)

    def group_offset(self, group: int) -> int:
        """Byte where a group begins."""
        page, place = divmod(group, self.page_groups)
        return page * self.page_bytes + place * self.group_bytes

    def in_blocks(self, size: int) -> int:
        """Bytes of the blocks that hold so many."""
        return -(-size // self.block_bytes) * self.block_bytes

    def put_groups(self, groups: Tensor, memory: Tensor) -> None:
        """Write all groups, uint8 [groups, group_bytes], into uint8 [base_bytes, or more].

        Nothing is written between pages.
        """
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
