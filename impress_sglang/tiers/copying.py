"""What a device does while the host goes on: fences, streams, and copies of pages.

On a CPU all work is done when it was submitted, and a compiled loop copies; on a GPU a kernel does.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from impress_sglang.errors import ConfigError
from impress_sglang.loops import copies
from impress_sglang.loops.types import Indices
from impress_sglang.storage.files import AlignedMemory

# Enough for several layers, so that nobody waits.
RING_BYTES = 4 << 20
# Beyond that, fences would be more than the numbers behind them.
MOST_FENCES = 256


def pin_memory(memory: AlignedMemory) -> None:
    """Pin memory, as long as it exists, so that the current CUDA device reads it directly.

    torch's own pinned tensors would take the next power of two of bytes. It raises `ConfigError` if
    the system does not allow so much.
    """
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(memory.address, len(memory), 0)
    if int(error) != 0:
        raise ConfigError(
            f"{len(memory) / 1e6:.0f} MB of host memory cannot be pinned (CUDA: {int(error)}); "
            "lower --impress-host-gb or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.address)


class Fence:
    """All work submitted to the device's current stream until now, which may still be running.

    Host memory that a kernel or a copy reads must not change before that is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()

    @property
    def done(self) -> bool:
        """Whether the device has done this work."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the device has done this work."""
        if self._event is not None:
            self._event.synchronize()

    def order(self, stream: torch.cuda.Stream) -> None:
        """Let what is launched on a stream from now on run after this work."""
        if self._event is not None and not self._event.query():
            stream.wait_event(self._event)


class CopyStream:
    """A stream on which KVs are copied while the model computes on another; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last_read: Fence | None = None
        self._last_copy: Fence | None = None

    @contextmanager
    def after_reading(self) -> Iterator[None]:
        """Launch the block's work after earlier copies and all noted reads of cached chunks."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            # Reads are on the stream of the model, which may not be the caller's current one.
            if self._last_read is not None:
                self._last_read.order(self._stream)
            try:
                yield
            finally:
                self._last_copy = Fence(self._stream.device)

    def note_reading(self, fence: Fence) -> None:
        """Note that work launched before a fence of the current stream reads cached chunks."""
        self._last_read = fence

    def join(self) -> None:
        """Let work launched on the current stream from now on run after all copies."""
        if self._stream is not None and self._last_copy is not None:
            self._last_copy.order(torch.cuda.current_stream(self._stream.device))


class Staging:
    """A ring of pinned int64 numbers that the host leaves for a device; one thread uses it.

    Allocating pinned memory for each launch, and copying it to the device, takes longer than most
    launches. A kernel that looks at a number once reads it here, over the bus. Numbers last until
    the fence of the next `protect`, which is called after the launch that reads them and before
    others are taken.
    """

    def __init__(self, device: torch.device, num_bytes: int = RING_BYTES) -> None:
        """Memory is taken when it is first needed."""
        self._device, self._least = device, num_bytes // 8
        self._ring = torch.empty(0, dtype=torch.int64)
        self._numbers: Indices = self._ring.numpy()
        # Counted from the beginning; numbers that were skipped at the end of the ring count.
        self._taken = self._free = 0
        self._read: deque[tuple[int, Fence]] = deque()

    def take(self, count: int) -> tuple[Tensor, Indices]:
        """`count` numbers, undefined: for the device, and the same memory for the host to fill."""
        if count > len(self._ring):
            while self._read:
                self._wait()
            more, pin = max(count, self._least), self._device.type == "cuda"
            self._ring = torch.empty(more, dtype=torch.int64, pin_memory=pin)
            self._numbers = self._ring.numpy()
            self._taken = self._free = 0
        size = len(self._ring)
        first = self._taken % size if size else 0
        if first + count > size:
            self._taken += size - first
            first = 0
        self._taken += count
        while self._read and self._taken - self._free > size:
            self._wait()
        return self._ring[first : first + count], self._numbers[first : first + count]

    def protect(self, fence: Fence) -> None:
        """Keep what was taken until a fence behind the launch that reads it."""
        self._read.append((self._taken, fence))
        if len(self._read) > MOST_FENCES:
            self._wait()

    def _wait(self) -> None:
        """Wait until the oldest numbers were read."""
        self._free, fence = self._read.popleft()
        fence.wait()


class PageCopier:
    """Copies pages of one size; no page that is read is written.

    A kernel copies from any memory that the device can read to any that it can write. It is
    launched on the current stream; nothing is waited for.
    """

    def __init__(self, page_bytes: int, device: torch.device, *, kernels: bool) -> None:
        self._page_bytes, self._device = page_bytes, device
        self._staging = Staging(device) if kernels else None
        self._numbers: Indices = np.empty(0, np.int64)

    @property
    def in_place(self) -> bool:
        """Whether who reads pages may as well read them where they are: all is on the host."""
        return self._staging is None

    def copy(self, sources: Indices, targets: Indices) -> Fence:
        """Copy pages between addresses, int64 [n] each; returns a fence behind that."""
        np.concatenate([sources, targets], out=self.begin(len(sources)))
        return self.launch()

    def begin(self, count: int) -> Indices:
        """Begin to copy pages: int64 [2 * count], for the addresses of sources, then of targets."""
        if self._staging is None:
            self._numbers = np.empty(2 * count, np.int64)
        else:
            self._table, self._numbers = self._staging.take(2 * count)
        return self._numbers

    def launch(self) -> Fence:
        """Copy what was begun; see `copy`."""
        if self._staging is None:
            half = len(self._numbers) // 2
            copies.copy_pages(self._numbers[:half], self._numbers[half:], self._page_bytes)
            return Fence(self._device)
        # Imported only where it is used: Triton is not needed on a CPU.
        from impress_sglang.triton import pages

        # The largest power of two that divides them all.
        most = self._page_bytes | pages.WORD_BYTES
        bits = int(np.bitwise_or.reduce(self._numbers, initial=most))
        pages.copy_pages(self._table, self._page_bytes, bits & -bits)
        fence = Fence(self._device)
        self._staging.protect(fence)
        return fence
