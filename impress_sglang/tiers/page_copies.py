"""Copies pages with a kernel, from any memory that the device can read to any that it can write."""

from __future__ import annotations

import numpy as np
import torch

from impress_sglang.loops.types import Indices
from impress_sglang.tiers.fence import Fence
from impress_sglang.tiers.slab import PageShape
from impress_sglang.tiers.staging import Staging
from impress_sglang.triton import pages


class PageCopier:
    """Launches on the current stream; nothing is waited for."""

    def __init__(self, page: PageShape, device: torch.device, staging: Staging) -> None:
        self._page_bytes = page.page_bytes
        self._device = device
        self._staging = staging
        self._table, self._numbers = staging.take(0)

    def copy(self, sources: Indices, targets: Indices) -> Fence:
        """Copy pages between addresses, int64 [n] each; no page that is read is written.

        Returns:
            A fence after which all is copied.
        """
        numbers = self.begin(len(sources))
        numbers[: len(sources)] = sources
        numbers[len(sources) :] = targets
        return self.launch()

    def begin(self, count: int) -> Indices:
        """Begin to copy pages: int64 [2 * count], for the addresses of sources, then of targets."""
        self._table, self._numbers = self._staging.take(2 * count)
        return self._numbers

    def launch(self) -> Fence:
        """Copy what was begun; see `copy`."""
        # The largest power of two that divides them all.
        most = self._page_bytes | pages.WORD_BYTES
        bits = int(np.bitwise_or.reduce(self._numbers, initial=most))
        pages.copy_pages(self._table, self._page_bytes, bits & -bits)
        fence = Fence(self._device)
        self._staging.protect(fence)
        return fence
