"""Aligned memory, and reads and writes that are complete or fail.

O_DIRECT bypasses the page cache where the file system supports it (ext4, xfs); where it does not
(tmpfs, some network file systems), the same calls go through the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np

from impress_sglang.storage.layout import BLOCK_BYTES, round_up


class AlignedMemory:
    """Memory that starts at a page boundary, as O_DIRECT requires, and its address.

    `view` and `words` (uint64) are the same bytes; their number is a multiple of 8.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        # Causes fewer page faults when the memory is first filled.
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self.words = np.frombuffer(self._memory, np.uint64)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def __len__(self) -> int:
        return len(self._memory)


class AlignedBuffer:
    """Reusable memory that starts at a page boundary, as O_DIRECT requires; grows on demand.

    `view` returns the same bytes at each call, so there can be only one user at a time.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, BLOCK_BYTES)

    def view(self, num_bytes: int) -> memoryview:
        """The first `num_bytes` of the buffer; earlier views stay valid but share its bytes."""
        if num_bytes > len(self._memory):
            self._memory = mmap.mmap(-1, round_up(max(num_bytes, 2 * len(self._memory)), 1 << 20))
        return memoryview(self._memory)[:num_bytes]


def read_exactly(descriptor: int, offset: int, target: memoryview) -> None:
    """Fill `target` from a file.

    Raises:
        EOFError: the file ends before `target` is full.
        OSError: the read failed.
    """
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise EOFError(f"expected {len(target)} bytes at {offset}, file ends after {done}")
        done += count


def write_exactly(descriptor: int, offset: int, source: memoryview) -> None:
    """Write all of `source` to a file.

    Raises:
        OSError: the write failed, for example because the file system is full.
    """
    done = 0
    while done < len(source):
        done += os.pwritev(descriptor, [source[done:]], offset + done)
