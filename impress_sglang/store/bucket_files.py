"""Objects as files: a local file each, which is filled as it is read.

So everything behind `storage.files.FileSystem` reads an object as it reads a file, and verifies it
as it verifies a file. What is fetched are aligned ranges of `RANGE_BYTES`, each once, whoever wants
parts of it. When nobody reads any more, the rest is fetched and the whole is verified: then it can
become a file of the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.storage.directory import StoreDirectory
from impress_sglang.storage.engines import BlockEngine, ThreadEngine
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import (
    SEGMENT_SUFFIX,
    OpenSegment,
    SegmentInfo,
    decode_header,
    reading,
)
from impress_sglang.storage.writer import TEMPORARY_SUFFIX
from impress_sglang.store.bucket import Bucket

logger = logging.getLogger(__name__)

# Large enough for the throughput of a connection with latency; a layer of a small model has less.
RANGE_BYTES = 1 << 20
# Most headers are shorter.
_HEADER_BYTES = 256 << 10
# Ranges in flight: threads that wait for the network without the GIL.
MOST_READS = 32
# After so many seconds without a reader the rest of an object is fetched.
IDLE_SECONDS = 0.5


@dataclasses.dataclass(slots=True, eq=False)
class _Object:
    """An object that is open, or was."""

    name: str
    info: SegmentInfo
    path: Path
    local: Path
    size: int
    descriptor: int = -1
    users: int = 0
    idle_since: float = dataclasses.field(default_factory=time.monotonic)
    ranges: dict[int, Future[None]] = dataclasses.field(default_factory=dict)
    whole: bool = False
    """Whether all of it is there, and verified."""
    leaves: bool = False
    """Whether it is counted elsewhere."""
    ended: bool = False
    """Whether its file goes, or has become another's, with the last reader."""


class BucketFiles(FileSystem):
    """Opens, reads and closes objects; the rest of a file system is the local one's."""

    def __init__(self, bucket: Bucket, directory: StoreDirectory, most_bytes: int) -> None:
        """`most_bytes`: of the objects that are open at once."""
        self._bucket, self._directory, self._files = bucket, directory, directory.files
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._of_path: dict[Path, _Object] = {}
        self._of_descriptor: dict[int, _Object] = {}
        self.fetched_bytes = 0

    @property
    def open_bytes(self) -> int:
        """Bytes of the local files of objects, if all of these were fetched, but for those that
        are `leave`ing."""
        return sum(own.size for own in list(self._of_descriptor.values()) if not own.leaves)

    def leave(self, info: SegmentInfo) -> None:
        """Count an object no more, which is going to be ended."""
        self._of_path[_path_of(info)].leaves = True

    def path_of(self, name: str, info: SegmentInfo) -> Path:
        """Where an object of this name is opened, which must be that segment."""
        path = _path_of(info)
        # As any unfinished file it goes at the next start.
        local = self._directory.segment_path(uuid.uuid4().hex)
        local = local.with_name(local.name + TEMPORARY_SUFFIX)
        own = _Object(name, info, path, local, info.layout().file_bytes)
        with self._lock:
            self._of_path.setdefault(path, own)
        return path

    def stat(self, path: Path | str) -> os.stat_result:
        """Only its size means something."""
        return os.stat_result((0, 0, 0, 0, 0, 0, self._find(path).size, 0, 0, 0))

    def open(self, path: Path, flags: int) -> int:
        """Open an object of `path_of`; an `OSError` also if too much is open."""
        with self._lock:
            own = self._find(path)
            if own.descriptor < 0:
                try:
                    self._bucket.check()
                    used = sum(other.size for other in self._of_descriptor.values())
                    if used + own.size > self._most_bytes:
                        raise OSError(f"{used / 1e9:.2f} GB are being fetched, there is no room")
                    self._files.make_directory(own.local.parent)
                    flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR
                    own.descriptor = self._files.open(own.local, flags)
                except BaseException:
                    del self._of_path[path]
                    raise
                self._of_descriptor[own.descriptor] = own
            own.users += 1
            return own.descriptor

    def _find(self, path: Path | str) -> _Object:
        if (own := self._of_path.get(Path(path))) is None:
            # It has become a file since it was looked for.
            raise OSError(errno.EAGAIN, f"{path} is fetched no more")
        return own

    def close(self, descriptor: int) -> None:
        """End one reader; the file stays for others until it is whole, or `end`."""
        with self._lock:
            own = self._of_descriptor[descriptor]
            own.users -= 1
            own.idle_since = time.monotonic()
            self._forget_ended(own)

    def read(self, descriptor: int, offset: int, target: memoryview) -> None:
        """Fill `target`; what is not there is fetched, once, whoever waits for it."""
        own = self._of_descriptor[descriptor]
        if not own.whole:
            for number in range(offset // RANGE_BYTES, -(-(offset + len(target)) // RANGE_BYTES)):
                self._fetch(own, number)
        self._files.read(descriptor, offset, target)

    def engine(self, name: str, depth: int) -> BlockEngine:
        """Threads, more than for a drive: they wait for the network."""
        return ThreadEngine(MOST_READS, self.read, MOST_READS)

    def _fetch(self, own: _Object, number: int) -> None:
        mine = Future[None]()
        with self._lock:
            known = own.ranges.setdefault(number, mine)
        if known is not mine:
            return known.result()
        try:
            start = number * RANGE_BYTES
            found = self._bucket.range(own.name, start, min(RANGE_BYTES, own.size - start))
            self._files.write(own.descriptor, start, found)
            self.fetched_bytes += len(found)
            mine.set_result(None)
        except BaseException as error:
            with self._lock:
                # Whoever asks later tries again.
                del own.ranges[number]
            mine.set_exception(error)
            raise

    def complete(self) -> Iterator[SegmentInfo]:
        """Fetch the rest of objects that nobody reads; yields those whole then, to be `end`ed.

        What fails, or is damaged, is dropped, and fetched anew when it is read again. It is not
        deleted: the drive or the memory of this server may be at fault.
        """
        for own in list(self._of_descriptor.values()):
            idle = time.monotonic() - own.idle_since
            with self._lock:
                if own.whole or own.ended or own.users or idle < IDLE_SECONDS:
                    continue
                own.users += 1
            try:
                for number in range(-(-own.size // RANGE_BYTES)):
                    self._fetch(own, number)
                self._files.sync(own.descriptor)
                with contextlib.closing(
                    OpenSegment(own.local, self._files, direct=False)
                ) as segment:
                    segment.check_all()
                own.whole = segment.info.describes_same(own.info)
            except (OSError, PrefixUnreadable) as error:
                logger.warning("%s is not kept on the drive: %s", own.name, error)
            own.ended = own.ended or not own.whole
            self.close(own.descriptor)
            if own.whole:
                yield own.info

    def end(self, info: SegmentInfo, keep: Callable[[Path], None] | None = None) -> None:
        """Forget an object that is whole; `keep` moves its file, which is removed otherwise."""
        own = self._of_path[_path_of(info)]
        try:
            if keep is not None:
                keep(own.local)
        finally:
            with self._lock:
                own.ended = True
                self._forget_ended(own)

    def forget(self) -> None:
        """Remove the files of all objects; who still waits for one keeps its descriptor, which must
        not become another file's."""
        with self._lock:
            for own in list(self._of_path.values()):
                own.ended = own.descriptor >= 0
                with contextlib.suppress(OSError):
                    self._files.unlink(own.local)
                self._forget_ended(own)

    def _forget_ended(self, own: _Object) -> None:
        if own.ended and not own.users and self._of_path.get(own.path) is own:
            del self._of_path[own.path], self._of_descriptor[own.descriptor]
            with contextlib.suppress(OSError):
                self._files.close(own.descriptor)
                self._files.unlink(own.local)


def read_begun(bucket: Bucket, name: str, size: int) -> tuple[SegmentInfo, dict[str, str]]:
    """What the header of an object says, and its attributes."""
    content, attributes = bucket.begin(name, _HEADER_BYTES)

    def read(offset: int, length: int) -> bytes:
        nonlocal content
        if (missing := offset + length - len(content)) > 0:
            content += bucket.range(name, len(content), missing)
        if len(content) < offset + length:
            raise EOFError("an object is shorter than its header says")
        return content[offset : offset + length]

    with reading(name):
        return decode_header(name, size, read).info, attributes


def _path_of(info: SegmentInfo) -> Path:
    return Path(f"{info.segment_id}{SEGMENT_SUFFIX}")
