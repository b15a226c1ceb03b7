"""Accesses an object store, below one prefix of one bucket, and opens its objects as files.

`obstore` retries with back-off, for as long as the server waits for its drive. A request that still
fails raises `OSError`. Then all reads fail immediately until a list request succeeds, so that a
load of a stored prefix does not wait for each of its segments.

An opened object is a local file that is filled as it is read, in ranges of `RANGE_BYTES`. After its
last reader, the remaining ranges are fetched and the whole file is verified. Then it can become a
file of the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import importlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ConfigError, PrefixUnreadable
from impress_sglang.storage.directory import StoreDirectory, identity_in
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

logger = logging.getLogger(__name__)

_RETRIES = 4
_PUT_SECONDS = 600
# Names per response to a list request, the maximum of S3.
_PAGE = 1000
# Large enough for the throughput of a connection with latency; a layer of a small model is smaller.
RANGE_BYTES = 1 << 20
# Most headers are shorter.
_HEADER_BYTES = 256 << 10
# Ranges in flight, each on a thread that waits for the network without the GIL.
MAX_READS = 32
# Seconds without a reader after which the remaining ranges of an object are fetched.
IDLE_SECONDS = 0.5


class ObjectMeta(NamedTuple):
    """Entry of a list; `modified` is by the clock of the object store."""

    name: str
    size: int
    modified: datetime.datetime


class Bucket:
    """The objects below a prefix. Thread-safe; all requests wait for the network.

    Raises:
        OSError: the store does not answer, or refuses; `FileNotFoundError` for a missing object,
            `PermissionError` for one that must not be read.
    """

    def __init__(self, store: Any, patient: Any, url: str) -> None:
        """`store`, `patient`: `obstore` stores for reads and for writes; `url`: for messages."""
        self._obstore = importlib.import_module("obstore")
        exceptions = importlib.import_module("obstore.exceptions")
        self._exists, self._denied = exceptions.AlreadyExistsError, exceptions.PermissionDeniedError
        self._store, self._patient, self.url = store, patient, url
        self._lock = threading.Lock()
        self._failed_at = 0.0
        self.failures = 0

    @property
    def answers(self) -> bool:
        """Whether the last read was answered."""
        return not self._failed_at

    def check(self) -> None:
        """Raise `OSError` while reads fail immediately."""
        if not self.answers:
            raise OSError(errno.EAGAIN, f"{self.url} has failed, and is left alone for a while")

    def list(
        self, prefix: str, previous: Mapping[str, ObjectMeta] | None = None
    ) -> dict[str, ObjectMeta]:
        """Return all nonempty objects in a folder, by name; sends a request even after a failure.

        Unchanged entries of `previous` are reused: with a hundred thousand new Python objects, the
        garbage collector would stop the process.
        """
        objects = dict[str, ObjectMeta]()
        with self._request(reading=True):
            for page in self._obstore.list(self._store, prefix, chunk_size=_PAGE):
                for entry in page:
                    name, size, modified = entry["path"], entry["size"], entry["last_modified"]
                    meta = (previous or {}).get(name)
                    if meta is None or meta.size != size or meta.modified != modified:
                        meta = ObjectMeta(name, size, modified)
                    if size:
                        objects[name] = meta
        return objects

    def range(self, name: str, start: int, length: int) -> memoryview:
        """Read bytes of an object; fewer than `length` at its end."""
        self.check()
        with self._request(reading=True, of_object=True):
            content = self._obstore.get_range(self._store, name, start=start, length=length)
            return memoryview(content)

    def begin(self, name: str, length: int) -> tuple[bytes, dict[str, str]]:
        """Read the first bytes of an object, and its attributes."""
        self.check()
        with self._request(reading=True, of_object=True):
            options = {"range": (0, length)}
            response = self._obstore.get(self._store, name, options=options)
            return bytes(response.bytes()), dict(response.attributes)

    def put(
        self, name: str, content: bytes | bytearray, attributes: Mapping[str, str] | None = None
    ) -> bool:
        """Put an object; False if one of this name exists, which stays."""
        with self._request():
            try:
                self._obstore.put(
                    self._patient,
                    name,
                    content,
                    mode="create",
                    use_multipart=False,
                    attributes=dict(attributes or {}),
                )
            except self._exists:
                return False
            return True

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, which need not exist, by a thousand in a request."""
        if names:
            with self._request():
                self._obstore.delete(self._patient, names)

    @contextlib.contextmanager
    def _request(self, *, reading: bool = False, of_object: bool = False) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            # `obstore` raises exceptions of its own classes, among others.
            self.failures += 1
            if of_object and isinstance(error, self._denied):
                # Others may be read; an archived one is refused, too. Lists show wrong credentials.
                reading = False
                raise PermissionError(errno.EACCES, _first_line(error)) from error
            failure = error
            raise OSError(errno.EIO, _first_line(error)) from error
        finally:
            # A server without the right to write can still read.
            if reading:
                self._log_change(failure)

    def _log_change(self, error: Exception | None) -> None:
        with self._lock:
            failed_at, now = self._failed_at, time.monotonic()
            self._failed_at = 0.0 if error is None else failed_at or now
        if error is None and failed_at:
            logger.warning("%s answers again after %.1f s", self.url, now - failed_at)
        elif error is not None and not failed_at:
            logger.warning(
                "%s fails: %s; what only it has is computed until it answers again",
                self.url,
                _first_line(error),
            )


def open_bucket(config: ImpressConfig) -> Bucket | None:
    """Open the bucket and prefix of `--impress-store`, if it is given, without a request to it.

    `obstore` takes credentials and endpoint from the environment. Reads fail after
    `--impress-io-timeout`.

    Raises:
        ConfigError: `obstore` is missing, or refuses the URL.
    """
    if not (url := config.store):
        return None
    try:
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        raise ConfigError(
            "--impress-store needs obstore: pip install 'impress-sglang[s3]'"
        ) from error
    seconds = datetime.timedelta(seconds=config.io_timeout / 2)
    backoff = {
        "init_backoff": datetime.timedelta(milliseconds=100),
        "max_backoff": seconds / 4,
        "base": 2,
    }
    retry = {"max_retries": _RETRIES, "retry_timeout": seconds, "backoff": backoff}
    # Only an endpoint that the operator gives can be without TLS.
    client = {"connect_timeout": seconds, "allow_http": True}
    try:
        # A whole segment takes longer than a range of it.
        clients = [
            stores.from_url(url, client_options={**client, "timeout": timeout}, retry_config=retry)
            for timeout in (seconds, datetime.timedelta(seconds=_PUT_SECONDS))
        ]
    except Exception as error:
        raise ConfigError(f"--impress-store {url}: {_first_line(error)}") from error
    return Bucket(clients[0], clients[1], url)


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().split("\n", 1)[0]


@dataclasses.dataclass(slots=True, eq=False)
class FetchedObject:
    """An object that may be opened, and the local file into which it is fetched."""

    name: str
    info: SegmentInfo
    local: Path
    size: int
    descriptor: int = -1
    num_readers: int = 0
    idle_since: float = dataclasses.field(default_factory=time.monotonic)
    ranges: dict[int, Future[None]] = dataclasses.field(default_factory=dict)
    is_complete: bool = False
    """Whether all of it is fetched and verified."""
    is_adopted: bool = False
    """Whether it becomes a file of the store, which counts its bytes."""
    ended: bool = False
    """Whether it can no longer be opened; its descriptor is closed after the last reader."""


class BucketFiles(FileSystem):
    """Opens, reads and closes objects; other methods are those of local files."""

    def __init__(self, bucket: Bucket, directory: StoreDirectory, max_bytes: int) -> None:
        """`max_bytes`: limit on the total size of open objects."""
        self._bucket, self._directory, self._files = bucket, directory, directory.files
        self._max_bytes = max_bytes
        self._lock, self._opening = threading.Lock(), threading.Lock()
        self._by_path: dict[Path, FetchedObject] = {}
        self._by_descriptor: dict[int, FetchedObject] = {}
        self.fetched_bytes = 0

    @property
    def open_bytes(self) -> int:
        """Bytes that the local files of open objects have once they are fetched."""
        return sum(file.size for file in list(self._by_descriptor.values()) if not file.is_adopted)

    def path_of(self, name: str, info: SegmentInfo) -> Path:
        """Return the path by which `open` opens an object, which must be that segment."""
        path = _path_of(info)
        # Like any unfinished file it is removed at the next start.
        local = self._directory.segment_path(uuid.uuid4().hex)
        local = local.with_name(local.name + TEMPORARY_SUFFIX)
        with self._lock:
            self._by_path.setdefault(
                path, FetchedObject(name, info, local, info.layout().file_bytes)
            )
        return path

    def stat(self, path: Path | str) -> os.stat_result:
        """Return a status of which only the size is valid."""
        return os.stat_result((0, 0, 0, 0, 0, 0, self._find(path).size, 0, 0, 0))

    def open(self, path: Path, flags: int) -> int:
        """Open a path of `path_of`; raises `OSError` also if too many bytes are open."""
        # Without `_lock`, which `close` takes: its caller must not wait for the drive.
        with self._opening:
            file = self._find(path)
            descriptor = file.descriptor
            if is_new := descriptor < 0:
                descriptor = self._open_local(path, file)
            with self._lock:
                if not file.ended:
                    file.descriptor, self._by_descriptor[descriptor] = descriptor, file
                    file.num_readers += 1
                    return descriptor
            if is_new:
                self._files.close(descriptor)
                self._files.unlink(file.local)
            raise OSError(errno.EAGAIN, f"{path} has just ended")

    def _open_local(self, path: Path, file: FetchedObject) -> int:
        try:
            self._bucket.check()
            open_bytes = sum(other.size for other in list(self._by_descriptor.values()))
            if open_bytes + file.size > self._max_bytes:
                raise OSError(f"{open_bytes / 1e9:.2f} GB are being fetched, there is no room")
            self._files.make_directory(file.local.parent)
            return self._files.open(file.local, os.O_CREAT | os.O_TRUNC | os.O_RDWR)
        except BaseException:
            self._by_path.pop(path, None)
            raise

    def _find(self, path: Path | str) -> FetchedObject:
        if (file := self._by_path.get(Path(path))) is None:
            # It has become a file of the store since the caller got its path.
            raise OSError(errno.EAGAIN, f"{path} is fetched no more")
        return file

    def close(self, descriptor: int) -> None:
        """End one reader; the file stays until it is whole, or until `end`."""
        with self._lock:
            file = self._by_descriptor[descriptor]
            file.num_readers -= 1
            file.idle_since = time.monotonic()
            self._close_ended(file)

    def read(self, descriptor: int, offset: int, target: memoryview) -> None:
        """Fill `target`; missing ranges are fetched once, also for several concurrent readers."""
        file = self._by_descriptor[descriptor]
        if not file.is_complete:
            for number in range(offset // RANGE_BYTES, -(-(offset + len(target)) // RANGE_BYTES)):
                self._fetch(file, number)
        self._files.read(descriptor, offset, target)

    def engine(self, name: str, depth: int) -> BlockEngine:
        """Return an engine with more threads than for a drive, as they wait for the network."""
        return ThreadEngine(MAX_READS, self.read, MAX_READS)

    def _fetch(self, file: FetchedObject, number: int) -> None:
        new_future = Future[None]()
        with self._lock:
            future = file.ranges.setdefault(number, new_future)
        if future is not new_future:
            return future.result()
        try:
            start = number * RANGE_BYTES
            content = self._bucket.range(file.name, start, min(RANGE_BYTES, file.size - start))
            self._files.write(file.descriptor, start, content)
            self.fetched_bytes += len(content)
            new_future.set_result(None)
        except BaseException as error:
            with self._lock:
                # A later read tries again.
                del file.ranges[number]
            new_future.set_exception(error)
            raise

    def complete(self) -> Iterator[FetchedObject]:
        """Fetch the missing ranges of objects without readers; yields the objects that are whole.

        The caller passes these to `end`. An object that fails or is damaged is dropped, and fetched
        again when it is read again. It is not deleted from the bucket, because the drive or the
        memory of this server may be at fault.
        """
        for file in list(self._by_descriptor.values()):
            idle = time.monotonic() - file.idle_since
            with self._lock:
                if file.is_complete or file.ended or file.num_readers or idle < IDLE_SECONDS:
                    continue
                file.num_readers += 1
            try:
                for number in range(-(-file.size // RANGE_BYTES)):
                    self._fetch(file, number)
                self._files.sync(file.descriptor)
                with contextlib.closing(
                    OpenSegment(file.local, self._files, direct=False)
                ) as segment:
                    segment.check_all()
                file.is_complete = segment.info.describes_same(file.info)
            except (OSError, PrefixUnreadable) as error:
                logger.warning("%s is not kept on the drive: %s", file.name, error)
            if file.is_complete:
                yield file
            else:
                self.end(file)
            self.close(file.descriptor)

    def end(self, file: FetchedObject, keep: Callable[[Path], None] | None = None) -> None:
        """Remove an object's path, and its file unless `keep` moves it. Readers can continue."""
        try:
            if keep is not None:
                keep(file.local)
        finally:
            with self._lock:
                file.ended = True
                self._by_path.pop(_path_of(file.info), None)
                self._close_ended(file)
            with contextlib.suppress(OSError):
                self._files.unlink(file.local)

    def forget(self) -> None:
        """Remove the files of all objects; a reader that still waits for one keeps its descriptor,
        which must not become another file's."""
        for file in list(self._by_path.values()):
            self.end(file)

    def _close_ended(self, file: FetchedObject) -> None:
        if file.ended and not file.num_readers and file.descriptor >= 0:
            del self._by_descriptor[file.descriptor]
            with contextlib.suppress(OSError):
                self._files.close(file.descriptor)
            file.descriptor = -1


def read_object_header(bucket: Bucket, name: str, size: int) -> tuple[SegmentInfo, dict[str, str]]:
    """Read the description and the attributes of an object; raises `ValueError` if it is not one
    of ours, because its ids become names of files."""
    content, attributes = bucket.begin(name, _HEADER_BYTES)

    def read(offset: int, length: int) -> bytes:
        nonlocal content
        if (missing_bytes := offset + length - len(content)) > 0:
            content += bucket.range(name, len(content), missing_bytes)
        if len(content) < offset + length:
            raise EOFError("an object is shorter than its header says")
        return content[offset : offset + length]

    with reading(name):
        info = decode_header(name, size, read).info
    ids = info.segment_id, info.identity, info.namespace, info.prefix_digest
    numbers = info.prefix_len, info.generation, info.expires, info.windows_from
    if (
        not all(isinstance(text, str) and identity_in(text) == text for text in ids)
        or not all(type(number) is int and 0 <= number < 1 << 40 for number in numbers)
        or not 0 <= float(attributes.get("written", 0)) < 1 << 33
    ):
        raise ValueError("its description is not one of ours")
    return info, attributes


def _path_of(info: SegmentInfo) -> Path:
    return Path(f"{info.segment_id}{SEGMENT_SUFFIX}")
