"""Reordering of stored segments, one after another: which ones, and how each rewrite ended.

The store's thread makes the quick decisions. Finding the order, whether it pays, and writing are
done on a thread of low priority, which between two layers rests several times as long as it worked,
so that requests see hardly any of it. Memory is bounded by two layers of one segment.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from torch import Tensor

from impress_sglang.paper import token_order
from impress_sglang.storage.direct_io import AlignedBuffer, AlignedMemory
from impress_sglang.storage.layer_codec import decode_layer
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.reader import BlockReader, BlockRuns
from impress_sglang.storage.segment import MappingLists, SegmentInfo
from impress_sglang.storage.writer import WriteAbandoned, write_segment
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.open_segments import OpenSegments
from impress_sglang.store.stored import SegmentState, StoredSegment
from impress_sglang.threads import BackgroundThread, compute_alone

logger = logging.getLogger(__name__)

# Seconds of rest per second of work.
REST_RATIO = 3.0
LONGEST_REST_S = 1.0
_NICENESS = 10
Shares = npt.NDArray[np.float64]


@dataclasses.dataclass(slots=True)
class ReorderStats:
    """Counters since start; `not_worth` counts segments whose rewrite would not have paid."""

    segments: int = 0
    failed: int = 0
    not_worth: int = 0
    without_space: int = 0
    bytes_written: int = 0


@dataclasses.dataclass(slots=True)
class Rewrite:
    """The rewrite of a stored segment: what its thread has to know, and how it ended.

    `segment` is the old file, of `old_bytes`; `info` describes the new one, of `new_bytes`.
    `average` and `order_key` float32 [L, head groups, t] are the token history's; `read_bytes` were
    read for selected tokens since the segment got its order; `force`: rewrite even if it does not
    pay.

    In the end: `taken_over`, the segment has its new file in the tree. `useless`: there may be a
    new file, which must be removed. `error`: why it failed.
    """

    stored: StoredSegment
    segment: OpenSegment
    old_bytes: int
    info: SegmentInfo
    new_bytes: int
    average: npt.NDArray[np.float32]
    order_key: npt.NDArray[np.float32]
    node_starts: list[int]
    read_bytes: int
    gap_bytes: int
    force: bool
    taken_over: bool = False
    useless: bool = False
    error: BaseException | None = None

    @property
    def left(self) -> bool:
        """Whether the segment is not stored any more, so that nothing is published."""
        return self.stored.state is SegmentState.LOST

    @property
    def old_id(self) -> str:
        """Name of the segment before."""
        return self.segment.segment_id


class ReorderQueue:
    """Segments that wait for their rewrite, and the one that is being rewritten."""

    def __init__(
        self,
        disk: StoreDisk,
        segments: OpenSegments,
        interval: float,
        *,
        enabled: bool,
        patience: float,
    ) -> None:
        """`interval`: seconds between looks for segments that may pay; 0 for none.

        `patience`: see `BlockReader`.
        """
        self.stats = ReorderStats()
        self._tree = disk.tree
        self._directory = disk.directory
        self._direct = disk.direct
        self._segments = segments
        self._interval = interval
        self._enabled = enabled
        self._next_look = time.monotonic() + interval
        self._reader = BlockReader(1, disk.files, patience=patience)
        self._buffer = AlignedBuffer()
        self._closing = threading.Event()
        self._thread = BackgroundThread("impress-reorder", _stay_behind)
        self._queue: collections.deque[tuple[StoredSegment, bool]] = collections.deque()
        self._job: tuple[Rewrite, Future[Shares | None]] | None = None
        # Segments that were read since the last look.
        self._read: dict[str, None] = {}

    @property
    def pending(self) -> int:
        """How many segments are being rewritten or wait."""
        return len(self._queue) + (self._job is not None)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the file that is being written."""
        return 0 if self._job is None else self._job[0].new_bytes

    def note_read(self, segment_ids: Iterable[str]) -> None:
        """Note that these segments were read, so that a rewrite may pay now."""
        if self._enabled:
            self._read.update(dict.fromkeys(segment_ids))

    def enqueue(self, *, force: bool = False) -> int:
        """Queue recently read segments that may pay; with `force`, all with selected tokens.

        A rewrite pays if the reads since the segment got its order would have been shorter by more
        bytes than the file has: the segment is expected to be read as often again. No order saves
        more than all bytes that were read, so segments with fewer read bytes than their file has
        are not considered.

        Returns:
            How many segments are queued; 0 for a policy that does not reorder.
        """
        if not self._enabled:
            return 0
        self._next_look = time.monotonic() + self._interval
        waiting = {segment.segment_id for segment, _ in self._queue}
        if self._job is not None:
            waiting.add(self._job[0].old_id)
        # Looking at all segments would take longer the more are stored.
        found = self._tree.segments() if force else map(self._tree.get, self._read)
        for segment in found:
            if segment is None or segment.segment_id in waiting or segment.home is not None:
                continue
            if _may_pay(segment, force):
                self._queue.append((segment, force))
        self._read.clear()
        return len(self._queue)

    def poll(self, gap_bytes: int, has_room: Callable[[int], bool], removing_bytes: int) -> None:
        """Begin a rewrite if none is running; `has_room` says whether a file of so many bytes fits.

        It counts files that are still being removed, `removing_bytes`, as gone. A rewrite does not
        queue behind their removal, so it waits if it needs their room.

        Raises:
            PrefixUnreadable: a segment cannot be opened.
        """
        if self._interval and time.monotonic() >= self._next_look:
            self.enqueue()
        while self._queue and self._job is None:
            segment, force = self._queue[0]
            there = self._tree.get(segment.segment_id) is segment and segment.ready
            # With mapping lists, a file is longer than the first one of the same tokens.
            info = dataclasses.replace(segment.info, generation=segment.info.generation + 1)
            file_bytes = info.layout().file_bytes
            fits = has_room(file_bytes)
            if there and fits and not has_room(file_bytes + removing_bytes):
                return
            self._queue.popleft()
            if there and fits:
                new = dataclasses.replace(info, segment_id=uuid.uuid4().hex)
                self._begin(segment, new, file_bytes, force, gap_bytes)
            self.stats.without_space += there and not fits

    @property
    def has_ended(self) -> bool:
        """Whether the running rewrite has ended."""
        return self._job is not None and self._job[1].done()

    def take_finished(self) -> Rewrite:
        """Act on the end of the running rewrite, which has ended."""
        assert self._job is not None
        (job, future), self._job = self._job, None
        self._segments.release(job.old_id)
        job.error = future.exception()
        if job.error is not None:
            if not isinstance(job.error, WriteAbandoned):
                self.stats.failed += 1
                logger.warning("a segment could not be reordered: %s", job.error)
            # Perhaps the file is published already, or could not be removed.
            job.useless = True
        elif (shares := future.result()) is None:
            self.stats.not_worth += 1
        elif self._tree.get(job.old_id) is not job.stored or not job.stored.on_disk:
            job.useless = True
        else:
            self._take_over(job, shares)
        return job

    def summary(self) -> dict[str, int]:
        """Counters for the statistics page; `pending` segments are being rewritten or wait."""
        return {"pending": self.pending, **dataclasses.asdict(self.stats)}

    def close(self, seconds: float) -> None:
        """Forget waiting segments, and finish a running rewrite without rests, for `take_finished`.

        Unless that takes longer than `seconds`.
        """
        self._queue.clear()
        self._closing.set()
        if self._thread.close(seconds):
            self._reader.close()

    def _begin(
        self,
        segment: StoredSegment,
        info: SegmentInfo,
        file_bytes: int,
        force: bool,
        gap_bytes: int,
    ) -> None:
        history = segment.history
        assert history is not None
        rewrite = Rewrite(
            segment,
            self._segments.acquire(segment),
            segment.file_bytes,
            info,
            file_bytes,
            history.average,
            history.order_key,
            self._tree.node_starts(segment),
            history.ssd_bytes,
            gap_bytes,
            force,
        )
        self._job = rewrite, self._submit(rewrite)

    def _submit(self, rewrite: Rewrite) -> Future[Shares | None]:
        return self._thread.submit(self._run, rewrite)

    def _run(self, rewrite: Rewrite) -> Shares | None:
        """Write and publish the new file, with the age of the old one, if it pays.

        Returns the expected share of wanted rows of each chunk, float64 [chunks]; None if it does
        not pay.

        Raises:
            PrefixUnreadable: the old segment cannot be read.
            WriteAbandoned: it is not stored any more.
            OSError: the disk refuses.
        """
        self._reader.revive()
        mapping = token_order.mapping_lists(rewrite.order_key, rewrite.node_starts)
        if not rewrite.force and not _pays(rewrite, mapping):
            return None
        files, old = self._directory.files, rewrite.segment.info.segment_id
        try:
            written = files.stat(self._directory.segment_path(old))
        except FileNotFoundError:
            raise WriteAbandoned("its file is gone") from None
        write_segment(
            self._directory.segment_path(rewrite.info.segment_id),
            rewrite.info,
            _PacedReader(rewrite, self._reader, self._closing),
            self._buffer,
            files,
            direct=self._direct,
            mapping=mapping,
            written_ns=written.st_mtime_ns,
            is_wanted=lambda: not rewrite.left,
        )
        return token_order.chunk_shares(rewrite.average, mapping, rewrite.info.layout())

    def _take_over(self, job: Rewrite, shares: Shares) -> None:
        assert job.stored.history is not None
        self._tree.replace(job.stored, job.info, job.new_bytes)
        self._segments.succeed(job.old_id, job.info, shares)
        job.stored.history.ssd_bytes = 0
        job.taken_over = True
        self.stats.segments += 1
        self.stats.bytes_written += job.new_bytes


class _PacedReader:
    """Gives the layers of a segment in logical order, resting before each."""

    def __init__(self, rewrite: Rewrite, reader: BlockReader, closing: threading.Event) -> None:
        self._rewrite, self._segment = rewrite, rewrite.segment
        self._reader = reader
        self._memory = AlignedMemory(self._segment.layout.columns_bytes)
        self._closing = closing
        self._worked_since = time.monotonic()

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        if self._rewrite.left:
            raise WriteAbandoned("the segment is not stored any more")
        worked = time.monotonic() - self._worked_since
        self._closing.wait(min(REST_RATIO * worked, LONGEST_REST_S))
        self._worked_since = time.monotonic()
        segment, layout = self._segment, self._segment.layout
        whole = np.array([0]), np.array([layout.columns_bytes])
        offset = layout.layer_offset(layer)
        self._reader.read(BlockRuns(segment, self._memory, offset, *whole))
        mapping = None if segment.mapping is None else segment.mapping[layer]
        return decode_layer(layout, self._memory.view, mapping)


def _may_pay(segment: StoredSegment, force: bool) -> bool:
    history = segment.history
    if not segment.ready or history is None or not history.accesses.any():
        return False
    return force or history.ssd_bytes > segment.file_bytes


def _pays(rewrite: Rewrite, mapping: MappingLists) -> bool:
    """Whether past reads would have been shorter by more bytes than the file has."""
    layout = rewrite.info.layout()
    before, after = (
        token_order.expected_bytes(rewrite.average, order, layout, rewrite.gap_bytes)
        for order in (rewrite.segment.mapping, mapping)
    )
    return rewrite.read_bytes * (1.0 - after / max(before, 1.0)) > layout.file_bytes


def _stay_behind() -> None:
    """Take as little CPU time as possible from the requests that are served meanwhile."""
    compute_alone()
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError as error:
        logger.info("reordering runs at normal priority: %s", error)
