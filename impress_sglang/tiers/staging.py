"""Pinned memory in which the host leaves numbers for kernels, in a ring.

Stage: load. Allocating pinned memory for each launch, and copying it to the device, takes longer
than most launches. A kernel that looks at a number once reads it here, over the bus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.loops.types import Indices
from impress_sglang.tiers.fence import Fence

# Enough for several layers, so that nobody waits.
RING_BYTES = 4 << 20
# Beyond that, fences would be more than the numbers behind them.
MOST_FENCES = 256


class Staging:
    """A ring of int64 numbers that a device reads. One thread uses it.

    Numbers last until the fence of the next `protect`, which is called after the launch that reads
    them and before others are taken.
    """

    def __init__(self, device: torch.device, num_bytes: int = RING_BYTES) -> None:
        """Memory is taken when it is first needed."""
        self._device = device
        self._least = num_bytes // 8
        self._ring = torch.empty(0, dtype=torch.int64)
        self._numbers: Indices = self._ring.numpy()
        # Counted from the beginning; numbers that were skipped at the end of the ring count.
        self._taken = 0
        self._free = 0
        self._read: deque[tuple[int, Fence]] = deque()

    def take(self, count: int) -> tuple[Tensor, Indices]:
        """`count` numbers, undefined: for the device, and the same memory for the host to fill."""
        size = len(self._ring)
        if count > size:
            self._renew(max(count, self._least))
            size = len(self._ring)
        first = self._taken % size if size else 0
        if first + count > size:
            self._taken += size - first
            first = 0
        self._taken += count
        while self._read and self._taken - self._free > size:
            self._wait()
        return self._ring[first : first + count], self._numbers[first : first + count]

    def leave(self, arrays: Sequence[npt.NDArray[np.signedinteger]]) -> list[Tensor]:
        """Leave arrays of any integer type and shape for the device, as int64."""
        sizes = [own.size for own in arrays]
        staged, numbers = self.take(sum(sizes))
        np.concatenate([own.reshape(-1) for own in arrays], out=numbers)
        parts = zip(staged.split(sizes), arrays, strict=True)
        return [part.view(own.shape) for part, own in parts]

    def protect(self, fence: Fence) -> None:
        """Keep what was taken until a fence behind the launch that reads it."""
        self._read.append((self._taken, fence))
        if len(self._read) > MOST_FENCES:
            self._wait()

    def _wait(self) -> None:
        """Wait until the oldest numbers were read."""
        self._free, fence = self._read.popleft()
        fence.wait()

    def _renew(self, count: int) -> None:
        while self._read:
            self._wait()
        pin = self._device.type == "cuda"
        self._ring = torch.empty(count, dtype=torch.int64, pin_memory=pin)
        self._numbers = self._ring.numpy()
        self._taken = self._free = 0
