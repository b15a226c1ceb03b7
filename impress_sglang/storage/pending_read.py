"""Runs of blocks on their way into memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import numpy as np

from impress_sglang.errors import PrefixUnreadable, StoreUnavailable
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.open_segment import Integers, OpenSegment

# Large enough that a piece is not dominated by its start, small enough that what a layer waits for
# is not far behind a piece that is read ahead.
PIECE_BYTES = 256 << 10
# Seconds between two looks, during a wait, at whether the device has stopped.
LOOK_SECONDS = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRuns:
    """Runs of blocks of a segment, and the memory that receives them at the same distances.

    Byte 0 of `memory` receives byte `offset` of the file. `starts` and `stops` (int64, offsets in
    the memory in bytes, multiples of a block) are the runs, ascending and apart.
    """

    segment: OpenSegment
    memory: AlignedMemory
    offset: int
    starts: Integers
    stops: Integers

    def split(self, max_bytes: int) -> BlockRuns:
        """The same runs in pieces of at most `max_bytes`, a multiple of a block."""
        sizes = self.stops - self.starts
        if not len(sizes) or sizes.max() <= max_bytes:
            return self
        counts = -(-sizes // max_bytes)
        first = np.cumsum(counts) - counts
        step = (np.arange(counts.sum()) - np.repeat(first, counts)) * max_bytes
        starts = np.repeat(self.starts, counts) + step
        stops = np.minimum(starts + max_bytes, np.repeat(self.stops, counts))
        return dataclasses.replace(self, starts=starts, stops=stops)


class PendingRead:
    """Runs that are being read, in pieces; made by `BlockReader.submit`."""

    def __init__(self, runs: BlockRuns, has_stopped: Callable[[], bool], *, ahead: bool) -> None:
        self._has_stopped = has_stopped
        self.runs = runs.split(PIECE_BYTES)
        self.ahead = ahead
        self._sizes = self.runs.stops - self.runs.starts
        # Single numbers are read faster from a list.
        self._size_of: list[int] = self._sizes.tolist()
        # Pieces before `next` are begun; `last` is where a cancelled read stops.
        self.next, self.last = 0, len(self._sizes)
        self.in_flight = 0
        self.error: PrefixUnreadable | None = None
        self._done = threading.Event()

    @property
    def num_bytes(self) -> int:
        """Bytes that are or will be read."""
        return int(self._sizes[: self.last].sum())

    @property
    def done(self) -> bool:
        """Whether nothing more will be read."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until all is read, and verify it.

        Raises:
            PrefixUnreadable: as for `arrived`, or because a block is corrupt.
        """
        self.arrived()
        runs, read = self.runs, slice(self.last)
        blocks = _blocks_in(runs.starts[read], self._sizes[read])
        runs.segment.check_blocks(runs.memory, runs.offset, blocks)

    def arrived(self) -> None:
        """Wait until all is read; nothing is verified.

        Raises:
            SegmentUnreadable: the file ends before a block; the memory is then undefined.
            StoreUnavailable: the device failed, or has stopped; as long as the read is not `done`
                the memory may still be written to.
        """
        if not self.ended_in_time():
            raise StoreUnavailable(self._segment_id, "the device does not answer")
        if self.error is not None:
            raise self.error

    def ended_in_time(self) -> bool:
        """Wait until nothing more is read; False if the device has stopped."""
        while not self._done.wait(LOOK_SECONDS):
            if self._has_stopped():
                return False
        return True

    def take(self, count: int) -> tuple[int, Integers, Integers, Integers, Integers]:
        """Take at most `count` pieces to begin: number of the first, and columns for an engine."""
        first, stop = self.next, min(self.next + count, self.last)
        self.next = stop
        self.in_flight += stop - first
        runs, part = self.runs, slice(first, stop)
        starts = runs.starts[part]
        descriptors = np.full(len(starts), runs.segment.descriptor)
        addresses = starts + runs.memory.address
        return first, descriptors, starts + runs.offset, addresses, self._sizes[part]

    def size(self, number: int) -> int:
        """Bytes of a piece."""
        return self._size_of[number]

    def not_begun(self) -> tuple[Integers, Integers]:
        """Cancel pieces that are not begun; returns their starts and stops in the memory."""
        rest = slice(self.next, self.last)
        self.last = self.next
        return self.runs.starts[rest], self.runs.stops[rest]

    @property
    def _segment_id(self) -> str:
        return self.runs.segment.segment_id

    def fail(self, error: BaseException) -> None:
        """End the read with an error, which is a bug or a fault of the machine."""
        self.error = StoreUnavailable(self._segment_id, f"the reader has failed: {error}")
        self.error.__cause__ = error
        self._done.set()

    def settle(self) -> None:
        """Note the end, if nothing is in flight or to begin."""
        if not self.in_flight and self.next == self.last:
            self._done.set()


def _blocks_in(starts: Integers, sizes: Integers) -> Integers:
    """The blocks of pieces with these starts and sizes, in bytes."""
    counts = sizes // BLOCK_BYTES
    skipped = np.repeat(starts // BLOCK_BYTES - (np.cumsum(counts) - counts), counts)
    blocks: Integers = skipped + np.arange(counts.sum())
    return blocks
