"""Which segments are reordered, one after another, and how each rewrite ended.

Owned by the store's thread. All work, including finding the order and whether it pays, is done on
the rewriter's thread; this module only makes the quick decisions.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from impress_sglang.management.open_segments import OpenSegments
from impress_sglang.management.segment_rewriter import Rewrite, SegmentRewriter, Shares
from impress_sglang.management.stored import StoredSegment
from impress_sglang.management.tree import StoredTree
from impress_sglang.management.versions import SegmentVersions
from impress_sglang.storage.segment import SegmentInfo
from impress_sglang.storage.writer import WriteAbandoned

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class ReorderStats:
    """Counters since start; `not_worth` counts segments whose rewrite would not have paid."""

    segments: int = 0
    failed: int = 0
    not_worth: int = 0
    without_space: int = 0
    bytes_written: int = 0


@dataclasses.dataclass(slots=True)
class Reordering:
    """A rewrite to a file of `new_bytes` of a segment that was `old_id` with `old_bytes`.

    `taken_over`: the segment has its new version in the tree. `useless`: there may be a new file,
    which must be removed. `error`: why it failed.
    """

    segment: StoredSegment
    old_id: str
    old_bytes: int
    new_bytes: int
    rewrite: Rewrite
    future: Future[Shares | None]
    taken_over: bool = False
    useless: bool = False
    error: BaseException | None = None


class ReorderQueue:
    """Segments that wait for their rewrite, and the one that is being rewritten."""

    def __init__(
        self,
        tree: StoredTree,
        readers: OpenSegments,
        versions: SegmentVersions,
        rewriter: SegmentRewriter,
        interval: float,
        *,
        enabled: bool,
    ) -> None:
        """`interval`: seconds between looks for segments that may pay; 0 for none."""
        self.stats = ReorderStats()
        self._tree = tree
        self._readers = readers
        self._versions = versions
        self._interval = interval
        self._enabled = enabled
        self._next_look = time.monotonic() + interval
        self._rewriter = rewriter
        self._queue: collections.deque[tuple[StoredSegment, bool]] = collections.deque()
        self._job: Reordering | None = None
        # Segments that were read since the last look.
        self._read: dict[str, None] = {}

    @property
    def pending(self) -> int:
        """How many segments are being rewritten or wait."""
        return len(self._queue) + (self._job is not None)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the file that is being written."""
        return 0 if self._job is None else self._job.new_bytes

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
            waiting.add(self._job.old_id)
        # Looking at all segments would take longer the more are stored.
        found = self._tree.segments() if force else map(self._tree.get, self._read)
        for segment in found:
            if segment is None or segment.segment_id in waiting:
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

    def forget(self, segment: StoredSegment) -> None:
        """Forget a segment that is not stored any more: a running rewrite is not published."""
        if self._job is not None and self._job.segment is segment:
            self._job.rewrite.left.set()

    def take_finished(self) -> Reordering | None:
        """The running rewrite, if it has ended."""
        job = self._job
        if job is None or not job.future.done():
            return None
        self._job = None
        self._versions.release(job.old_id)
        job.error = job.future.exception()
        if job.error is not None:
            if not isinstance(job.error, WriteAbandoned):
                self.stats.failed += 1
                logger.warning("a segment could not be reordered: %s", job.error)
            # Perhaps the file is published already, or could not be removed.
            job.useless = True
        elif (shares := job.future.result()) is None:
            self.stats.not_worth += 1
        elif self._tree.get(job.old_id) is not job.segment or not job.segment.on_disk:
            job.useless = True
        else:
            self._take_over(job, shares)
        return job

    def summary(self) -> dict[str, int]:
        """Counters for the statistics page; `pending` segments are being rewritten or wait."""
        return {"pending": self.pending, **dataclasses.asdict(self.stats)}

    def close(self, seconds: float) -> None:
        """Forget waiting segments, and let a running rewrite end, for `take_finished`."""
        self._queue.clear()
        self._rewriter.close(seconds)

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
            self._readers.acquire(segment),
            info,
            history.average,
            history.order_key,
            self._tree.node_starts(segment),
            history.ssd_bytes,
            gap_bytes,
            force,
        )
        future = self._rewriter.submit(rewrite)
        self._job = Reordering(
            segment, segment.segment_id, segment.file_bytes, file_bytes, rewrite, future
        )

    def _take_over(self, job: Reordering, shares: Shares) -> None:
        assert job.segment.history is not None
        self._tree.replace(job.segment, job.rewrite.info, job.new_bytes)
        self._versions.succeed(job.old_id, job.segment, shares)
        self._versions.retire(job.old_id)
        job.segment.history.ssd_bytes = 0
        job.taken_over = True
        self.stats.segments += 1
        self.stats.bytes_written += job.new_bytes


def _may_pay(segment: StoredSegment, force: bool) -> bool:
    history = segment.history
    if not segment.ready or history is None or not history.accesses.any():
        return False
    return force or history.ssd_bytes > segment.file_bytes
