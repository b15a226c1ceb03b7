"""Reads runs of blocks of segments, many at a time.

Stage: load. In: runs of blocks of open segments and the memory to fill. Out: filled memory, or
`ChunkUnreadable`. It knows nothing of tokens, requests or policies.

One thread starts reads and collects them. What a layer waits for goes before what is read ahead,
and reads ahead leave half of the device's queue free for it. Who takes blocks verifies those that
it takes: what was read in vain costs no checksums, and the one thread keeps the device busy.

Nobody waits for a device that has stopped: when nothing arrives for `patience` seconds although
something is to be read, who waits gets `StoreUnavailable`; memory and files of such reads are not
given away before they end.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from impress_sglang.errors import ChunkUnreadable, PrefixUnreadable, StoreUnavailable
from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.engines import BlockEngine
from impress_sglang.storage.files import FileSystem, installed
from impress_sglang.storage.layout import BLOCK_BYTES, SegmentLayout
from impress_sglang.storage.read_cost import ReadCost
from impress_sglang.storage.segment import (
    Checksums,
    MappingLists,
    SegmentInfo,
    block_checksums,
    read_header,
    reading,
)

logger = logging.getLogger(__name__)

Integers = npt.NDArray[np.int64]

# Large enough that a piece is not dominated by its start, small enough that what a layer waits for
# is not far behind a piece that is read ahead.
PIECE_BYTES = 256 << 10
# Who waits looks so often whether the device has stopped.
LOOK_SECONDS = 0.25
# Of the reads in flight a quarter must have ended before the thread looks at them.
WAKE_SHARE = 4
# One observation of what reading costs is made of so many pieces, or of a busy time that ended.
OBSERVED_PIECES = 64


class OpenSegment:
    """A segment file open for reading, with all of its header in memory."""

    def __init__(self, path: Path, files: FileSystem, *, direct: bool) -> None:
        """Open the file.

        Raises:
            ChunkUnreadable: the file is missing or its header is not valid.
            StoreUnavailable: it cannot be opened or read now.
        """
        header = read_header(path, files)
        self.files = files
        self.info: SegmentInfo = header.info
        self.checksums: Checksums = header.checksums
        self.mapping: MappingLists | None = header.mapping
        self.floors = header.floors
        self.layout: SegmentLayout = self.info.layout()
        with reading(self.segment_id):
            self.descriptor = files.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))

    @property
    def segment_id(self) -> str:
        """Name of the segment."""
        return self.info.segment_id

    def check_blocks(self, memory: AlignedMemory, offset: int, blocks: Integers) -> None:
        """Verify blocks that were read.

        Args:
            memory: whose byte 0 took byte `offset` of the file.
            offset: see there; a block begins here.
            blocks: int64 [n], counted from the start of the memory.

        Raises:
            ChunkUnreadable: one of them fails its checksum.
        """
        first = (offset - self.layout.header_bytes) // BLOCK_BYTES
        found = block_checksums(memory.view, blocks.tolist())
        bad = np.flatnonzero(found != self.checksums[first + blocks])
        if len(bad):
            at = offset + int(blocks[bad[0]]) * BLOCK_BYTES
            raise ChunkUnreadable(self.segment_id, f"the block at {at} fails its checksum")

    def close(self) -> None:
        """Close the file; no read may be in flight."""
        # Nothing was written through it.
        with contextlib.suppress(OSError):
            self.files.close(self.descriptor)


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
    """Runs that are being read; made by `ChunkReader.submit`.

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
            ChunkUnreadable: the file ends before a block; the memory is then undefined.
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


class ChunkReader:
    """Reads in order, what is waited for before what is read ahead; see the module."""

    def __init__(
        self,
        depth: int,
        files: FileSystem | None = None,
        *,
        engine: str = "auto",
        patience: float = math.inf,
    ) -> None:
        """Begin with nothing to read.

        Args:
            depth: reads in flight at most.
            files: gives the engine; None for what is installed.
            engine: name of the engine.
            patience: seconds without any arrival after which the device counts as stopped.

        Raises:
            ConfigError: there is no such engine here.
        """
        self.cost = ReadCost()
        self._make_engine = functools.partial((files or installed()).engine, engine, depth)
        self._engine: BlockEngine = self._make_engine()
        self._patience = patience
        self._arrived_at = time.monotonic()
        self._queues: tuple[collections.deque[PendingRead], ...] = (
            collections.deque(),
            collections.deque(),
        )
        self._flying: dict[int, tuple[PendingRead, int]] = {}
        self._flying_ahead = 0
        self._unsettled: set[PendingRead] = set()
        self._closed = False
        self._failed: BaseException | None = None
        self._changed = threading.Condition()
        self._watch = _Watch(self.cost)
        self._thread = self._start()

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self._engine.name

    @property
    def depth(self) -> int:
        """Reads in flight at most."""
        return self._engine.depth

    def submit(self, runs: Sequence[BlockRuns], *, ahead: bool = False) -> PendingRead:
        """Begin to fill the memory of all runs; `ahead` lets others go first.

        The memory must stay alive and the segments open until the read is done.
        """
        read = PendingRead(runs, self._has_stopped, ahead=ahead)
        with self._changed:
            assert not self._closed
            if self._failed is not None:
                read.fail(self._failed)
            elif read.next == read.last:
                read.settle()
            else:
                if not self._unsettled:
                    self._arrived_at = time.monotonic()
                self._unsettled.add(read)
                self._queues[ahead].append(read)
                self._changed.notify()
        return read

    def read(self, runs: Sequence[BlockRuns]) -> int:
        """Fill the memory of all runs; returns the bytes read.

        Raises:
            PrefixUnreadable: see `PendingRead.wait`.
        """
        read = self.submit(runs)
        try:
            read.wait()
        finally:
            # Who gives up closes the file, and its descriptor becomes another file's.
            self.cancel(read)
        return read.num_bytes

    def cancel(self, read: PendingRead) -> list[tuple[BlockRuns, Integers, Integers]]:
        """Do not begin what is not begun; returns that, by runs: starts and stops."""
        if read.done:
            return []
        with self._changed:
            rest = read.not_begun()
            if rest:
                # Where it stands in the queue it now has nothing to give.
                self._settle(read)
            return rest

    def close(self) -> None:
        """Wait for all reads, as long as the device answers, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        while self._thread.is_alive() and not self._has_stopped():
            self._thread.join(LOOK_SECONDS)

    def revive(self) -> None:
        """Begin again after a failure of the thread or its engine, if there was one.

        Raises:
            ConfigError: there is no engine any more.
            OSError: it cannot be made now.
        """
        if self._failed is None or self._thread.is_alive():
            return
        self._engine = self._make_engine()
        self._flying, self._flying_ahead = {}, 0
        self._watch = _Watch(self.cost)
        for waiting in self._queues:
            waiting.clear()
        self._failed = None
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="impress-read", daemon=True)
        thread.start()
        return thread

    def _has_stopped(self) -> bool:
        """Whether nothing has arrived for too long, although something is to be read."""
        return bool(self._unsettled) and time.monotonic() - self._arrived_at > self._patience

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._serve():
                pass
        except OSError as error:
            logger.error("the reader of the SSD store has failed: %s", error)
            failure = error
        except BaseException as error:
            logger.exception("the reader of the SSD store has failed")
            failure = error
        # Waits until the kernel writes to no memory any more.
        with contextlib.suppress(Exception):
            self._engine.close()
        with self._changed:
            self._failed = failure
            for read in self._unsettled:
                read.fail(failure or RuntimeError("closed"))
            self._unsettled.clear()

    def _serve(self) -> bool:
        """Begin what can begin and take in what has ended; False when there is nothing left."""
        with self._changed:
            while not self._flying and not self._any_queued():
                self._watch.idle()
                if self._closed:
                    return False
                self._changed.wait()
            batches = self._take_batches()
        for read, batch in batches:
            self._begin(read, batch)
        if self._flying:
            # Several at once, so that the thread wakes up seldom.
            numbers, results = self._engine.finish(max(1, len(self._flying) // WAKE_SHARE))
            # Numbers may be given again as soon as there is room.
            ended = [self._flying.pop(number) for number in numbers.tolist()]
            self._refill()
            self._take_in(ended, results.tolist())
        return True

    def _any_queued(self) -> bool:
        """Whether a read has pieces to begin; those that were cancelled leave the queues."""
        for waiting in self._queues:
            while waiting and waiting[0].next == waiting[0].last:
                waiting.popleft()
        return any(self._queues)

    def _refill(self) -> None:
        """Keep the device busy while what has arrived is verified."""
        with self._changed:
            batches = self._take_batches() if self._any_queued() else []
        for read, batch in batches:
            self._begin(read, batch)

    def _take_batches(
        self,
    ) -> list[tuple[PendingRead, tuple[int, Integers, Integers, Integers, Integers]]]:
        """Pieces to begin now, as far as the depth allows."""
        room = self._engine.depth - len(self._flying)
        batches = []
        for waiting, ahead in zip(self._queues, (False, True), strict=True):
            limit = room
            if ahead:
                limit = min(room, max(self._engine.depth // 2, 1) - self._flying_ahead)
            while limit > 0 and waiting:
                read = waiting[0]
                batch = read.take(limit)
                count = len(batch[-1])
                if read.next == read.last:
                    waiting.popleft()
                if not count:
                    continue
                limit -= count
                room -= count
                self._flying_ahead += count * ahead
                batches.append((read, batch))
        return batches

    def _begin(
        self, read: PendingRead, batch: tuple[int, Integers, Integers, Integers, Integers]
    ) -> None:
        first, *columns = batch
        self._watch.began(len(columns[-1]), int(columns[-1].sum()))
        if not read.began:
            read.began = time.perf_counter()
        numbers = self._engine.start(*columns).tolist()
        for place, number in enumerate(numbers):
            self._flying[number] = (read, first + place)

    def _take_in(self, ended: list[tuple[PendingRead, int]], results: list[int]) -> None:
        """Complete what has arrived, and tell who waits for it."""
        self._arrived_at = time.monotonic()
        self._watch.ended(len(ended))
        arrived: dict[PendingRead, int] = {}
        for (read, place), result in zip(ended, results, strict=True):
            arrived[read] = arrived.get(read, 0) + 1
            if result != read.size(place) and read.error is None:
                read.error = _complete_piece(*read.piece(place), result)
        with self._changed:
            for read, count in arrived.items():
                read.in_flight -= count
                self._flying_ahead -= count * read.ahead
                self._settle(read)

    def _settle(self, read: PendingRead) -> None:
        read.settle()
        if read.done:
            self._unsettled.discard(read)


class _Watch:
    """Tells a `ReadCost` how long the device was busy with how much."""

    def __init__(self, cost: ReadCost) -> None:
        self._cost = cost
        self._since = 0.0
        self._pieces = 0
        self._bytes = 0
        self._open = 0

    def began(self, pieces: int, num_bytes: int) -> None:
        """Pieces are about to be started."""
        if not self._since:
            self._since = time.perf_counter()
        self._pieces += pieces
        self._bytes += num_bytes
        self._open += pieces

    def ended(self, pieces: int) -> None:
        """Pieces have arrived."""
        self._open -= pieces
        if not self._open or self._pieces - self._open >= OBSERVED_PIECES:
            self._observe()

    def idle(self) -> None:
        """Nothing is to be read."""
        self._since, self._pieces, self._bytes = 0.0, 0, 0

    def _observe(self) -> None:
        now = time.perf_counter()
        # What is still open counts with what comes next.
        share = 1.0 - self._open / self._pieces
        arrived = round(self._bytes * share)
        self._cost.observe(self._pieces - self._open, arrived, now - self._since)
        self._since = now if self._open else 0.0
        self._bytes -= arrived
        self._pieces = self._open


def _complete_piece(runs: BlockRuns, start: int, stop: int, result: int) -> PrefixUnreadable | None:
    """Read a piece again that was read with an unexpected `result`; what is wrong, if anything."""
    segment = runs.segment
    if result < 0:
        return StoreUnavailable(segment.segment_id, os.strerror(-result))
    try:
        with reading(segment.segment_id):
            # A read may end early without an error; the rest says whether there is one.
            target = runs.memory.view[start:stop]
            segment.files.read(segment.descriptor, runs.offset + start, target)
    except PrefixUnreadable as error:
        return error
    return None


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
