"""The store's work on the disk in the background: writes, removals, second looks, the index.

One thread does it all in order, so that removals which make room precede the write that needs it.
Results are futures. Failures are in these or are reported to `Health`, and are raised nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.management.quarantine import Quarantine, unremoved
from impress_sglang.management.removals import Removals
from impress_sglang.precision.floors import CodingRule
from impress_sglang.storage.catalog import Catalog, CatalogEntry, SegmentUse
from impress_sglang.storage.direct_io import AlignedBuffer
from impress_sglang.storage.directory import (
    StoreDirectory,
    WrittenBefore,
    remove_store,
    segment_files,
    written_before,
)
from impress_sglang.storage.health import Health
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.segment import SegmentInfo, read_header
from impress_sglang.storage.writer import TEMPORARY_SUFFIX, LayerReader, write_segment
from impress_sglang.threads import BackgroundThread, compute_alone

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# Failed removals are tried again when the disk has recovered, and after this time.
RETRY_S = 60.0
# Errors that blame a place on the medium, and not the machine or the caller.
_OF_MEDIA = frozenset(
    {errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO}
)


class Verdict(enum.Enum):
    """What a second look at a segment has found."""

    GOOD = "good"
    BAD = "bad"
    """It is damaged, and is in quarantine now."""
    GONE = "gone"
    UNREADABLE = "unreadable"
    """It cannot be read, although the disk answers."""
    UNCLEAR = "unclear"
    """It cannot be read now."""

    @property
    def decides(self) -> bool:
        """Whether no other look is needed."""
        return self in (Verdict.GOOD, Verdict.BAD, Verdict.GONE)


@dataclasses.dataclass(slots=True)
class Survey:
    """What segments an earlier process has left; `anew`: rebuild the index from their files."""

    anew: bool
    entries: list[CatalogEntry] = dataclasses.field(default_factory=list)
    """Entries of files that can be used."""
    adopted: list[CatalogEntry] = dataclasses.field(default_factory=list)
    """Those of these entries that the index does not have."""
    missing: list[str] = dataclasses.field(default_factory=list)
    """Segments that only the index has."""
    unfinished: list[Path] = dataclasses.field(default_factory=list)
    damaged: list[SegmentUnreadable] = dataclasses.field(default_factory=list)
    """What is wrong with files that can never be used."""


class Keeper:
    """Works on the disk of a store, whose thread owns it; its own thread does the work."""

    def __init__(
        self,
        directory: StoreDirectory,
        health: Health,
        *,
        direct: bool,
        read_only: bool = False,
    ) -> None:
        """Work on a locked folder; `read_only`: it is only surveyed, and the index not changed."""
        self._directory = directory
        self._files = directory.files
        self._health = health
        self._direct = direct
        self._catalog = Catalog(self._files, directory.path, read_only=read_only)
        self._buffer = AlignedBuffer()
        self._thread = BackgroundThread("impress-write", compute_alone)
        # Small files that the disk has refused, for `catch_up`; used only on the keeper's thread.
        self._unkept: dict[str, bytes] = {}
        self._retried_at = 0.0
        self.removals = Removals()
        """Removals that are not done yet."""
        self.quarantine = Quarantine(directory)
        """Holds damaged segments; only the keeper's thread changes it."""
        self.progress = time.monotonic()
        """When something was last done; as long as this time advances, work goes on."""
        self.undeleted: dict[str, int] = {}
        """Bytes of segments whose files could not be removed yet."""
        self.unused_files = 0
        """Files that could not be read at the start; nobody knows what builds on them."""
        self.unused_bytes = 0
        """Bytes of these files, and of segments that may build on them."""

    def survey(self, identity: str, *, anew: bool = False) -> Survey:
        """Compare the files of this identity with their rows in the index; changes no file.

        With `anew`, the headers of files that have rows are read as well; of these rows, only the
        uses of segments are taken.

        Raises:
            OSError: the directory cannot be read.
            sqlite3.Error: the index can neither be read nor made anew.
        """
        known, survey = self._catalog.entries(), Survey(anew)
        for segment_id, path, finished in segment_files(self._files, self._directory.path):
            if not finished:
                survey.unfinished.append(Path(path))
                continue
            row = known.pop(segment_id, None)
            try:
                entry = self._recovered(segment_id, path, row, identity, anew=anew)
            except SegmentUnreadable as error:
                # A new error: the traceback of the old one would keep all that is found here alive,
                # for ever where garbage collection is off.
                survey.damaged.append(SegmentUnreadable(segment_id, error.detail))
                continue
            if entry is not None:
                survey.entries.append(entry)
                if row is None:
                    survey.adopted.append(entry)
        survey.missing.extend(known)
        return survey

    def recover(self, survey: Survey) -> list[CatalogEntry]:
        """Bring the index and the folder in line with a survey; returns the usable segments.

        Unfinished files are removed, damaged ones go to quarantine, and files that cannot be read
        now stay where they are. Called once, before any other method.

        Raises:
            OSError: the directory cannot be read.
        """
        for path in survey.unfinished:
            logger.info("removing unfinished %s", path)
            self._files.unlink(path)
        for error in survey.damaged:
            if self._condemn(error) is Verdict.UNCLEAR:
                with contextlib.suppress(OSError):
                    path = self._directory.segment_path(error.segment_id)
                    self.unused_bytes += self._files.stat(path).st_size
        for segment_id in survey.missing:
            logger.warning("segment %s is in the index but has no file", segment_id)
        # In one call each, because every change of the database takes a while.
        if survey.anew:
            self._index(self._catalog.begin_with, survey.entries)
        else:
            if survey.missing:
                self._index(self._catalog.remove, *survey.missing)
            if survey.adopted:
                self._index(self._catalog.add, *survey.adopted)
        self.quarantine.tidy()
        return survey.entries

    def write(
        self,
        entry: CatalogEntry,
        read_layer: LayerReader,
        coding: CodingRule | None,
        unremoved: frozenset[str],
        is_wanted: Callable[[], bool],
    ) -> Future[None]:
        """Write and publish a segment; see `write_segment`.

        `unremoved` names what could not be removed before room was made for the segment. If more
        is unremovable when the write begins, that room does not exist, and the write fails. The
        future raises `WriteAbandoned` or the error of the disk; then no file is left behind.
        """
        return self._submit(self._write, entry, read_layer, coding, unremoved, is_wanted)

    def delete(self, segments: Mapping[str, int]) -> None:
        """Remove segments (id: bytes) and their rows; readers of an open file can go on."""
        self.removals.note(self._submit(self._delete, segments), sum(segments.values()))

    def replace(self, segment_id: str, num_bytes: int, successor: CatalogEntry) -> None:
        """Remove the file of a segment that has a successor, and give its row to the latter."""
        removal = self._submit(self._replace, segment_id, num_bytes, successor)
        self.removals.note(removal, num_bytes)

    def look(self, info: SegmentInfo) -> Future[Verdict]:
        """Read a whole segment again and verify it; a damaged one goes to quarantine."""
        return self._submit(self._look, info)

    def condemn(self, info: SegmentInfo) -> Future[Verdict]:
        """Set aside a segment that repeated looks could not read."""
        error = SegmentUnreadable(info.segment_id, "can never be read")
        return self._submit(self._condemn, error)

    def remove_store(self, path: Path) -> Future[bool]:
        """See `directory.remove_store`."""
        return self._submit(remove_store, self._files, path)

    def record_uses(self, uses: list[SegmentUse]) -> Future[None]:
        """Record in the index how segments were used, for the next start."""
        return self._submit(self._index, self._catalog.record_uses, uses)

    def keep(self, name: str, make: Callable[[], bytes]) -> None:
        """Write a small file of this name to the store's folder, replacing an older one.

        `make` is called on the thread that writes segments.
        """
        self._submit(lambda: self._keep(name, make()))

    def written_before(self, seconds: float) -> Future[WrittenBefore]:
        """Find segments whose files were written no later than `seconds`, as of `time.time`."""
        return self._submit(written_before, self._directory, seconds)

    def empty_quarantine(self) -> None:
        """Remove all damaged segments from quarantine, because something is to be forgotten."""
        self._submit(self._change_quarantine, self.quarantine.empty)

    def indexed(self) -> Future[dict[str, int]]:
        """Segments of the index and the sizes that their files should have."""
        return self._submit(self._catalog.indexed)

    def catch_up(self) -> None:
        """Now that the disk answers again, redo the work that it refused."""
        self._submit(self._catch_up)

    def close(self, seconds: float) -> bool:
        """End the thread after all submitted work; False if that takes more than `seconds`."""
        self._submit(self._catalog.close)
        return self._thread.close(seconds)

    def _submit(self, function: Callable[..., _T], *arguments: Any) -> Future[_T]:
        return self._thread.submit(function, *arguments)

    def _write(
        self,
        entry: CatalogEntry,
        read_layer: LayerReader,
        coding: CodingRule | None,
        before: frozenset[str],
        is_wanted: Callable[[], bool],
    ) -> None:
        if not unremoved(self.undeleted, self.quarantine) <= before:
            raise OSError(errno.ENOSPC, "what should have made room could not be removed")
        path = self._directory.segment_path(entry.info.segment_id)

        def read_and_note(layer: int) -> tuple[Tensor, Tensor]:
            self.progress = time.monotonic()
            return read_layer(layer)

        try:
            write_segment(
                path,
                entry.info,
                read_and_note,
                self._buffer,
                self._files,
                direct=self._direct,
                coding=coding,
                is_wanted=is_wanted,
            )
        except OSError as error:
            self._health.failed("a prefix could not be stored", error, reading=False)
            raise
        finally:
            self.progress = time.monotonic()
        # The file is authoritative: the next start reads files that the index does not have.
        self._index(self._catalog.add, entry)

    def _replace(self, segment_id: str, num_bytes: int, successor: CatalogEntry) -> None:
        self._unlink(segment_id, num_bytes)
        self._index(self._catalog.replace, segment_id, successor)
        self.progress = time.monotonic()

    def _delete(self, segments: Mapping[str, int]) -> None:
        for segment_id, num_bytes in segments.items():
            self._unlink(segment_id, num_bytes)
        self._index(self._catalog.remove, *segments)
        stays = unremoved(self.undeleted, self.quarantine)
        if stays and time.monotonic() - self._retried_at > RETRY_S:
            self._retry()
        self.progress = time.monotonic()

    def _unlink(self, segment_id: str, num_bytes: int) -> None:
        try:
            # If the folder itself is not there, every file seems to be gone.
            self._directory.check_readable()
            path = self._directory.segment_path(segment_id)
            for own in (path, path.with_name(path.name + TEMPORARY_SUFFIX)):
                self._files.unlink(own)
            self.undeleted.pop(segment_id, None)
        except OSError as error:
            if segment_id in self.undeleted:
                # It is counted and reported already, and other removals go on.
                return
            self.undeleted[segment_id] = num_bytes
            logger.warning("segment %s cannot be removed now: %s", segment_id, error)
            self._health.failed("a segment could not be removed", error, reading=False)

    def _keep(self, name: str, content: bytes) -> None:
        try:
            self._directory.put(name, content)
            self._unkept.pop(name, None)
        except OSError as error:
            self._unkept[name] = content
            logger.warning("%s could not be written: %s", self._directory.path / name, error)
            self._health.failed(f"{name} could not be written", error, reading=False)

    def _catch_up(self) -> None:
        self._retry()
        self._index(self._catalog.flush)
        for name, content in list(self._unkept.items()):
            self._keep(name, content)

    def _retry(self) -> None:
        self._retried_at = time.monotonic()
        for segment_id, num_bytes in list(self.undeleted.items()):
            self._unlink(segment_id, num_bytes)
        self._change_quarantine(self.quarantine.tidy)

    def _change_quarantine(self, change: Callable[[], None]) -> None:
        was_stuck = self.quarantine.is_stuck
        try:
            change()
        except OSError as error:
            if not was_stuck:
                self._health.failed("quarantine could not be tidied", error, reading=False)

    def _index(self, change: Callable[..., None], *arguments: Any) -> None:
        try:
            change(*arguments)
        except (OSError, sqlite3.Error) as error:
            self._health.failed("the index could not be written", error, reading=False)

    def _look(self, info: SegmentInfo) -> Verdict:
        try:
            self._verify(info)
            return Verdict.GOOD
        except SegmentUnreadable as error:
            return self._condemn(error)
        except StoreUnavailable as error:
            logger.warning("a second look has seen nothing: %s", error)
            at_fault = isinstance(error.__cause__, OSError) and error.__cause__.errno in _OF_MEDIA
            return Verdict.UNREADABLE if at_fault and self._answers() else Verdict.UNCLEAR

    def _answers(self) -> bool:
        """Whether the rest of the disk works, as with a bad sector but not with a bad cable."""
        try:
            self._directory.check_writable()
        except OSError:
            return False
        return True

    def _note_progress(self) -> None:
        self.progress = time.monotonic()

    def _condemn(self, error: SegmentUnreadable) -> Verdict:
        """Set aside a damaged segment, or forget a missing one, unless the whole disk is gone."""
        path = self._directory.segment_path(error.segment_id)
        try:
            self._directory.check_readable()
            missing = path.name not in self._files.list(path.parent)
        except OSError as failure:
            self._health.failed("the store is not there", failure, reading=True)
            return Verdict.UNCLEAR
        if missing:
            logger.warning("%s; its file is gone", error)
        else:
            try:
                self.quarantine.take(error)
            except OSError as failure:
                self._health.failed("a segment could not be set aside", failure, reading=False)
                return Verdict.UNCLEAR
        self._index(self._catalog.remove, error.segment_id)
        return Verdict.GONE if missing else Verdict.BAD

    def _verify(self, info: SegmentInfo) -> None:
        """Read a whole segment and verify it.

        Raises:
            SegmentUnreadable: it is missing, short or damaged, or not what the index says.
            StoreUnavailable: it cannot be read now.
        """
        path = self._directory.segment_path(info.segment_id)
        segment = OpenSegment(path, self._files, direct=self._direct)
        try:
            if not segment.info.describes_same(info):
                raise SegmentUnreadable(info.segment_id, "index and segment file do not agree")
            segment.check_all(self._note_progress)
        finally:
            segment.close()

    def _recovered(
        self, segment_id: str, path: str, row: CatalogEntry | None, identity: str, *, anew: bool
    ) -> CatalogEntry | None:
        """The entry of a file; None if it cannot be read now.

        Raises:
            SegmentUnreadable: it can never be used.
        """
        try:
            entry = row
            if entry is None or anew:
                info = read_header(Path(path), self._files).info
                if info.segment_id != segment_id:
                    raise SegmentUnreadable(segment_id, f"is a copy of segment {info.segment_id}")
                used = () if row is None else row.use[1:]
                entry = CatalogEntry(info, info.layout().file_bytes, *used)
            if self._files.stat(path).st_size != entry.file_bytes:
                raise SegmentUnreadable(segment_id, "has the wrong size")
            if entry.info.identity != identity:
                raise SegmentUnreadable(segment_id, "belongs to another model")
            return entry
        except (OSError, StoreUnavailable) as error:
            # A segment that the index knows is verified when it is opened.
            if row is not None:
                return row
            self.unused_files += 1
            with contextlib.suppress(OSError):
                self.unused_bytes += self._files.stat(path).st_size
            logger.warning("%s stays where it is, unused: %s", path, error)
        return None
