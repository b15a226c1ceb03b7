"""Works on the disk in the background: writes, removals, second looks, the index.

One thread does all of it in order, so that removals precede the write for which they make room.
Results are futures. Failures are raised by these or reported to `Health`, and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from impress_sglang.codes.coding import LayerEncoder
from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.storage.directory import (
    QUARANTINE,
    StoreDirectory,
    quarantined_files,
    segment_files,
)
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import OpenSegment, SegmentInfo, read_header
from impress_sglang.storage.writer import TEMPORARY_SUFFIX, LayerReader, write_segment
from impress_sglang.store.health import Health, Verdict
from impress_sglang.store.journal import Journal, Record
from impress_sglang.store.stored import StoredSegment
from impress_sglang.threads import BackgroundThread, use_one_torch_thread

logger = logging.getLogger(__name__)

# Removals that the disk has refused are retried when it has recovered, and after this time.
RETRY_S = 60.0
# Maximum number of looks that cannot read a segment although the disk answers. With the pauses
# between them, they take at least 15 seconds, after which a link that was reset is back.
MAX_LOOKS = 5
# Number of damaged segments that are kept for an analysis of the damage.
MAX_QUARANTINED = 4
# Errors of a place on the medium, as opposed to the machine or the caller.
_MEDIA_ERRORS = frozenset(
    {errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO}
)


class DiskWorker(BackgroundThread):
    """Works on the disk of a store. Thread: the store's, for the methods up to `blocked_removals`.

    The store's thread submits calls of the methods after `blocked_removals` to the worker's thread.
    """

    def __init__(self, directory: StoreDirectory, health: Health, *, direct: bool) -> None:
        super().__init__("impress-write", use_one_torch_thread)
        self._directory, self._health, self._direct = directory, health, direct
        self.files = directory.files
        self.journal = Journal(self.files, directory.path)
        # Small files that the disk has refused, by name.
        self._refused_files: dict[str, bytes] = {}
        # Removals that the disk has refused, by segment or `QUARANTINE`, and the bytes to remove.
        self._refused_removals: dict[str, tuple[Callable[[], object], int]] = {}
        self._retried_at = 0.0
        # Number of looks that could not read a segment although the disk answered.
        self._failed_looks = Counter[str]()
        # Bytes of all removals so far: the store's thread adds to the first, the worker's to the
        # second.
        self._submitted_bytes = self._removed_bytes = 0
        self.quarantined_bytes = 0
        """Bytes of damaged segments that are kept; before `recover` without earlier processes'."""
        self.progress = time.monotonic()
        """Time of the last progress; while it advances, work continues."""
        self.unused_bytes = 0
        """Bytes of files that could not be read at the start, and of their possible descendants."""

    def recover(self) -> tuple[list[StoredSegment], int]:
        """Make index and folder consistent, before any other work.

        Unfinished files are removed, damaged files and files of another identity are moved to
        quarantine, and files that cannot be read now stay where they are.

        Returns the segments with usable files, and the number of files that cannot be read now,
        whose descendants are not known.

        Raises:
            OSError: the folder cannot be read.
        """
        files, indexed = self.files, self.journal.segments()
        segments, unindexed, num_unreadable = list[StoredSegment](), [], 0
        for segment_id, path, finished in segment_files(files, self._directory.path):
            if not finished:
                logger.info("removing unfinished %s", path)
                files.unlink(Path(path))
                continue
            indexed_segment, size = indexed.pop(segment_id, None), 0
            try:
                status = files.stat(path)
                size = status.st_size
                segment = indexed_segment or _read_segment(files, segment_id, Path(path))
                if size != segment.file_bytes:
                    raise SegmentUnreadable(segment_id, "has the wrong size")
                if segment.info.identity != self._directory.identity:
                    raise SegmentUnreadable(segment_id, "belongs to another model")
                segment.written = status.st_mtime
            except SegmentUnreadable as error:
                if self.quarantine(error) is Verdict.UNCLEAR:
                    self.unused_bytes += size
                continue
            except (OSError, StoreUnavailable) as error:
                if indexed_segment is None:
                    num_unreadable += 1
                    self.unused_bytes += size
                    logger.warning("%s stays where it is, unused: %s", path, error)
                    continue
                # An indexed segment is verified when it is opened. Its age is not known, so it
                # counts as oldest.
                segment = indexed_segment
                segment.written = 0.0
            if indexed_segment is None:
                unindexed.append(segment)
            segments.append(segment)
        for segment_id in indexed:
            logger.warning("segment %s is in the index but has no file", segment_id)
        if unindexed or indexed:
            self.record(*([{"gone": list(indexed)}] if indexed else []), *unindexed)
        self.tidy_quarantine()
        return segments, num_unreadable

    def delete(self, segments: Mapping[str, int]) -> None:
        """Remove segments (id: bytes) and their index entries; readers of open files continue."""
        self._submitted_bytes += sum(segments.values())
        self.submit(self._delete, segments)

    @property
    def removing_bytes(self) -> int:
        return self._submitted_bytes - self._removed_bytes

    @property
    def blocked_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in list(self._refused_removals.values()))

    def blocked_removals(self) -> frozenset[str]:
        """Return the names of refused removals; these files count as present when room is made."""
        return frozenset(self._refused_removals)

    def write(
        self,
        segment: StoredSegment,
        read_layer: LayerReader,
        coding: LayerEncoder | None,
        blocked_removals: frozenset[str],
        is_wanted: Callable[[], bool],
    ) -> None:
        """Write and publish a segment; see `write_segment`.

        `blocked_removals`: result of `blocked_removals()` before room was made for the segment. If
        other removals have been refused since, that room does not exist.

        Raises:
            OSError: the room does not exist, or the disk refuses the write.
        """
        if not self.blocked_removals() <= blocked_removals:
            raise OSError(errno.ENOSPC, "what should have made room could not be removed")
        path = self._directory.segment_path(segment.segment_id)

        def read_and_note(layer: int) -> tuple[Tensor, Tensor]:
            self.progress = time.monotonic()
            return read_layer(layer)

        try:
            write_segment(
                path,
                segment.info,
                read_and_note,
                self.files,
                direct=self._direct,
                coding=coding,
                is_wanted=is_wanted,
            )
        except OSError as error:
            self._health.report_failure("a prefix could not be stored", error, reading=False)
            raise
        finally:
            self.progress = time.monotonic()
        # The file is authoritative: the next start reads files that the index lacks.
        self.record(segment)

    def adopt(self, segment: StoredSegment, fetched: Path) -> None:
        """Move a fetched, synced file into the store."""
        path = self._directory.segment_path(segment.segment_id)
        self.files.make_directory(path.parent)
        with self.files.opened(fetched, os.O_RDONLY) as descriptor:
            # The age of its KVs, which orders to purge and `--impress-ttl` compare.
            self.files.set_mtime(descriptor, int(segment.written * 1e9))
        self.files.rename(fetched, path)
        self.files.sync_directory(path.parent)
        self.record(segment)

    def _delete(self, segments: Mapping[str, int]) -> None:
        try:
            for segment_id, num_bytes in segments.items():
                self._remove(segment_id, functools.partial(self._unlink, segment_id), num_bytes)
            self.record({"gone": list(segments)})
            if self._refused_removals and time.monotonic() - self._retried_at > RETRY_S:
                self._retry()
        finally:
            self._removed_bytes += sum(segments.values())
            self.progress = time.monotonic()

    def _unlink(self, segment_id: str) -> None:
        path = self._directory.segment_path(segment_id)
        for file in (path, path.with_name(path.name + TEMPORARY_SUFFIX)):
            self.files.unlink(file)

    def put_small_file(self, name: str, content: bytes) -> None:
        """Write or replace a small file in the store's folder; retried by `retry_refused`."""
        self._refused_files[name] = content
        try:
            self._directory.put(name, content)
            del self._refused_files[name]
        except OSError as error:
            # Reported each time: without a probe there would be no retry.
            self._health.report_failure(f"{name} cannot be written", error, reading=False)

    def empty_quarantine(self) -> None:
        """Remove all files in quarantine; retried if the disk refuses."""
        self._remove(QUARANTINE, functools.partial(self.tidy_quarantine, 0))

    def _remove(self, name: str, job: Callable[[], object], num_bytes: int = 0) -> None:
        """Do a removal; if the disk refuses, it is retried with the other refused removals."""
        try:
            # If the folder itself is missing, every file seems to be removed.
            self._directory.check_readable()
            job()
            self._refused_removals.pop(name, None)
        except OSError as error:
            was_refused = name in self._refused_removals
            self._refused_removals[name] = job, num_bytes
            if not was_refused:
                # A retry is counted and reported already, and must not stop other work.
                self._health.report_failure(f"{name} cannot be removed", error, reading=False)

    def retry_refused(self) -> None:
        """Redo the work that the disk has refused, now that it answers again."""
        # Earlier looks may have failed because of the disk.
        self._failed_looks.clear()
        self._retry()
        self.record()
        for name, content in list(self._refused_files.items()):
            self.put_small_file(name, content)

    def _retry(self) -> None:
        self._retried_at = time.monotonic()
        for name, refused in list(self._refused_removals.items()):
            self._remove(name, *refused)

    def tidy_quarantine(self, max_files: int = MAX_QUARANTINED) -> None:
        """Remove all but the latest files in quarantine; raises `OSError` if the disk refuses."""
        paths = quarantined_files(self.files, self._directory.path)
        files = [(self.files.stat(path), path) for path in paths]
        # The time of the rename, not of the last write.
        files.sort(key=lambda file: file[0].st_ctime_ns)
        # Counted first, so that the sum is right even if a file cannot be removed.
        self.quarantined_bytes = sum(status.st_size for status, _ in files)
        for status, path in files[: max(len(files) - max_files, 0)]:
            self.files.unlink(path)
            self.quarantined_bytes -= status.st_size

    def record(self, *changes: StoredSegment | Record) -> None:
        """Record changes in the journal, which retries those that the disk refuses."""
        try:
            self.journal.record(*changes)
        except OSError as error:
            self._health.report_failure("the index could not be written", error, reading=False)

    def recheck(self, info: SegmentInfo) -> Verdict:
        """Read a whole segment again and verify it.

        A damaged segment is moved to quarantine, and so is one that could not be read in
        `MAX_LOOKS` looks although the disk answered.
        """
        try:
            path = self._directory.segment_path(info.segment_id)
            with contextlib.closing(OpenSegment(path, self.files, direct=self._direct)) as segment:
                if not segment.info.describes_same(info):
                    raise SegmentUnreadable(info.segment_id, "index and segment file do not agree")
                segment.check_all(self._note_progress)
            del self._failed_looks[info.segment_id]
            return Verdict.GOOD
        except SegmentUnreadable as error:
            return self.quarantine(error)
        except StoreUnavailable as error:
            logger.warning("a second look has seen nothing: %s", error)
            at_fault = (
                isinstance(error.__cause__, OSError) and error.__cause__.errno in _MEDIA_ERRORS
            )
            # Other places of the disk work despite a bad sector, but not with a bad cable.
            with contextlib.suppress(OSError):
                if at_fault:
                    self._directory.check_writable()
                    self._failed_looks[info.segment_id] += 1
                    if self._failed_looks[info.segment_id] >= MAX_LOOKS:
                        failure = SegmentUnreadable(info.segment_id, "can never be read")
                        return self.quarantine(failure)
            return Verdict.UNCLEAR

    def _note_progress(self) -> None:
        self.progress = time.monotonic()

    def quarantine(self, error: SegmentUnreadable) -> Verdict:
        """Quarantine a damaged segment, or drop a missing one, unless the folder is missing."""
        path = self._directory.segment_path(error.segment_id)
        try:
            self._directory.check_readable()
            missing = path.name not in self.files.list(path.parent)
        except OSError as failure:
            self._health.report_failure("the store is not there", failure, reading=True)
            return Verdict.UNCLEAR
        if missing:
            logger.warning("%s; its file is gone", error)
        else:
            quarantine_dir = self._directory.path / QUARANTINE
            try:
                self.files.rename(path, quarantine_dir / path.name)
                try:
                    # Otherwise a power loss could restore it beside its replacement.
                    for folder in (quarantine_dir, path.parent):
                        self.files.sync_directory(folder)
                finally:
                    self.tidy_quarantine()
            except OSError as failure:
                self._health.report_failure(
                    "a segment could not be set aside", failure, reading=False
                )
                return Verdict.UNCLEAR
            logger.error("%s; set aside in quarantine", error)
        self.record({"gone": [error.segment_id]})
        return Verdict.GONE if missing else Verdict.BAD


def _read_segment(files: FileSystem, segment_id: str, path: Path) -> StoredSegment:
    info = read_header(path, files).info
    if info.segment_id != segment_id:
        raise SegmentUnreadable(segment_id, f"is a copy of segment {info.segment_id}")
    return StoredSegment(info, info.layout().file_bytes)
