"""The directory of the SSD store: one folder per model identity and server, see docs/format.md.

The marker holds the key of the store's namespaces, so it is as secret as the stored prompts. The
directory may be a symbolic link; links inside it are not ours. Servers of one model share the key;
only the holder of a folder's lock writes or removes anything there.

All functions raise `OSError` if the disk refuses, unless documented otherwise.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from impress_sglang.errors import ConfigError, StoreInUseError
from impress_sglang.storage.files import FileSystem, installed
from impress_sglang.storage.segment import FORMAT_VERSION, SEGMENT_SUFFIX
from impress_sglang.storage.writer import TEMPORARY_SUFFIX, publishing

logger = logging.getLogger(__name__)

MARKER = "store.json"
LOCK = "lock"
JOURNAL = "journal"
SEGMENTS = "segments"
QUARANTINE = "quarantine"
PINS = "pins.json"
CODING = "coding.npz"
_PROBE = "probe"
_KIND = "impress-sglang store"
_IDENTITY = re.compile(r"([0-9a-f]{32})(\.[1-9][0-9]?)?")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_SEGMENT = re.compile(
    rf"([0-9a-f]{{32}}){re.escape(SEGMENT_SUFFIX)}({re.escape(TEMPORARY_SUFFIX)})?"
)
_MAX_MARKER_BYTES = 4096
_MAX_SMALL_FILE_BYTES = 1 << 30
_KEY_BYTES = 32
# Seconds within which the first server of a model must write the key.
_KEY_SECONDS = 10.0
MAX_SERVERS = 100
MODEL_DIGITS = 28
"""Digits of the name of a rank's store that name the model; the others are the rank."""


class StoreDirectory:
    """The folder of the served model: its lock, its key, and checks that the disk answers."""

    def __init__(self, files: FileSystem, root: Path, name: str) -> None:
        """Create the folder `name` or take an existing one, and lock it.

        Raises:
            ConfigError: it cannot be written, or is not a store of ours.
            StoreInUseError: another process has the lock.
        """
        self.files = files
        self.root = Path(os.path.realpath(root))
        self.path = self.root / name
        self.identity = identity_in(name) or name
        self._closing, self._probing = threading.Lock(), threading.Lock()
        self._closed = False
        try:
            self._lock, self._marker = self._claim(None)
            self._device = files.stat(self.root).st_dev
            self.key = _key_in(self._marker)
        except OSError as error:
            raise ConfigError(f"--impress-ssd-dir {root} cannot be written: {error}") from error

    def take_key(self, key: bytes) -> None:
        """Use the key of another store that shares segments; this store has none yet."""
        self._mark(key, new=False)
        self._marker, self.key = _read_small(self.files, self.path / MARKER), key

    def namespace(self, text: str) -> str:
        """Return the stored name of a namespace: a keyed hash, because the text may be secret."""
        return hashlib.blake2b(text.encode(), key=self.key, digest_size=16).hexdigest()

    def segment_path(self, segment_id: str, folder: Path | None = None) -> Path:
        """Return the path of a segment's file; 256 folders keep each one small.

        `folder`: folder of the server that has it; None means this one.
        """
        name = f"{segment_id}{SEGMENT_SUFFIX}"
        return (folder or self.path) / SEGMENTS / segment_id[:2] / name

    def siblings(self) -> list[Path]:
        """List the folders of other servers of this model, which have the same key."""
        names = self.files.list(self.root)
        siblings = [self.root / path for path in names if identity_in(path) == self.identity]
        return [path for path in siblings if path != self.path and is_store(self.files, path)]

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, atomically replacing an older one."""
        path = self.path / name
        # A killed process may have left it.
        self.files.unlink(path.with_name(name + TEMPORARY_SUFFIX))
        with publishing(self.files, path, direct=False) as descriptor:
            self.files.write(descriptor, 0, memoryview(content))

    def get(self, name: str) -> bytes | None:
        """Read a small file written by `put`; None if it does not exist."""
        try:
            return _read_small(self.files, self.path / name, _MAX_SMALL_FILE_BYTES)
        except FileNotFoundError:
            return None

    def check_readable(self) -> None:
        """Raise unless the folder exists and is the one that was opened."""
        is_other = _read_small(self.files, self.path / MARKER) != self._marker
        if is_other or self._is_made_again():
            raise FileNotFoundError(f"{self.path} is not the store that was opened")

    def _is_made_again(self) -> bool:
        """Whether another server, which has the same marker, has made the folder again."""
        # A drive that came back may not know the lock any more.
        with contextlib.suppress(OSError):
            is_removed = not os.fstat(self._lock).st_nlink
            return is_removed and bool(self.files.stat(self.path / LOCK).st_nlink)
        return False

    def free_bytes(self) -> int:
        """Return the bytes that may still be written; raises if another server has the folder."""
        if self._is_made_again():
            raise FileNotFoundError(f"{self.path} is another server's")
        return self.files.free_bytes(self.path)

    def check_writable(self) -> None:
        """Raise unless a file can be written, read back and removed; makes missing folders."""
        # Two threads call this.
        with self._probing:
            self._make_folders()
            self.put(_PROBE, self._marker)
            if self.get(_PROBE) != self._marker:
                raise OSError("a probe was not read as it was written")
            self.files.unlink(self.path / _PROBE)

    def restore(self) -> None:
        """Make the folder again if it was removed, but not if its disk is not mounted.

        It raises `StoreInUseError` if another process was faster.
        """
        if _stat_existing(self.files, self.root).st_dev != self._device:
            raise FileNotFoundError(f"the file system of {self.root} is not mounted")
        lock, marker = self._claim(self.key)
        with self._closing:
            # A thread abandoned while the disk did not answer may get here late.
            if self._closed:
                self.files.close(lock)
                raise FileNotFoundError(f"{self.path} was closed")
            self._release()
            self._lock, self._marker = lock, marker
        # A server that had the folder meanwhile may have left it; the next change makes another.
        self.files.unlink(self.path / JOURNAL)
        logger.warning("%s was removed; it begins anew", self.path)

    def close(self) -> None:
        """Release the lock permanently."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._release()

    def _release(self) -> None:
        # Nothing was written through this descriptor.
        with contextlib.suppress(OSError):
            self.files.close(self._lock)

    def _claim(self, key: bytes | None) -> tuple[int, bytes]:
        """Lock the folder and read its marker, which is written if it does not exist.

        `key`: key for a new marker; None for that of the model's other folders.
        """
        self.files.make_directory(self.root, parents=True)
        self.files.make_directory(self.path)
        lock = self.files.open(self.path / LOCK, os.O_CREAT | os.O_RDWR)
        try:
            if not try_lock(lock):
                raise StoreInUseError(f"{self.path} is used by another process")
            if not is_store(self.files, self.path):
                self._mark(key or self._shared_key())
            self._make_folders()
            return lock, _read_small(self.files, self.path / MARKER)
        except BaseException:
            self.files.close(lock)
            raise

    def _make_folders(self) -> None:
        for name in (SEGMENTS, QUARANTINE):
            self.files.make_directory(self.path / name)

    def _shared_key(self) -> bytes:
        """Return the key of the model's other folders; the first folder may make a new one."""
        deadline = time.monotonic() + _KEY_SECONDS
        while True:
            for path in self.siblings():
                return _key_in(_read_small(self.files, path / MARKER))
            if self.path.name == self.identity:
                return secrets.token_bytes(_KEY_BYTES)
            if time.monotonic() > deadline:
                raise ConfigError(f"{self.root / self.identity} has no {MARKER}: remove it")
            time.sleep(_KEY_SECONDS / 1000)

    def _mark(self, key: bytes, *, new: bool = True) -> None:
        if new and set(self.files.list(self.path)) - {LOCK, f"{MARKER}{TEMPORARY_SUFFIX}"}:
            raise ConfigError(
                f"{self.path} has files but no valid {MARKER}, so it is not a store of this "
                "version of impress-sglang; remove it, or choose another --impress-ssd-dir"
            )
        fields = {"kind": _KIND, "key": key.hex(), "format": FORMAT_VERSION}
        self.put(MARKER, json.dumps(fields).encode())


def take_free(files: FileSystem, root: Path, identity: str) -> StoreDirectory:
    """Lock the first folder of a model that no other server has locked; makes it if necessary.

    Raises:
        ConfigError: see `StoreDirectory`.
        StoreInUseError: `MAX_SERVERS` servers have one each.
    """
    for number in range(MAX_SERVERS - 1):
        with contextlib.suppress(StoreInUseError):
            return StoreDirectory(files, root, f"{identity}.{number}" if number else identity)
    return StoreDirectory(files, root, f"{identity}.{MAX_SERVERS - 1}")


def identity_in(name: str) -> str | None:
    """Return the model identity in the name of a folder; None if it is not the name of a store."""
    match = _IDENTITY.fullmatch(name)
    return match and match[1]


def same_model(one: Path, other: Path) -> bool:
    """Whether two folders belong to servers or ranks of one model, which share the quota."""
    return one.name[:MODEL_DIGITS] == other.name[:MODEL_DIGITS]


def is_store(files: FileSystem, path: Path) -> bool:
    """Whether a folder is a store of this package, by its name and its marker."""
    if identity_in(path.name) is None:
        return False
    try:
        is_folder = stat.S_ISDIR(files.stat(path).st_mode)
        return is_folder and bool(_key_in(_read_small(files, path / MARKER)))
    except (FileNotFoundError, NotADirectoryError):
        return False


def format_of(files: FileSystem, store: Path) -> int:
    """Return the format in the marker of a store; 0 for older markers without it."""
    version = json.loads(_read_small(files, store / MARKER)).get("format", 0)
    return version if isinstance(version, int) else 0


def segment_files(files: FileSystem, store: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield the files of a store's segments: id, path, and whether the file is complete.

    Paths are strings, because there are many.
    """
    for folder in files.list(store / SEGMENTS):
        if not _FOLDER.fullmatch(folder):
            continue
        parent = f"{store}/{SEGMENTS}/{folder}"
        for name in files.list(Path(parent)):
            match = _SEGMENT.fullmatch(name)
            if match and name.startswith(folder):
                yield match[1], f"{parent}/{name}", match[2] is None


def quarantined_files(files: FileSystem, store: Path) -> list[Path]:
    """List the damaged segments that a store keeps, in any order."""
    folder = store / QUARANTINE
    return [folder / name for name in files.list(folder) if _SEGMENT.fullmatch(name)]


def other_stores(files: FileSystem, store: Path) -> dict[Path, int]:
    """Return stores of other models, and the bytes of their segments, including quarantine.

    The first to be removed come last: stores of this format come first, the latest before others,
    and then those of older formats.
    """
    others = []
    for name in files.list(store.parent):
        path = store.parent / name
        with contextlib.suppress(OSError):
            if not same_model(path, store) and is_store(files, path):
                current = format_of(files, path) >= FORMAT_VERSION
                others.append((current, files.stat(path).st_mtime_ns, path))
    stores, unusable = dict[Path, int](), []
    for current, _, path in sorted(others, reverse=True):
        stores[path] = 0
        paths = [Path(file) for _, file, _ in segment_files(files, path)]
        for file in paths + quarantined_files(files, path):
            # The server of that model may have just removed it.
            with contextlib.suppress(FileNotFoundError):
                stores[path] += files.stat(file).st_size
        unusable += [] if current else [stores[path]]
    if unusable:
        logger.info(
            "%d stores of older formats (%.1f MB) are removed when room is needed, before others",
            len(unusable),
            sum(unusable) / 1e6,
        )
    return stores


def remove_store(files: FileSystem, path: Path) -> bool:
    """Remove another store, if no process serves it; returns whether it no longer exists.

    Foreign files stay, and the folder with them.
    """
    if not is_store(files, path):
        return path.name not in files.list(path.parent)
    with files.opened(path / LOCK, os.O_CREAT | os.O_RDWR) as lock:
        if not try_lock(lock):
            return False
        logger.info("removing another store to make room: %s", path.name)
        names = [path / name for name in (JOURNAL, PINS, CODING, _PROBE)]
        names += [path.with_name(path.name + TEMPORARY_SUFFIX) for path in names]
        segments = [Path(file) for _, file, _ in segment_files(files, path)]
        for file in (*segments, *quarantined_files(files, path), *names):
            files.unlink(file)
        folders = [name for name in files.list(path / SEGMENTS) if _FOLDER.fullmatch(name)]
        for name in (*(f"{SEGMENTS}/{folder}" for folder in folders), QUARANTINE, SEGMENTS):
            _remove_empty(files, path / name)
        # Marker and lock come last: the rest of a store after a crash can be served or removed.
        if set(files.list(path)) <= {MARKER, LOCK}:
            files.unlink(path / MARKER)
            files.unlink(path / LOCK)
            _remove_empty(files, path)
        return True


def require_writable(root: Path) -> None:
    """Raise a `ConfigError` early unless a directory, made if necessary, is writable."""
    files, probe = installed(), root / f".probe-{os.getpid()}"
    try:
        files.make_directory(root, parents=True)
        files.close(files.open(probe, os.O_CREAT | os.O_RDWR))
        files.unlink(probe)
    except OSError as error:
        raise ConfigError(f"--impress-ssd-dir {root} cannot be written: {error}") from error


def _key_in(marker: bytes) -> bytes:
    """Return the key in a marker; empty if the marker is not ours."""
    try:
        fields = json.loads(marker)
        key = bytes.fromhex(fields["key"]) if fields["kind"] == _KIND else b""
    except (ValueError, TypeError, KeyError, RecursionError):
        return b""
    return key if len(key) == _KEY_BYTES else b""


def _remove_empty(files: FileSystem, path: Path) -> None:
    try:
        files.remove_directory(path)
    except OSError as error:
        logger.warning("%s stays: %s", path, error)


def _stat_existing(files: FileSystem, path: Path) -> os.stat_result:
    """Return the status of a path, or of its nearest existing parent folder."""
    try:
        return files.stat(path)
    except FileNotFoundError:
        return _stat_existing(files, path.parent)


def _read_small(files: FileSystem, path: Path, longest: int = _MAX_MARKER_BYTES) -> bytes:
    content = bytearray(min(files.stat(path).st_size, longest))
    with files.opened(path, os.O_RDONLY) as descriptor:
        try:
            files.read(descriptor, 0, memoryview(content))
        except EOFError as error:
            raise OSError(f"{path} became shorter while it was read") from error
    return bytes(content)


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
