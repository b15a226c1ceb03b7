"""What was fetched from a bucket becomes a file of the store, if there is room."""

from __future__ import annotations

from concurrent.futures import Future

from impress_sglang.storage.segment import SegmentInfo
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.losses import Cause, prompt_of
from impress_sglang.store.quota import Quota
from impress_sglang.store.stored import SegmentState, StoredSegment
from impress_sglang.store.writing import SegmentWrites


class FetchedSegments:
    """Takes whole files over, one after the other; the store's thread owns it."""

    def __init__(self, disk: StoreDisk, quota: Quota, writes: SegmentWrites) -> None:
        """Begin with none."""
        self._disk, self._quota, self._writes = disk, quota, writes
        self._moving: tuple[SegmentInfo, Future[None]] | None = None

    def poll(self) -> None:
        """Take over what was moved, and begin to move the next one."""
        bucket = self._disk.bucket
        if bucket is None:
            return
        if self._moving is not None:
            info, future = self._moving
            if not future.done():
                return
            self._moving = None
            self._end(info, future.exception())
        if (whole := bucket.take_whole()) is not None:
            self._begin(whole)

    def _begin(self, info: SegmentInfo) -> None:
        disk, bucket = self._disk, self._disk.bucket
        assert bucket is not None
        segment = disk.tree.get(info.segment_id)
        size = info.layout().file_bytes
        bucket.files.leave(info)
        if segment is None or not disk.is_far(segment) or not self._make_room(segment, size):
            disk.worker.submit(bucket.files.end, info)
            return
        self._quota.adopting_bytes = size
        row = info, size, segment.use, segment.written
        moving = disk.worker.submit(
            bucket.files.end, info, lambda path: disk.worker.adopt(row, path)
        )
        self._moving = info, moving

    def _make_room(self, segment: StoredSegment, size: int) -> bool:
        """Evict what must go for the file, if it may be written at all."""
        if not segment.ready or not self._writes.are_taken:
            return False
        info = segment.info
        tokens = prompt_of(segment)
        keep = self._disk.tree.match(info.namespace, tokens, least=info.quality, only_ready=False)
        file = StoredSegment(info, size, SegmentState.PENDING)
        victims = self._quota.make_room(file, keep, self._writes.is_needed)
        if victims is not None:
            self._writes.evict(victims, Cause.EVICTED)
        return victims is not None

    def _end(self, info: SegmentInfo, error: BaseException | None) -> None:
        size, self._quota.adopting_bytes = self._quota.adopting_bytes, 0
        if error is not None:
            self._disk.health.failed("a segment could not be kept", error, reading=False)
            return
        segment = self._disk.tree.get(info.segment_id)
        if segment is None or not self._disk.is_far(segment) or not segment.ready:
            # Purged meanwhile.
            self._disk.worker.delete({info.segment_id: size})
            return
        self._disk.tree.take_over(segment, size)
        self._quota.take_over(segment)
        assert self._disk.bucket is not None
        self._disk.bucket.stored(segment, send=False)
