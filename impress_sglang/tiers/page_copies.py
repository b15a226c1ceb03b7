"""Copies pages between addresses: with a compiled loop on a CPU, with a kernel on a GPU."""

from __future__ import annotations

import abc

import numpy as np
import torch

from impress_sglang.loops import copies
from impress_sglang.loops.types import Indices
from impress_sglang.tiers.fence import Fence
from impress_sglang.tiers.staging import Staging


class PageCopier(abc.ABC):
    """Copies pages of one size. No page that is read is written."""

    in_place: bool
    """Whether who reads pages may as well read them where they are: all is on the host."""

    def __init__(self, page_bytes: int, device: torch.device, staging: Staging) -> None:
        """`staging`: where addresses are left for the device."""
        self._page_bytes = page_bytes
        self._device, self._staging = device, staging

    def copy(self, sources: Indices, targets: Indices) -> Fence:
        """Copy pages between addresses, int64 [n] each.

        Returns:
            A fence after which all is copied.
        """
        np.concatenate([sources, targets], out=self.begin(len(sources)))
        return self.launch()

    @abc.abstractmethod
    def begin(self, count: int) -> Indices:
        """Begin to copy pages: int64 [2 * count], for the addresses of sources, then of targets."""

    @abc.abstractmethod
    def launch(self) -> Fence:
        """Copy what was begun; see `copy`."""


def make_copier(page_bytes: int, device: torch.device, staging: Staging) -> PageCopier:
    """The copier that fits the device."""
    return (KernelCopier if device.type == "cuda" else LoopCopier)(page_bytes, device, staging)


class LoopCopier(PageCopier):
    """Has copied when it returns."""

    in_place = True

    def begin(self, count: int) -> Indices:
        """See `PageCopier`."""
        self._numbers = np.empty(2 * count, np.int64)
        return self._numbers

    def launch(self) -> Fence:
        """See `PageCopier`."""
        half = len(self._numbers) // 2
        copies.copy_pages(self._numbers[:half], self._numbers[half:], self._page_bytes)
        return Fence(self._device)


class KernelCopier(PageCopier):
    """Launches on the current stream; nothing is waited for.

    It copies from any memory that the device can read to any that it can write.
    """

    in_place = False

    def begin(self, count: int) -> Indices:
        """See `PageCopier`."""
        self._table, self._numbers = self._staging.take(2 * count)
        return self._numbers

    def launch(self) -> Fence:
        """See `PageCopier`."""
        # Imported only where it is used: Triton is not needed on a CPU.
        from impress_sglang.triton import pages

        # The largest power of two that divides them all.
        most = self._page_bytes | pages.WORD_BYTES
        bits = int(np.bitwise_or.reduce(self._numbers, initial=most))
        pages.copy_pages(self._table, self._page_bytes, bits & -bits)
        fence = Fence(self._device)
        self._staging.protect(fence)
        return fence
