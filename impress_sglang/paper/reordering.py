"""Reordering of stored segments, one after another: which ones, and how each rewrite ended.

The store's thread makes the quick decisions. Finding the order and writing are done on a thread of
its own. Memory is bounded by two layers of one segment.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from torch import Tensor

from impress_sglang.loops.types import Float32s, Floats
from impress_sglang.paper.history import chunk_shares, mapping_lists
from impress_sglang.storage.direct_io import AlignedBuffer, AlignedMemory
from impress_sglang.storage.layer_bytes import decode_layer
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.segment import SegmentInfo
from impress_sglang.storage.writer import WriteAbandoned, write_segment
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.open_segments import OpenSegments
from impress_sglang.store.stored import SegmentState, StoredSegment
from impress_sglang.threads import BackgroundThread, compute_alone

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class ReorderStats:
    """Counters since start."""

    segments: int = 0
    failed: int = 0
    without_space: int = 0
    bytes_written: int = 0


@dataclasses.dataclass(slots=True)
class Rewrite:
    """The rewrite of a stored segment: what its thread has to know, and how it ended.

    `segment` is the old file, of `old_bytes`; `info` describes the new one, of `new_bytes`.
    `average` and `order_key` float32 [L, head groups, t] are the token history's.

    In the end: `taken_over`, the segment has its new file in the tree. `useless`: there may be a
    new file, which must be removed. `error`: why it failed.
    """

    stored: StoredSegment
    segment: OpenSegment
    old_bytes: int
    info: SegmentInfo
    new_bytes: int
    average: Float32s
    order_key: Float32s
    node_starts: list[int]
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
    ) -> None:
        """`interval`: seconds between looks for segments to rewrite; 0 for none."""
        self.stats = ReorderStats()
        self._tree, self._directory, self._direct = disk.tree, disk.directory, disk.direct
        self._segments, self._interval, self._enabled = segments, interval, enabled
        self._next_look = time.monotonic() + interval
        self._buffer = AlignedBuffer()
        self._thread = BackgroundThread("impress-reorder", compute_alone)
        self._queue: collections.deque[StoredSegment] = collections.deque()
        self._job: tuple[Rewrite, Future[Floats]] | None = None
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

        A rewrite may pay once more bytes were read of selected tokens, since the segment got its
        order, than its file has; then twice as many, and so on, for later orders change less.

        Returns:
            How many segments are queued; 0 for a policy that does not reorder.
        """
        if not self._enabled:
            return 0
        self._next_look = time.monotonic() + self._interval
        waiting = {segment.segment_id for segment in self._queue}
        if self._job is not None:
            waiting.add(self._job[0].old_id)
        # Looking at all segments would take longer the more are stored.
        for segment in self._tree.segments() if force else map(self._tree.get, self._read):
            if segment is None or segment.segment_id in waiting or not segment.ready:
                continue
            # Other servers' are theirs.
            if segment.home is not None:
                continue
            if (history := segment.history) is None or not history.accesses.any():
                continue
            if force or history.ssd_bytes > segment.file_bytes << segment.info.generation:
                self._queue.append(segment)
        self._read.clear()
        return len(self._queue)

    def poll(self, has_room: Callable[[int], bool], removing_bytes: int) -> None:
        """Begin a rewrite if none is running; `has_room` says whether a file of so many bytes fits.

        It counts files that are still being removed, `removing_bytes`, as gone. A rewrite does not
        queue behind their removal, so it waits if it needs their room.

        Raises:
            PrefixUnreadable: a segment cannot be opened.
        """
        if self._interval and time.monotonic() >= self._next_look:
            self.enqueue()
        while self._queue and self._job is None:
            segment = self._queue[0]
            there = self._tree.get(segment.segment_id) is segment and segment.ready
            # With mapping lists, a file is longer than the first one of the same tokens.
            info = dataclasses.replace(segment.info, generation=segment.info.generation + 1)
            file_bytes = info.layout().file_bytes
            fits = has_room(file_bytes)
            if there and fits and not has_room(file_bytes + removing_bytes):
                return
            self._queue.popleft()
            if there and fits:
                self._begin(segment, dataclasses.replace(info, segment_id=uuid.uuid4().hex))
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
        elif self._tree.get(job.old_id) is not job.stored or not job.stored.on_disk:
            job.useless = True
        else:
            assert job.stored.history is not None
            self._tree.replace(job.stored, job.info, job.new_bytes)
            self._segments.succeed(job.old_id, job.info, future.result())
            job.stored.history.ssd_bytes = 0
            job.taken_over = True
            self.stats.segments += 1
            self.stats.bytes_written += job.new_bytes
        return job

    def summary(self) -> dict[str, int]:
        """Counters for the statistics page; `pending` segments are being rewritten or wait."""
        return {"pending": self.pending, **dataclasses.asdict(self.stats)}

    def close(self, seconds: float) -> None:
        """Forget waiting segments, and finish a running rewrite, for `take_finished`.

        Unless that takes longer than `seconds`.
        """
        self._queue.clear()
        self._thread.close(seconds)

    def _begin(self, segment: StoredSegment, info: SegmentInfo) -> None:
        history = segment.history
        assert history is not None
        rewrite = Rewrite(
            segment,
            self._segments.acquire(segment),
            segment.file_bytes,
            info,
            info.layout().file_bytes,
            history.average,
            history.order_key,
            self._tree.node_starts(segment),
        )
        self._job = rewrite, self._submit(rewrite)

    def _submit(self, rewrite: Rewrite) -> Future[Floats]:
        return self._thread.submit(self._run, rewrite)

    def _run(self, rewrite: Rewrite) -> Floats:
        """Write and publish the new file, with the age of the old one.

        Returns the expected share of wanted rows of each chunk, float64 [chunks].

        Raises:
            PrefixUnreadable: the old segment cannot be read.
            WriteAbandoned: it is not stored any more.
            OSError: the disk refuses.
        """
        old, files, path_of = rewrite.segment, self._directory.files, self._directory.segment_path
        mapping = mapping_lists(rewrite.order_key, rewrite.node_starts)
        try:
            written_ns = files.stat(path_of(old.info.segment_id)).st_mtime_ns
        except FileNotFoundError:
            raise WriteAbandoned("its file is gone") from None
        memory = AlignedMemory(old.layout.columns_bytes)

        def read_layer(layer: int) -> tuple[Tensor, Tensor]:
            if rewrite.left:
                raise WriteAbandoned("the segment is not stored any more")
            old.fill(memory, old.layout.layer_offset(layer))
            order = None if old.mapping is None else old.mapping[layer]
            return decode_layer(old.layout, memory.view, order)

        write_segment(
            path_of(rewrite.info.segment_id),
            rewrite.info,
            read_layer,
            self._buffer,
            files,
            direct=self._direct,
            mapping=mapping,
            written_ns=written_ns,
            is_wanted=lambda: not rewrite.left,
        )
        return chunk_shares(rewrite.average, mapping, rewrite.info.layout())
