"""Reads runs of blocks of segments, many at a time, independently of tokens and policies.

One thread starts reads and collects them. Reads that a layer waits for precede reads ahead, few of
which are in flight: their pieces are long, and keep the device busy for a while. Callers verify the
blocks that they use, so unused blocks cost no checksums.

Callers do not wait for a device that has stopped: if no read ends for `patience` seconds while
reads are pending, waiting callers get `StoreUnavailable`; the memory and files of such reads are
not reused before these reads end.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from impress_sglang.cost import ReadCost
from impress_sglang.errors import PrefixUnreadable, StoreUnavailable
from impress_sglang.loops.types import Indices
from impress_sglang.storage.engines import BlockEngine
from impress_sglang.storage.files import AlignedMemory, FileSystem, installed
from impress_sglang.storage.segment import OpenSegment, reading

logger = logging.getLogger(__name__)

# Large enough that its start does not dominate a piece, small enough that reads that a layer waits
# for are not delayed much by a piece that is read ahead.
PIECE_BYTES = 256 << 10
# Seconds between two checks, during a wait, whether the device has stopped.
CHECK_SECONDS = 0.25
# The thread wakes up when a quarter of the reads in flight have ended, or as many as should end in
# this time: only then does it start new reads that a layer waits for.
WAKE_SHARE = 4
ASLEEP_SECONDS = 1e-3
# Reads ahead in flight; also at most half of all reads. In pieces of 256 KiB that is enough for a
# drive with latency. On a slow drive fewer would delay urgent reads less, but its throughput does
# not tell it from one with latency.
MAX_AHEAD = 16
# Largest number of pieces, and of seconds, of one observation of the cost of reads.
OBSERVED_PIECES = 64
OBSERVED_SECONDS = 0.02


class PendingRead:
    """Runs of blocks of a segment that are being read, in pieces; made by `BlockReader.submit`.

    Byte 0 of `memory` receives byte `offset` of the file. `starts` and `sizes` (int64, bytes) are
    the pieces: those before `next` have begun; those from `last` on are cancelled.
    """

    def __init__(
        self,
        segment: OpenSegment,
        memory: AlignedMemory,
        offset: int,
        pieces: tuple[Indices, Indices],
        has_stopped: Callable[[], bool],
        *,
        ahead: bool,
    ) -> None:
        self.segment, self.memory, self.offset = segment, memory, offset
        self.starts, self.sizes = pieces
        # Single numbers are read faster from a list.
        self.size_of: list[int] = self.sizes.tolist()
        self.next, self.last, self.in_flight = 0, len(self.starts), 0
        self.ahead = ahead
        self.error: PrefixUnreadable | None = None
        self.ended = threading.Event()
        """Set when nothing more will be read."""
        self._has_stopped = has_stopped

    @property
    def num_bytes(self) -> int:
        """Bytes that are or will be read."""
        return int(self.sizes[: self.last].sum())

    @property
    def done(self) -> bool:
        """Whether nothing more will be read."""
        return self.ended.is_set()

    def wait(self) -> None:
        """Wait until all pieces are read, without verifying them.

        Raises:
            SegmentUnreadable: the file ends before a block; the memory is then undefined.
            StoreUnavailable: the device failed, or has stopped; as long as the read is not `done`
                the memory may still be written to.
        """
        if not self.wait_idle():
            raise StoreUnavailable(self.segment.segment_id, "the device does not answer")
        if self.error is not None:
            raise self.error

    def wait_idle(self) -> bool:
        """Wait until no more pieces will be read; False if the device has stopped."""
        while not self.ended.wait(CHECK_SECONDS):
            if self._has_stopped():
                return False
        return True

    def fail(self, error: BaseException) -> None:
        """End with an error of the reader: a bug or a fault of the machine."""
        self.error = StoreUnavailable(self.segment.segment_id, f"the reader has failed: {error}")
        self.error.__cause__ = error
        self.ended.set()


class BlockReader:
    """Reads in order, awaited reads before reads ahead; see the module."""

    def __init__(
        self,
        depth: int,
        files: FileSystem | None = None,
        *,
        engine: str = "auto",
        patience: float = math.inf,
        piece_bytes: int | None = None,
    ) -> None:
        """Start the thread, with at most `depth` reads in flight, of `piece_bytes` each.

        `files` makes the `engine`, or raises a `ConfigError`; None for the installed file system.
        `patience`: seconds without any arrival after which the device counts as stopped.
        """
        self.cost = ReadCost()
        self._make_engine = functools.partial((files or installed()).engine, engine, depth)
        self._patience, self._piece, self._arrived_at = patience, piece_bytes, time.monotonic()
        self._unfinished: set[PendingRead] = set()
        self._closed = False
        self._failed: BaseException | None = None
        self._quiet = threading.Event()
        self._changed = threading.Condition()
        self._begin()

    def _begin(self) -> None:
        self._engine: BlockEngine = self._make_engine()
        # Awaited reads, and reads ahead.
        self._queues: tuple[deque[PendingRead], ...] = (deque(), deque())
        self._flying: dict[int, tuple[PendingRead, int]] = {}
        self._flying_ahead = self._flying_bytes = 0
        self._watch = _Watch(self.cost)
        self._failed = None
        self._quiet.clear()
        self._thread = threading.Thread(target=self._run, name="impress-read", daemon=True)
        self._thread.start()

    def summary(self) -> dict[str, str | int]:
        """Engine, largest gap that is read through (bytes), and speed, for the statistics page."""
        return {
            "io_engine": self._engine.name,
            "gap_bytes": self.cost.gap_bytes,
            "read_mbps": round(self.cost.bytes_per_second / 1e6),
        }

    def submit(
        self,
        segment: OpenSegment,
        memory: AlignedMemory,
        offset: int,
        starts: Indices,
        stops: Indices,
        *,
        ahead: bool = False,
    ) -> PendingRead:
        """Begin to read runs of blocks [start, stop); with `ahead`, after other reads.

        Byte 0 of the memory, in which the runs are given, receives byte `offset` of the file. The
        memory must stay alive and the segment open until the read is done.
        """
        pieces = _pieces(starts, stops, self._piece or PIECE_BYTES)
        has_stopped = functools.partial(self._has_stopped, time.monotonic())
        read = PendingRead(segment, memory, offset, pieces, has_stopped, ahead=ahead)
        with self._changed:
            assert not self._closed
            if self._failed is not None:
                read.fail(self._failed)
            elif not len(read.sizes):
                read.ended.set()
            else:
                if not self._unfinished:
                    self._arrived_at = time.monotonic()
                self._unfinished.add(read)
                self._queues[ahead].append(read)
                self._changed.notify()
        return read

    def cancel(self, read: PendingRead) -> tuple[Indices, Indices]:
        """Cancel pieces that have not begun; returns their starts and stops in the memory."""
        with self._changed:
            rest = slice(read.last if read.done else read.next, read.last)
            if rest.start < rest.stop:
                # It may stay in the queue, but has no more pieces to begin.
                read.last = rest.start
                self._finish_if_idle(read)
        return read.starts[rest], read.starts[rest] + read.sizes[rest]

    def close(self) -> None:
        """Wait for all reads, as long as the device answers; then the thread ends.

        The caller does not wait until the engine is freed: Linux takes tens of milliseconds to end
        an idle AIO context.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        while not self._quiet.wait(CHECK_SECONDS) and not self._has_stopped():
            pass

    def revive(self) -> None:
        """Restart after a failure of the thread or its engine, if any."""
        if self._failed is not None and not self._thread.is_alive():
            self._begin()

    def _has_stopped(self, since: float = -math.inf) -> bool:
        """Whether no piece has arrived for too long while reads are pending.

        `since`: when the caller's read was submitted; one that hangs may be pending for long.
        """
        idle = time.monotonic() - max(self._arrived_at, since)
        return bool(self._unfinished) and idle > self._patience

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._serve():
                pass
            self._quiet.set()
        except BaseException as error:
            bug = not isinstance(error, OSError)
            logger.error("the reader of the SSD store has failed: %s", error, exc_info=bug)
            failure = error
        # Waits until the kernel no longer writes to any memory.
        with contextlib.suppress(Exception):
            self._engine.close()
        with self._changed:
            self._failed = failure
            for read in self._unfinished:
                read.fail(failure or RuntimeError("closed"))
            self._unfinished.clear()
        self._quiet.set()

    def _serve(self) -> bool:
        """Begin possible reads and collect ended ones; False when closed and all are done."""
        with self._changed:
            while not self._flying and not self._any_queued():
                self._watch.idle()
                if self._closed:
                    return False
                self._changed.wait()
        self._fill()
        if self._flying:
            # Several per call, so that the thread wakes up seldom.
            numbers, results = self._engine.finish(self._worth_waking())
            # Numbers may be given again as soon as there is room.
            ended = [self._flying.pop(number) for number in numbers.tolist()]
            self._flying_bytes -= sum(read.size_of[place] for read, place in ended)
            # Keep the device busy while the pieces that have arrived are processed.
            self._fill()
            if ended:
                self._take_in(ended, results.tolist())
        return True

    def _worth_waking(self) -> int:
        """Number of arrivals after which the thread wakes up."""
        flying = len(self._flying)
        each = self.cost.seconds(flying, self._flying_bytes) / flying
        return max(1, min(flying // WAKE_SHARE, int(ASLEEP_SECONDS / each)))

    def _any_queued(self) -> bool:
        """Whether a read has pieces to begin; cancelled reads leave the queues."""
        for waiting in self._queues:
            while waiting and waiting[0].next == waiting[0].last:
                waiting.popleft()
        return any(self._queues)

    def _fill(self) -> None:
        """Begin pieces, as far as the depth allows."""
        with self._changed:
            batches = self._take_batches() if self._any_queued() else []
        for read, first, stop in batches:
            starts, sizes = read.starts[first:stop], read.sizes[first:stop]
            num_bytes = int(sizes.sum())
            self._watch.began(len(sizes), num_bytes)
            self._flying_bytes += num_bytes
            descriptors = np.full(len(sizes), read.segment.descriptor)
            addresses = starts + read.memory.address
            numbers = self._engine.start(descriptors, starts + read.offset, addresses, sizes)
            for place, number in enumerate(numbers.tolist(), first):
                self._flying[number] = (read, place)

    def _take_batches(self) -> list[tuple[PendingRead, int, int]]:
        """Choose reads whose pieces [first, stop) begin now."""
        depth, batches = self._engine.depth, []
        room = depth - len(self._flying)
        for waiting, ahead in zip(self._queues, (False, True), strict=True):
            room_ahead = min(MAX_AHEAD, max(depth // 2, 1)) - self._flying_ahead
            limit = min(room, room_ahead) if ahead else room
            while limit > 0 and waiting:
                read = waiting[0]
                first, read.next = read.next, min(read.next + limit, read.last)
                count = read.next - first
                if read.next == read.last:
                    waiting.popleft()
                if count:
                    read.in_flight += count
                    limit -= count
                    room -= count
                    self._flying_ahead += count * ahead
                    batches.append((read, first, read.next))
        return batches

    def _take_in(self, ended: list[tuple[PendingRead, int]], results: list[int]) -> None:
        """Complete the pieces that have arrived, and wake up their callers."""
        self._arrived_at = time.monotonic()
        arrived: dict[PendingRead, int] = {}
        for (read, place), result in zip(ended, results, strict=True):
            arrived[read] = arrived.get(read, 0) + 1
            if result != read.size_of[place] and read.error is None:
                read.error = _complete_piece(read, place, result)
        with self._changed:
            for read, count in arrived.items():
                read.in_flight -= count
                self._flying_ahead -= count * read.ahead
                self._finish_if_idle(read)
        # Last, so that callers waiting for these bytes do not wait for the observation.
        self._watch.ended(len(ended))

    def _finish_if_idle(self, read: PendingRead) -> None:
        if not read.in_flight and read.next == read.last:
            read.ended.set()
            self._unfinished.discard(read)


class _Watch:
    """Measures for a `ReadCost` how long the device is busy with pieces and bytes."""

    def __init__(self, cost: ReadCost) -> None:
        self._cost = cost
        self._open = 0
        self.idle()

    def idle(self) -> None:
        """Start again, with no read pending."""
        self._since, self._pieces, self._bytes = 0.0, 0, 0

    def began(self, pieces: int, num_bytes: int) -> None:
        """Count pieces that are about to start."""
        self._since = self._since or time.perf_counter()
        self._pieces += pieces
        self._bytes += num_bytes
        self._open += pieces

    def ended(self, pieces: int) -> None:
        """Count pieces that have arrived."""
        self._open -= pieces
        now, ended = time.perf_counter(), self._pieces - self._open
        if self._open and ended < OBSERVED_PIECES and now - self._since < OBSERVED_SECONDS:
            return
        # Pieces still in flight count with the next observation.
        arrived = round(self._bytes * (1.0 - self._open / self._pieces))
        self._cost.observe(ended, arrived, now - self._since)
        self._since = now if self._open else 0.0
        self._bytes -= arrived
        self._pieces = self._open


def _pieces(starts: Indices, stops: Indices, max_bytes: int) -> tuple[Indices, Indices]:
    """Split runs into pieces of at most `max_bytes` bytes; returns their starts and sizes."""
    sizes = stops - starts
    if not len(sizes) or sizes.max() <= max_bytes:
        return starts, sizes
    counts = -(-sizes // max_bytes)
    first = np.cumsum(counts) - counts
    step = (np.arange(counts.sum()) - np.repeat(first, counts)) * max_bytes
    starts = np.repeat(starts, counts) + step
    return starts, np.minimum(max_bytes, np.repeat(stops, counts) - starts)


def _complete_piece(read: PendingRead, place: int, result: int) -> PrefixUnreadable | None:
    """Read a piece with an unexpected `result` again; returns the error, if any."""
    segment, start = read.segment, int(read.starts[place])
    if result < 0:
        return StoreUnavailable(segment.segment_id, os.strerror(-result))
    try:
        with reading(segment.segment_id):
            # A read may end early without an error; reading again shows whether there is one.
            target = read.memory.view[start : start + read.size_of[place]]
            segment.files.read(segment.descriptor, read.offset + start, target)
    except PrefixUnreadable as error:
        return error
    return None
