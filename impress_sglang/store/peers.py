"""What other servers of the model have stored in the same directory, as their journals say.

A thread looks every `LOOK_SECONDS` whether one has grown, with nothing but `open` and `stat`, so
that it works on network file systems. Segments of others are read like own ones, but never written,
moved, removed or counted in the tree: their `file_bytes` are 0 there.

A journal also has what a server asks of the others: to forget a prefix (`purge`), and to make room
(`want`). An order to purge has the time at which it was given, so that who starts later obeys it.
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

LOOK_SECONDS = 0.25
# Seconds between two looks for folders of other servers.
FOLDERS_SECONDS = 1.0
# The first line of a journal has fewer bytes.
_FIRST_BYTES = 256
# The most that one poll takes, in seconds.
_MOST_SECONDS = 0.005


@dataclasses.dataclass(frozen=True, slots=True)
class PeerEvent:
    """Something that another server has told: a segment, or that one is gone, or an order."""

    added: StoredSegment | None = None
    gone: str = ""
    purge: Mapping[str, Any] | None = None
    want: int = 0
    far: bool = False
    """Whether a bucket has it, and not a folder."""


@dataclasses.dataclass(slots=True)
class _FollowedJournal:
    """The journal of one folder, and what was read of it."""

    folder: Path
    seen: tuple[int, ...] = ()
    """What told that it has changed: its number, size and time."""
    first: bytes = b""
    end: int = 0
    segments: dict[str, int] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    """Of the files of these segments."""
    unsure: set[str] = dataclasses.field(default_factory=set)
    """Segments of a journal that was replaced by one that is not read to its end yet."""


class Peers:
    """The other servers of a model on one directory: what they have, and what is new of it."""

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory, self._files = directory, directory.files
        self._followed: dict[Path, _FollowedJournal] = {}
        self._folders_at = 0.0
        self.news: collections.deque[PeerEvent] = collections.deque()
        """What nobody has taken yet; a bucket adds what it has."""
        self.unreadable = False
        """Whether the last look has failed: then it is not known what others have."""
        self._stop = threading.Event()
        self._thread: BackgroundThread | None = None
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files of other servers."""
        return sum(followed.num_bytes for followed in list(self._followed.values()))

    @property
    def folders(self) -> list[Path]:
        """The folders of the other servers, alive or not."""
        return list(self._followed)

    def look(self) -> None:
        """See what is new, on the caller's thread; a failure of the disk is logged."""
        with self._lock:
            failed: Exception | None = None
            try:
                if time.monotonic() >= self._folders_at:
                    self._look_for_folders()
            except Exception as error:
                failed = error
            for followed in self._followed.values():
                try:
                    self.news.extend(self._read(followed))
                except Exception as error:
                    # Of the disk, or a line of another version: nothing ends the thread.
                    failed = error
            if failed is not None and self._followed and not self.unreadable:
                logger.warning("what another server stores cannot be read: %s", failed)
            self.unreadable = failed is not None

    def begin(self, orders: Iterable[Mapping[str, Any]]) -> list[StoredSegment]:
        """Look for the first time; returns the segments of others. What they want is not new.

        `orders`: to purge, which an earlier process of this folder has given.
        """
        self.news.extend(PeerEvent(purge=order) for order in orders)
        self.look()
        # Others may add to it meanwhile.
        news = [self.news.popleft() for _ in range(len(self.news))]
        gone = {event.gone for event in news}
        self.news.extend(event for event in news if event.purge is not None)
        found = [event.added for event in news if event.added is not None]
        for event in found:
            # Used before all that is used here.
            event.last_access = 1
        return [event for event in found if event.segment_id not in gone]

    def trim(self, folder: Path, num_bytes: float, only: Collection[str] | None = None) -> int:
        """Remove the oldest segments of a folder if no server has it, on the caller's thread;
        returns the bytes of the files. `only`: names of those that may go."""
        files, freed, gone = self._files, 0, list[str]()
        with files.opened(folder / LOCK, os.O_CREAT | os.O_RDWR) as lock:
            if not try_lock(lock):
                return 0
            found = [
                (files.stat(path), name, path) for name, path, _ in segment_files(files, folder)
            ]
            for status, name, path in sorted(found, key=lambda path: path[0].st_mtime_ns):
                if freed < num_bytes and (only is None or name in only):
                    files.unlink(Path(path))
                    freed += status.st_size
                    gone.append(name)
            append(files, folder, {"gone": gone})
        self.look()
        return freed

    def start(self) -> None:
        """Look again and again on a thread of its own, until `close`."""

        def follow() -> None:
            while not self._stop.wait(LOOK_SECONDS):
                self.look()

        self._thread = BackgroundThread("impress-follow")
        self._thread.submit(follow)

    def close(self, seconds: float) -> None:
        """End the thread, or leave it behind if that takes more than `seconds`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.close(seconds)

    def _look_for_folders(self) -> None:
        self._folders_at = time.monotonic() + FOLDERS_SECONDS
        there = self._directory.siblings()
        for folder in there:
            self._followed.setdefault(folder, _FollowedJournal(folder))
        for folder in self._followed.keys() - set(there):
            left = self._followed.pop(folder)
            self.news.extend(
                PeerEvent(gone=segment_id) for segment_id in left.unsure.union(left.segments)
            )

    def _read(self, followed: _FollowedJournal) -> Iterator[PeerEvent]:
        path, seen = followed.folder / JOURNAL, tuple[int, ...]()
        first, size = b"", 0
        # One that is gone is like an empty one.
        with contextlib.suppress(FileNotFoundError):
            # Opening a file tells a network file system to ask how long it is.
            self._files.close(self._files.open(path, os.O_RDONLY))
            status = self._files.stat(path)
            size = status.st_size
            seen = status.st_ino, size, status.st_mtime_ns
        if seen == followed.seen:
            return
        if seen:
            first = next(read_lines(self._files, path, block_bytes=_FIRST_BYTES), b"")
        if first != followed.first or size < followed.end:
            followed.unsure.update(followed.segments)
            followed.segments, followed.num_bytes, followed.first, followed.end = {}, 0, first, 0
        for line in read_lines(self._files, path, followed.end) if seen else ():
            if not line.endswith(b"\n"):
                break
            followed.end += len(line)
            if (record := decode(line)) is not None:
                yield from _news_of(record, followed)
        yield from (PeerEvent(gone=gone) for gone in followed.unsure - followed.segments.keys())
        followed.seen, followed.unsure = seen, set()

    def take(self) -> Iterator[PeerEvent]:
        """What is new, as long as that and what the caller does with it does not take too long; the
        rest comes with the next call."""
        if not self.news:
            return
        until = time.monotonic() + _MOST_SECONDS
        while self.news and time.monotonic() < until:
            yield self.news.popleft()


def _news_of(record: dict[str, Any], followed: _FollowedJournal) -> Iterator[PeerEvent]:
    if "add" in record:
        segment = segment_of(record)
        segment_id = segment.segment_id
        known = segment_id in followed.segments or segment_id in followed.unsure
        followed.num_bytes += segment.file_bytes - followed.segments.get(segment_id, 0)
        followed.segments[segment_id] = segment.file_bytes
        if not known and segment.info.identity == identity_in(followed.folder.name):
            segment.home, segment.file_bytes = followed.folder, 0
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
