"""Reads runs of blocks of segments, many at a time.

Stage: load. In: runs of blocks of open segments and the memory to fill. Out: filled memory, or
`SegmentUnreadable`. It knows nothing of tokens, requests or policies.

One thread starts reads and collects them. Reads that a layer waits for go before reads ahead, of
which few are in flight: their pieces are long, and keep the device busy for a while. Callers verify
the blocks that they use: blocks read in vain cost no checksums.

Nobody waits for a device that has stopped: if nothing arrives for `patience` seconds while reads
are pending, waiting callers get `StoreUnavailable`; the memory and files of such reads are not
reused before these reads end.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import os
import threading
import time

from impress_sglang.cost import ReadCost
from impress_sglang.errors import PrefixUnreadable, StoreUnavailable
from impress_sglang.storage.engines import BlockEngine
from impress_sglang.storage.files import FileSystem, installed
from impress_sglang.storage.open_segment import Integers
from impress_sglang.storage.pending_read import LOOK_SECONDS, BlockRuns, PendingRead
from impress_sglang.storage.segment import reading

logger = logging.getLogger(__name__)

# The thread wakes up when a quarter of the reads in flight have ended, or as many as should end in
# this time: only then does it start what a layer waits for.
WAKE_SHARE = 4
ASLEEP_SECONDS = 1e-3
# Prefetches in flight; also at most half of all reads. In pieces of 256 KiB that is enough for a
# drive with latency. On a slow drive fewer would delay urgent reads less, but its throughput does
# not tell it from one with latency.
MOST_AHEAD = 16
# An observation of the cost of reads has this many pieces or takes so long, or less if the device
# becomes idle. So a drive that became slower is noticed within a request.
OBSERVED_PIECES = 64
OBSERVED_SECONDS = 0.02


class BlockReader:
    """Reads in order, awaited reads before reads ahead; see the module."""

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
            depth: the most reads in flight.
            files: gives the engine; None for the installed file system.
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
        self._flying_bytes = 0
        self._unsettled: set[PendingRead] = set()
        self._closed = False
        self._failed: BaseException | None = None
        self._quiet = threading.Event()
        self._changed = threading.Condition()
        self._watch = _Watch(self.cost)
        self._thread = self._start()

    @property
    def depth(self) -> int:
        """The most reads in flight."""
        return self._engine.depth

    def summary(self) -> dict[str, str | int]:
        """Engine, largest gap that is read through (bytes), and speed, for the statistics page."""
        return {
            "io_engine": self._engine.name,
            "gap_bytes": self.cost.gap_bytes,
            "read_mbps": round(self.cost.bytes_per_second / 1e6),
        }

    def submit(self, runs: BlockRuns, *, ahead: bool = False) -> PendingRead:
        """Begin to fill the memory of all runs; with `ahead`, other reads go first.

        The memory must stay alive and the segment open until the read is done.
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

    def read(self, runs: BlockRuns) -> int:
        """Fill the memory of all runs; returns the bytes read.

        Raises:
            PrefixUnreadable: see `PendingRead.wait`.
        """
        read = self.submit(runs)
        try:
            read.wait()
        finally:
            # A caller that gives up closes the file, whose descriptor then becomes another's.
            self.cancel(read)
        return read.num_bytes

    def cancel(self, read: PendingRead) -> tuple[Integers, Integers]:
        """Cancel pieces that are not begun; returns their starts and stops in the memory."""
        if read.done:
            return read.runs.starts[:0], read.runs.stops[:0]
        with self._changed:
            starts, stops = read.not_begun()
            if len(starts):
                # It may stay in the queue, but has no more pieces to begin.
                self._settle(read)
            return starts, stops

    def close(self) -> None:
        """Wait for all reads, as long as the device answers; then the thread ends.

        The caller does not wait until the engine is freed: Linux takes tens of milliseconds to end
        an idle AIO context.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        while not self._quiet.wait(LOOK_SECONDS) and not self._has_stopped():
            pass

    def revive(self) -> None:
        """Begin again after a failure of the thread or its engine, if there was one.

        Raises:
            ConfigError: there is no engine any more.
            OSError: it cannot be made now.
        """
        if self._failed is None or self._thread.is_alive():
            return
        self._engine = self._make_engine()
        self._flying, self._flying_ahead, self._flying_bytes = {}, 0, 0
        self._watch = _Watch(self.cost)
        for waiting in self._queues:
            waiting.clear()
        self._failed = None
        self._quiet.clear()
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
            self._quiet.set()
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
        self._quiet.set()

    def _serve(self) -> bool:
        """Begin reads that can begin and collect ended ones; False when closed and all is done."""
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
            numbers, results = self._engine.finish(self._worth_waking())
            # Numbers may be given again as soon as there is room.
            ended = [self._flying.pop(number) for number in numbers.tolist()]
            self._flying_bytes -= sum(read.size(place) for read, place in ended)
            self._refill()
            self._take_in(ended, results.tolist())
        return True

    def _worth_waking(self) -> int:
        """After how many arrivals the thread wakes up."""
        flying = len(self._flying)
        each = self.cost.seconds(flying, self._flying_bytes) / flying
        return max(1, min(flying // WAKE_SHARE, int(ASLEEP_SECONDS / each)))

    def _any_queued(self) -> bool:
        """Whether a read has pieces to begin; cancelled reads leave the queues."""
        for waiting in self._queues:
            while waiting and waiting[0].next == waiting[0].last:
                waiting.popleft()
        return any(self._queues)

    def _refill(self) -> None:
        """Keep the device busy while the pieces that have arrived are taken in."""
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
                most = min(MOST_AHEAD, max(self._engine.depth // 2, 1))
                limit = min(room, most - self._flying_ahead)
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
        num_bytes = int(columns[-1].sum())
        self._watch.began(len(columns[-1]), num_bytes)
        self._flying_bytes += num_bytes
        numbers = self._engine.start(*columns).tolist()
        for place, number in enumerate(numbers):
            self._flying[number] = (read, first + place)

    def _take_in(self, ended: list[tuple[PendingRead, int]], results: list[int]) -> None:
        """Complete the pieces that have arrived, and wake up their callers."""
        self._arrived_at = time.monotonic()
        arrived: dict[PendingRead, int] = {}
        for (read, place), result in zip(ended, results, strict=True):
            arrived[read] = arrived.get(read, 0) + 1
            if result != read.size(place) and read.error is None:
                start, stop = int(read.runs.starts[place]), int(read.runs.stops[place])
                read.error = _complete_piece(read.runs, start, stop, result)
        with self._changed:
            for read, count in arrived.items():
                read.in_flight -= count
                self._flying_ahead -= count * read.ahead
                self._settle(read)
        # Last: whoever waits for these bytes does not wait for what is learnt from them.
        self._watch.ended(len(ended))

    def _settle(self, read: PendingRead) -> None:
        read.settle()
        if read.done:
            self._unsettled.discard(read)


class _Watch:
    """Tells a `ReadCost` for how long the device was busy with how many pieces and bytes."""

    def __init__(self, cost: ReadCost) -> None:
        self._cost = cost
        self._since = 0.0
        self._pieces = 0
        self._bytes = 0
        self._open = 0

    def began(self, pieces: int, num_bytes: int) -> None:
        """Note that pieces are about to be started."""
        if not self._since:
            self._since = time.perf_counter()
        self._pieces += pieces
        self._bytes += num_bytes
        self._open += pieces

    def ended(self, pieces: int) -> None:
        """Note that pieces have arrived."""
        self._open -= pieces
        ended, seconds = self._pieces - self._open, time.perf_counter() - self._since
        if not self._open or ended >= OBSERVED_PIECES or seconds >= OBSERVED_SECONDS:
            self._observe()

    def idle(self) -> None:
        """Note that nothing is to be read."""
        self._since, self._pieces, self._bytes = 0.0, 0, 0

    def _observe(self) -> None:
        now = time.perf_counter()
        # Pieces still in flight count with the next observation.
        share = 1.0 - self._open / self._pieces
        arrived = round(self._bytes * share)
        self._cost.observe(self._pieces - self._open, arrived, now - self._since)
        self._since = now if self._open else 0.0
        self._bytes -= arrived
        self._pieces = self._open


def _complete_piece(runs: BlockRuns, start: int, stop: int, result: int) -> PrefixUnreadable | None:
    """Read a piece with an unexpected `result` again; returns what is wrong, if anything."""
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
