"""Opens the disk of a store: the folder and its lock, its segments, the free space.

None of this has a time limit, so a running server does it on another thread; afterwards the store's
thread owns the result. No memory for caches is allocated here.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

from impress_sglang.codes.groups.energy import QueryMeter
from impress_sglang.config import OFF, ImpressConfig, bytes_of
from impress_sglang.errors import ConfigError
from impress_sglang.storage.directory import (
    CODING,
    StoreDirectory,
    other_stores,
    segment_files,
    take_free,
)
from impress_sglang.storage.files import FileSystem, installed
from impress_sglang.storage.segment import OpenSegment
from impress_sglang.store.bucket import open_bucket
from impress_sglang.store.bucket_peer import BucketPeer
from impress_sglang.store.content import ContentIndex
from impress_sglang.store.disk_worker import DiskWorker
from impress_sglang.store.health import DiskTask, Health, Suspect
from impress_sglang.store.orders import Pins
from impress_sglang.store.peers import Peers
from impress_sglang.store.stored import SegmentState, StoredSegment
from impress_sglang.store.tree import StoredTree
from impress_sglang.store.unattached import UnattachedSegments
from impress_sglang.threads import BackgroundThread

logger = logging.getLogger(__name__)

# A store of at least this many segments is large.
_MANY_SEGMENTS = 10_000
# Seconds between records of uses; a process that is killed loses the uses since the last one.
RECORD_SECONDS = 60.0
# Maximum number of uses per record, which takes less than a millisecond.
MAX_USES_PER_RECORD = 500


ProbeResult: TypeAlias = tuple[frozenset[str] | None, Exception | None]
"""Result of a probe: ids of the finished segments, None if the folder cannot be read; and the error
of what failed, if anything did."""


class StoreDisk:
    """The disk of one model's store, and the threads that touch it."""

    def __init__(
        self,
        config: ImpressConfig,
        identity: str,
        files: FileSystem | None = None,
        directory: StoreDirectory | None = None,
        *,
        keeps_orphans: bool = False,
    ) -> None:
        """Lock a folder, and recover the segments of earlier processes.

        `directory`: a folder locked by the caller; None for the first free one. `keeps_orphans`:
        remove no segments without a place: what they build on may be in a bucket.

        Raises:
            ConfigError: the directory cannot be used.
            StoreInUseError: too many processes serve this model from it.
        """
        self.files = files or installed()
        self._seconds = config.io_timeout
        self._record_at = time.monotonic() + RECORD_SECONDS
        # Own segments whose parent may be in the bucket.
        self._orphans: list[StoredSegment] = []
        self.meter = QueryMeter()
        self.directory = directory or take_free(self.files, config.ssd_path, identity)
        self.peers = Peers(self.directory)
        with contextlib.ExitStack() as undo:
            undo.callback(self.directory.close)
            undo.callback(self.peers.close, self._seconds)
            self.bucket: BucketPeer | None = None
            if (bucket := open_bucket(config)) is not None:
                self.bucket = BucketPeer(config, self.directory, bucket, self.peers.events)
                undo.callback(self.bucket.close, self._seconds)
            self.namespace = self.directory.namespace
            self.health = Health(self._seconds)
            try:
                self.direct = self.files.supports_direct_io(self.directory.path)
                self.worker = DiskWorker(self.directory, self.health, direct=self.direct)
                undo.callback(self._close_worker)
                if (coding := self.directory.get(CODING)) is not None:
                    self.meter.restore(coding)
                self.health.free_bytes = self.files.free_bytes(self.directory.path)
                # Separate from the worker, whose writes may hang.
                self._prober = BackgroundThread("impress-probe")
                undo.callback(self._prober.close, self._seconds)
                content = None if config.blend == OFF else ContentIndex()
                self.tree = StoredTree(content, config.ttl)
                self.unattached = self._recover(undo, keeps_orphans)
                max_pinned_bytes = bytes_of(config.ssd_gb) // 2
                self.pins = Pins(self.directory, self.worker, self.tree, max_pinned_bytes)
                self.other_stores = other_stores(self.files, self.directory.path)
                """Stores of other models and their bytes, latest store first."""
            except OSError as error:
                raise ConfigError(
                    f"--impress-ssd-dir {config.ssd_path} cannot be read: {error}"
                ) from error
            self._closing = undo.pop_all()
        self.peers.start()
        if self.bucket is not None:
            for segment in self._orphans:
                # Their objects are not other servers'.
                self.bucket.on_stored(segment, upload=False)
            segments = (*self.tree.segments(), *self._orphans)
            self.bucket.begin(segments, self.worker.journal.orders)
        logger.info(
            "SSD store %s: %d segments, %.1f MB, O_DIRECT %s",
            self.directory.path,
            len(self.tree),
            self.tree.file_bytes / 1e6,
            "on" if self.direct else "off",
        )

    def _recover(self, closing: contextlib.ExitStack, keeps_orphans: bool) -> UnattachedSegments:
        """Attach the segments on the disk to the tree; remove own files that cannot be attached.

        Garbage collection is off meanwhile. A large tree is frozen until `closing`: it has no
        garbage before the store closes, and with 100,000 segments each collection would take 0.4 s
        longer, for which requests would wait.
        """
        enabled = gc.isenabled()
        gc.disable()
        try:
            local_segments, num_unreadable = self.worker.recover()
            is_large = enabled and len(local_segments) >= _MANY_SEGMENTS
            if is_large:
                # Before the tree, which makes a collection slower; `freeze` keeps all garbage.
                gc.collect()
            foreign_segments = self.peers.begin(self.worker.journal.orders)
            unattached = UnattachedSegments(self.tree)
            unusable, orphans = unattached.restore(local_segments + foreign_segments)
            # Their parent may be a file that cannot be read now.
            unsure = keeps_orphans or num_unreadable or self.peers.unreadable
            kept = set(orphans if unsure else self._with_unlisted_parent(orphans))
            others = [segment for segment in orphans if segment not in kept]
            if self.bucket is None:
                unusable += others
            else:
                # Their parent may be there; `place` comes after the first list of its objects.
                self._orphans = others
                unattached.undecided = frozenset(segment.segment_id for segment in others)
            for segment in (*kept, *self._orphans):
                # A purge finds them there, and so does their expiry.
                left = self.tree.order.expiry_of(segment) - time.time()
                unattached.postpone(segment, left + 1.0)
                self.worker.unused_bytes += segment.file_bytes
            self._remove(unusable)
            if is_large:
                gc.freeze()
                # The tree is garbage then, which the next opening of a store collects first.
                closing.callback(gc.unfreeze)
        finally:
            if enabled:
                gc.enable()
        return unattached

    def _with_unlisted_parent(self, orphans: Iterable[StoredSegment]) -> Iterator[StoredSegment]:
        """Yield the orphans that build on a file which the journal of another server lacks."""
        kept = set[str]()
        for segment in orphans:
            parent_id = segment.parent_hint
            if parent_id in kept or (parent_id not in self.tree and self.peers.may_have(parent_id)):
                kept.add(segment.segment_id)
                yield segment

    def place(self, segment: StoredSegment) -> bool:
        """Attach a segment of an earlier process to one that only the bucket has, or remove it.

        Returns whether it is in the tree, also if it was.
        """
        if segment.segment_id in self.tree:
            return True
        self.worker.unused_bytes -= segment.file_bytes
        self.unattached.add_with_ancestors(segment)
        self.unattached.forget(segment.segment_id)
        is_attached = segment.segment_id in self.tree
        if not is_attached and self.bucket is not None:
            segment.state = SegmentState.LOST
            self._remove([segment])
            self.bucket.on_removed(segment)
        return is_attached

    def _remove(self, unusable: Sequence[StoredSegment]) -> None:
        for segment in unusable:
            logger.warning(
                "segment %s has no place: what it builds on is gone, or others are there; removed",
                segment.segment_id,
            )
        if sizes := {segment.segment_id: segment.file_bytes for segment in unusable}:
            self.worker.delete(sizes)

    def only_in_bucket(self, segment: StoredSegment) -> bool:
        return self.bucket is not None and segment.foreign_dir == self.bucket.home

    def open(self, segment: StoredSegment) -> OpenSegment:
        """Open a segment's file, in any folder or the bucket; raises as `OpenSegment`."""
        if self.bucket is not None and self.only_in_bucket(segment):
            path = self.bucket.path_of(segment.info)
            return OpenSegment(path, self.bucket.files, direct=False)
        path = self.directory.segment_path(segment.segment_id, segment.foreign_dir)
        return OpenSegment(path, self.files, direct=self.direct)

    def remove_foreign(self, segments: Iterable[StoredSegment]) -> None:
        """Remove objects of the bucket, and files in folders that no server has locked; a running
        server removes its files itself."""
        names: dict[Path, set[str]] = {}
        for segment in segments:
            if self.bucket is not None and self.only_in_bucket(segment):
                self.bucket.delete(segment)
            elif segment.foreign_dir is not None:
                names.setdefault(segment.foreign_dir, set()).add(segment.segment_id)
        for folder, ids in names.items():
            self.worker.submit(self.peers.trim, folder, math.inf, ids)

    def remove_unattached(self, segments: Sequence[StoredSegment]) -> None:
        """Remove segments that are not in the tree; see also `remove_foreign`."""
        own = [segment for segment in segments if segment.foreign_dir is None and segment.ready]
        for segment in own:
            segment.state = SegmentState.LOST
            self.worker.unused_bytes -= segment.file_bytes
        if own:
            self.worker.delete({segment.segment_id: segment.file_bytes for segment in own})
        self.remove_foreign(segments)

    def begin(self, task: DiskTask | Suspect) -> Future[Any]:
        if isinstance(task, Suspect):
            return self.worker.submit(self.worker.recheck, task.segment.info)
        if task is DiskTask.MEASURE:
            return self._prober.submit(self.directory.free_bytes)
        return self._prober.submit(probe, self.directory)

    def record_recent_uses(self) -> None:
        """Record uses of segments periodically, so that they outlast a killed process."""
        if time.monotonic() < self._record_at:
            return
        if self._record_uses(MAX_USES_PER_RECORD) < MAX_USES_PER_RECORD:
            self._record_at = time.monotonic() + RECORD_SECONDS

    def close(self) -> None:
        """Record uses of segments, end the threads and release the lock.

        Work that does not end within `--impress-io-timeout` is left running.
        """
        self._record_uses(len(self.tree))
        self._closing.close()

    def _close_worker(self) -> None:
        if not self.worker.close(self._seconds):
            logger.warning("access times are not kept for the next start")

    def _record_uses(self, max_segments: int) -> int:
        segments = self.tree.order.take_changed(max_segments)
        if uses := [
            {"use": segment.journal_usage} for segment in segments if segment.foreign_dir is None
        ]:
            self.worker.submit(self.worker.record, *uses)
        return len(segments)


def probe(directory: StoreDirectory) -> ProbeResult:
    """Check whether a disk that failed can be read and written; recreates a removed folder."""
    segments = None
    try:
        try:
            directory.check_readable()
        except FileNotFoundError:
            directory.restore()
        files = segment_files(directory.files, directory.path)
        segments = frozenset(name for name, _, finished in files if finished)
        directory.check_writable()
    except Exception as error:
        return segments, error
    return segments, None
