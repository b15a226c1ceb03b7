"""Runs of blocks on their way into memory."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from impress_sglang.errors import PrefixUnreadable, StoreUnavailable
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.open_segment import Integers, OpenSegment

# Large enough that a piece is not dominated by its start, small enough that what a layer waits for
# is not far behind a piece that is read ahead.
PIECE_BYTES = 256 << 10
# Who waits looks so often whether the device has stopped.
LOOK_SECONDS = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRuns:
    """Runs of blocks of a segment and the memory that takes them, at the same distances.

    Byte 0 of `memory` takes byte `offset` of the file. `starts` and `stops` (int64, bytes of the
    memory, multiples of a block) are the runs, ascending and apart.
    """

    segment: OpenSegment
    memory: AlignedMemory
    offset: int
    starts: Integers
    stops: Integers

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs."""
        return int((self.stops - self.starts).sum())

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
    """Runs that are being read; made by `BlockReader.submit`.

    `began` and `ended` are `time.perf_counter()` of the first start and the last end, 0.0 before.
    """

    def __init__(
        self, runs: Sequence[BlockRuns], has_stopped: Callable[[], bool], *, ahead: bool
    ) -> None:
        self._has_stopped = has_stopped
        self.runs = [own.split(PIECE_BYTES) for own in runs]
        self.ahead = ahead
        self.began = self.ended = 0.0
        counts = [len(own.starts) for own in self.runs]
        self._owner = np.repeat(np.arange(len(counts)), counts)
        self._descriptors = _each(counts, [own.segment.descriptor for own in self.runs])
        self._starts = _joined([own.starts for own in self.runs])
        self._sizes = _joined([own.stops for own in self.runs]) - self._starts
        # Single numbers are read faster from a list.
        self._size_of: list[int] = self._sizes.tolist()
        self._offsets = self._starts + _each(counts, [own.offset for own in self.runs])
        self._addresses = self._starts + _each(counts, [own.memory.address for own in self.runs])
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
            PrefixUnreadable: see `arrived`, and a block may be corrupt.
        """
        self.arrived()
        for number, own in enumerate(self.runs):
            pieces = self._owner[: self.last] == number
            starts, sizes = self._starts[: self.last][pieces], self._sizes[: self.last][pieces]
            own.segment.check_blocks(own.memory, own.offset, _blocks_in(starts, sizes))

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
        """At most `count` pieces to begin: the first one, and columns as for an engine."""
        first, stop = self.next, min(self.next + count, self.last)
        self.next = stop
        self.in_flight += stop - first
        part = slice(first, stop)
        return (
            first,
            self._descriptors[part],
            self._offsets[part],
            self._addresses[part],
            self._sizes[part],
        )

    def size(self, number: int) -> int:
        """Bytes of a piece."""
        return self._size_of[number]

    def piece(self, number: int) -> tuple[BlockRuns, int, int]:
        """The runs that a piece belongs to, and where it starts and stops in their memory."""
        start = int(self._starts[number])
        return self.runs[self._owner[number]], start, start + int(self._sizes[number])

    def not_begun(self) -> list[tuple[BlockRuns, Integers, Integers]]:
        """Stop before the pieces that are not begun; these, by runs: starts and stops."""
        rest = np.arange(self.next, self.last)
        self.last = self.next
        return [
            (self.runs[owner], self._starts[own], self._starts[own] + self._sizes[own])
            for owner in np.unique(self._owner[rest]).tolist()
            for own in [rest[self._owner[rest] == owner]]
        ]

    @property
    def _segment_id(self) -> str:
        return self.runs[0].segment.segment_id

    def fail(self, error: BaseException) -> None:
        """Nothing more will be read, because of a bug or the machine."""
        self.error = StoreUnavailable(self._segment_id, f"the reader has failed: {error}")
        self.error.__cause__ = error
        self._done.set()

    def settle(self) -> None:
        """Note the end, if nothing is in flight or to begin."""
        if not self.in_flight and self.next == self.last:
            self.ended = time.perf_counter()
            self._done.set()


def _blocks_in(starts: Integers, sizes: Integers) -> Integers:
    """The blocks of pieces that start at and have so many bytes."""
    counts = sizes // BLOCK_BYTES
    skipped = np.repeat(starts // BLOCK_BYTES - (np.cumsum(counts) - counts), counts)
    blocks: Integers = skipped + np.arange(counts.sum())
    return blocks


def _each(counts: Sequence[int], values: Sequence[int]) -> Integers:
    return np.repeat(np.array(values, np.int64), counts)


def _joined(parts: Sequence[Integers]) -> Integers:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
