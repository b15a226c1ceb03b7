"""Asynchronous work of a device: fences, streams, and copies of pages.

On a CPU work is done when it is submitted, and a compiled loop copies; on a GPU a kernel does.
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

# Enough tables for several layers, so that copies do not wait, and numbers for most launches.
MAX_TABLES, MIN_NUMBERS = 256, 4096


def pin_memory(memory: AlignedMemory) -> None:
    """Pin memory, as long as it exists, so that the current CUDA device reads it directly.

    Pinned tensors of torch would take the next power of two of bytes. It raises `ConfigError` if
    the system does not allow this much.
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
    """Work submitted so far to the device's current stream, which may still be running.

    Host memory that a kernel or a copy reads must not change before the work is done.
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
        """Let later launches on a stream run after this work."""
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

    def record_reading(self, fence: Fence) -> None:
        """Record that work before a fence of the current stream reads cached chunks."""
        self._last_read = fence

    def join(self) -> None:
        """Let later launches on the current stream run after all copies."""
        if self._stream is not None and self._last_copy is not None:
            self._last_copy.order(torch.cuda.current_stream(self._stream.device))


class PageCopier:
    """Copies pages of one size; no page that is read is written.

    A kernel copies from any memory that the device can read to any that it can write. It is
    launched on the current stream, without waiting. It reads addresses over the bus from host
    memory: copying them to the device would take longer than most launches.
    """

    def __init__(self, page_bytes: int, device: torch.device, *, kernels: bool) -> None:
        self._page_bytes, self._device = page_bytes, device
        self.in_place = not kernels
        """Whether pages can be read in place instead: all memory is on the host."""
        self._table = torch.empty(0, dtype=torch.int64)
        # Tables that launches read, oldest first; pinned ones take long to allocate.
        self._read: deque[tuple[Tensor, Fence]] = deque()

    def copy(self, sources: Indices, targets: Indices) -> Fence:
        """Copy pages between addresses, int64 [n] each; returns a fence after the copy."""
        np.concatenate([sources, targets], out=self.begin(len(sources)))
        return self.launch()

    def begin(self, count: int) -> Indices:
        """Prepare a copy: returns int64 [2 * count] for the addresses of sources, then targets."""
        table = self._table[:0]
        if self._read and (self._read[0][1].done or len(self._read) == MAX_TABLES):
            table, fence = self._read.popleft()
            fence.wait()
        if len(table) < 2 * count:
            size, pin = max(2 * count, MIN_NUMBERS), self._device.type == "cuda"
            table = torch.empty(size, dtype=torch.int64, pin_memory=pin)
        self._table, self._count = table, count
        numbers: Indices = table[: 2 * count].numpy()
        return numbers

    def launch(self) -> Fence:
        """Copy the pages of `begin`; see `copy`."""
        table = self._table[: 2 * self._count]
        numbers: Indices = table.numpy()
        if self.in_place:
            sources, targets = numbers[: self._count], numbers[self._count :]
            copies.copy_pages(sources, targets, self._page_bytes)
        else:
            # Imported only where it is used: Triton is not needed on a CPU.
            from impress_sglang.triton import pages

            # The largest power of two that divides them all.
            limit = self._page_bytes | pages.WORD_BYTES
            bits = int(np.bitwise_or.reduce(numbers, initial=limit))
            pages.copy_pages(table, self._page_bytes, bits & -bits)
        fence = Fence(self._device)
        self._read.append((self._table, fence))
        return fence
