"""Follows the journals of other servers of the model in the same directory.

A thread checks every `POLL_SECONDS` whether a journal has grown, with nothing but `open` and
`stat`, so that it works on network file systems. Other servers' segments are read like own ones,
but never written, moved, removed or counted in the tree, where their `file_bytes` are 0.

A journal also contains requests to the other servers: to purge a prefix (`purge`), and to make room
(`want`). An order to purge contains its time, so that servers that start later follow it, too.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from impress_sglang.storage.directory import (
    JOURNAL,
    LOCK,
    StoreDirectory,
    identity_in,
    segment_files,
    try_lock,
)
from impress_sglang.store.journal import append, decode, read_lines, segment_of
from impress_sglang.store.stored import StoredSegment
from impress_sglang.threads import BackgroundThread

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
# Seconds between two listings of the folders of other servers.
FOLDERS_SECONDS = 1.0
# The first line of a journal has fewer bytes.
_FIRST_BYTES = 256
# Maximum duration of one poll, in seconds.
_MAX_POLL_SECONDS = 0.005


@dataclasses.dataclass(frozen=True, slots=True)
class PeerEvent:
    """Event from another server: an added segment, the id of a removed one, an order to purge, or
    the bytes it `want`s freed."""

    added: StoredSegment | None = None
    gone: str = ""
    purge: Mapping[str, Any] | None = None
    want: int = 0
    from_bucket: bool = False
    """Whether it comes from a bucket instead of a folder."""


@dataclasses.dataclass(slots=True)
class _FollowedJournal:
    """The journal of one folder: its first line, the end of the part that was read, and the
    segments in that part."""

    folder: Path
    seen: tuple[int, ...] = ()
    """Inode, size and time of modification at the last look, which differ after a change."""
    first: bytes = b""
    end: int = 0
    segments: dict[str, int] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    """Bytes of the files of these segments."""
    unsure: set[str] = dataclasses.field(default_factory=set)
    """Segments of a replaced journal, while the new one is not read to its end."""


class Peers:
    """The other servers of a model on one directory, and events from them."""

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory, self._files = directory, directory.files
        self._followed: dict[Path, _FollowedJournal] = {}
        self._folders_at = 0.0
        self.events: collections.deque[PeerEvent] = collections.deque()
        """Events not taken yet; a `BucketPeer` adds its own."""
        self.unreadable = False
        """Whether the last look has failed, so that segments of others may be unknown."""
        self._stop = threading.Event()
        self._thread: BackgroundThread | None = None
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files of other servers."""
        return sum(followed.num_bytes for followed in list(self._followed.values()))

    @property
    def folders(self) -> list[Path]:
        """Folders of the other servers, running or not."""
        return list(self._followed)

    def poll(self) -> None:
        """Read new lines of all journals, on the caller's thread; a failure is logged."""
        with self._lock:
            failed: Exception | None = None
            try:
                if time.monotonic() >= self._folders_at:
                    self._look_for_folders()
            except Exception as error:
                failed = error
            for followed in self._followed.values():
                try:
                    self.events.extend(self._read(followed))
                except Exception as error:
                    # A failure of the disk, or a line of another version, must not end the thread.
                    failed = error
            if failed is not None and self._followed and not self.unreadable:
                logger.warning("what another server stores cannot be read: %s", failed)
            self.unreadable = failed is not None

    def begin(self, orders: Iterable[Mapping[str, Any]]) -> list[StoredSegment]:
        """Look for the first time; returns the segments of others, and drops old `want`s.

        `orders`: orders to purge of earlier processes of this folder.
        """
        self.events.extend(PeerEvent(purge=order) for order in orders)
        self.poll()
        # Other threads may add events meanwhile.
        events = [self.events.popleft() for _ in range(len(self.events))]
        removed = {event.gone for event in events}
        self.events.extend(event for event in events if event.purge is not None)
        segments = [event.added for event in events if event.added is not None]
        for segment in segments:
            # Used before all segments of this server.
            segment.last_access = 1
        return [segment for segment in segments if segment.segment_id not in removed]

    def may_have(self, segment_id: str) -> bool:
        """Whether a folder has this segment's file, of which its journal need not know."""
        for folder in self.folders:
            try:
                self._files.stat(self._directory.segment_path(segment_id, folder))
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("what another server stores cannot be read: %s", error)
            return True
        return False

    def trim(self, folder: Path, num_bytes: float, allowed: Collection[str] | None = None) -> int:
        """Remove `num_bytes` of the oldest segments of a folder that no server has locked, on the
        caller's thread; returns the bytes removed. `allowed`: ids of candidates."""
        files, freed, removed = self._files, 0, list[str]()
        with files.opened(folder / LOCK, os.O_CREAT | os.O_RDWR) as lock:
            if not try_lock(lock):
                return 0
            stored_files = [
                (files.stat(path), name, path) for name, path, _ in segment_files(files, folder)
            ]
            for status, name, path in sorted(stored_files, key=lambda path: path[0].st_mtime_ns):
                if freed < num_bytes and (allowed is None or name in allowed):
                    files.unlink(Path(path))
                    freed += status.st_size
                    removed.append(name)
            append(files, folder, {"gone": removed})
        self.poll()
        return freed

    def start(self) -> None:
        def follow() -> None:
            while not self._stop.wait(POLL_SECONDS):
                self.poll()

        self._thread = BackgroundThread("impress-follow")
        self._thread.submit(follow)

    def close(self, seconds: float) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.close(seconds)

    def _look_for_folders(self) -> None:
        self._folders_at = time.monotonic() + FOLDERS_SECONDS
        folders = self._directory.siblings()
        for folder in folders:
            self._followed.setdefault(folder, _FollowedJournal(folder))
        for folder in self._followed.keys() - set(folders):
            removed = self._followed.pop(folder)
            self.events.extend(
                PeerEvent(gone=segment_id) for segment_id in removed.unsure.union(removed.segments)
            )

    def _read(self, followed: _FollowedJournal) -> Iterator[PeerEvent]:
        path, file_state = followed.folder / JOURNAL, tuple[int, ...]()
        first_line, size = b"", 0
        # A missing journal is like an empty one.
        with contextlib.suppress(FileNotFoundError):
            # Opening a file lets a network file system update its size.
            self._files.close(self._files.open(path, os.O_RDONLY))
            status = self._files.stat(path)
            size = status.st_size
            file_state = status.st_ino, size, status.st_mtime_ns
        if file_state == followed.seen:
            return
        if file_state:
            first_line = next(read_lines(self._files, path, block_bytes=_FIRST_BYTES), b"")
        if first_line != followed.first or size < followed.end:
            followed.unsure.update(followed.segments)
            followed.segments, followed.num_bytes = {}, 0
            followed.first, followed.end = first_line, 0
        for line in read_lines(self._files, path, followed.end) if file_state else ():
            if not line.endswith(b"\n"):
                break
            followed.end += len(line)
            if (record := decode(line)) is not None:
                yield from _events_of(record, followed)
        yield from (PeerEvent(gone=gone) for gone in followed.unsure - followed.segments.keys())
        followed.seen, followed.unsure = file_state, set()

    def take(self) -> Iterator[PeerEvent]:
        """Yield new events for at most `_MAX_POLL_SECONDS`, including the caller's work on them."""
        if not self.events:
            return
        until = time.monotonic() + _MAX_POLL_SECONDS
        while self.events and time.monotonic() < until:
            yield self.events.popleft()


def _events_of(record: dict[str, Any], followed: _FollowedJournal) -> Iterator[PeerEvent]:
    if "add" in record:
        segment = segment_of(record)
        segment_id = segment.segment_id
        is_known = segment_id in followed.segments or segment_id in followed.unsure
        followed.num_bytes += segment.file_bytes - followed.segments.get(segment_id, 0)
        followed.segments[segment_id] = segment.file_bytes
        if not is_known and segment.info.identity == identity_in(followed.folder.name):
            segment.foreign_dir, segment.file_bytes = followed.folder, 0
            segment.last_access = segment.hits = 0
            yield PeerEvent(added=segment)
    for gone in record.get("gone", ()):
        if (file_bytes := followed.segments.pop(gone, None)) is not None:
            followed.num_bytes -= file_bytes
            followed.unsure.discard(gone)
            yield PeerEvent(gone=gone)
    if "purge" in record:
        yield PeerEvent(purge=record["purge"])
    if "want" in record:
        yield PeerEvent(want=record["want"])
