"""A file system that reads no faster than a drive of so many MB/s, for benchmarks and tests.

What is read comes from the real drive at once, and is kept back until the emulated one would have
delivered it. All engines of a file system share the drive, which serves reads one after another.
"""

from __future__ import annotations

import sys
import threading
import time

import numpy as np

from impress_sglang.storage.engines import BlockEngine, Integers
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES

# What an idle drive may be ahead of its rate: it makes up for threads that wake up late. With 2 ms
# short reads were so much faster that the costs learnt from them were those of a drive of 2.5 times
# the rate.
BURST_NS = 200_000
# What is begun on a slow drive: little, because what a layer waits for comes after it.
SLOW_BYTES = 256 << 10


class Drive:
    """Says when reads end that are served one after another, at a rate; several threads."""

    def __init__(self) -> None:
        """As fast as the real one, until a rate is set."""
        self._changed = threading.Condition()
        self.rate = 0.0
        # When all ends that was asked for.
        self._free_at = 0

    def set_rate(self, bytes_per_second: float) -> None:
        """Change the rate of what is asked for from now on; 0 also ends what is being read."""
        with self._changed:
            self.rate, self._free_at = bytes_per_second, 0
            self._changed.notify_all()

    def ask(self, sizes: Integers) -> Integers:
        """Ask for reads of so many bytes; returns for each when it ends, in ns of `now`."""
        with self._changed:
            if not self.rate:
                return np.zeros_like(sizes)
            begin = max(self._free_at, time.monotonic_ns() - BURST_NS)
            ends = begin + (np.cumsum(sizes) / self.rate * 1e9).astype(np.int64)
            self._free_at = int(ends.max(initial=self._free_at))
            return ends

    def now(self) -> int:
        """What ended before it has passed."""
        return time.monotonic_ns() if self.rate else sys.maxsize

    def wait(self, end: int) -> None:
        """Wait until a read has ended."""
        with self._changed:
            while (left := end - self.now()) > 0:
                self._changed.wait(min(left / 1e9, threading.TIMEOUT_MAX))


class SlowEngine:
    """See `BlockEngine`: the reads of another engine, kept back until they have passed a drive."""

    def __init__(self, engine: BlockEngine, drive: Drive) -> None:
        self.name = engine.name
        self._engine = engine
        self._drive = drive
        self._next = 0
        # Of the reads that were begun last.
        self._largest = BLOCK_BYTES
        # By the engine's numbers, which are given again as soon as it has ended a read: ours, and
        # where the read ends.
        self._reading: dict[int, tuple[int, int]] = {}
        # Of reads that the engine has ended, int64 [3, n]: ends, our numbers, results.
        self._arrived = np.empty((3, 0), np.int64)

    @property
    def depth(self) -> int:
        """See `BlockEngine.depth`; less while the drive is slow and reads are large."""
        if not self._drive.rate:
            return self._engine.depth
        return min(self._engine.depth, max(2, SLOW_BYTES // self._largest))

    def start(
        self, descriptors: Integers, offsets: Integers, addresses: Integers, sizes: Integers
    ) -> Integers:
        """See `BlockEngine.start`."""
        ends = self._drive.ask(sizes)
        self._largest = max(int(sizes.max(initial=0)), BLOCK_BYTES)
        begun = self._engine.start(descriptors, offsets, addresses, sizes)
        numbers = np.arange(self._next, self._next + len(begun))
        self._next += len(begun)
        pairs = zip(numbers.tolist(), ends.tolist(), strict=True)
        self._reading |= dict(zip(begun.tolist(), pairs, strict=True))
        return numbers

    def finish(self, at_least: int = 1) -> tuple[Integers, Integers]:
        """See `BlockEngine.finish`."""
        while (passed := self._arrived[0] <= self._drive.now()).sum() < at_least:
            if self._reading:
                self._collect(max(1, at_least - len(passed)))
            else:
                self._drive.wait(int(np.sort(self._arrived[0])[at_least - 1]))
        _, numbers, results = self._arrived[:, passed]
        self._arrived = self._arrived[:, ~passed]
        return numbers, results

    def close(self) -> None:
        """See `BlockEngine.close`."""
        self._engine.close()

    def _collect(self, at_least: int) -> None:
        """Take what the engine has ended."""
        ended, results = self._engine.finish(at_least)
        known = [self._reading.pop(number) for number in ended.tolist()]
        numbers, ends = np.array(known, np.int64).reshape(-1, 2).T
        self._arrived = np.hstack([self._arrived, [ends, numbers, results]])


class SlowFileSystem(FileSystem):
    """The operating system's files on a drive that reads so many MB/s; writes are not slowed."""

    def __init__(self, mbps: float = 0.0) -> None:
        """See `set_rate`."""
        self._drive = Drive()
        self.set_rate(mbps)

    def set_rate(self, mbps: float) -> None:
        """Read no faster than this from now on; 0: as fast as it goes, also what is being read."""
        self._drive.set_rate(mbps * 1e6)

    def engine(self, name: str, depth: int) -> BlockEngine:
        """See `FileSystem.engine`."""
        return SlowEngine(super().engine(name, depth), self._drive)
