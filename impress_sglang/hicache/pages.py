"""The pages of one namespace: found in memory, read and written in packs, evicted by last use.

    <ssd dir>/hicache/<identity>/<pack>.pages

    magic, pages (u64), xxh3-64 of the two and all that follows, identity (16 bytes)
    of each page: key (16 bytes), offset (u64), bytes (u64), xxh3-64 of its bytes
    the pages, each from a block of 4 KiB on

A page is read whole or not at all, so it has one checksum. A pack has the pages that were written
together; it is renamed to its final name once all of it is on the drive.

Any number of processes may share a directory: packs never change and have unique names, and a
process looks for packs of others when it misses a page. The time of a file is that of its last use;
the least recently used files of all namespaces are evicted first, including unfinished ones.

Nothing here raises on disk errors: an unreadable page is a miss, an unwritable one is not stored.
Reads and writes have a thread each; their work is awaited for a limited time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import xxhash

from impress_sglang.errors import ConfigError
from impress_sglang.storage.files import AlignedBuffer, FileSystem, installed
from impress_sglang.storage.layout import BLOCK_BYTES, round_up
from impress_sglang.storage.writer import TEMPORARY_SUFFIX, publishing
from impress_sglang.store.health import DiskTask, Health
from impress_sglang.threads import BackgroundThread

logger = logging.getLogger(__name__)

FOLDER = "hicache"
SUFFIX = ".pages"
KEY_BYTES = 16
_MAGIC = b"IMPRPAG\x01"
_PREAMBLE = struct.Struct("<8sQQ16s")
_ENTRY = struct.Struct(f"<{KEY_BYTES}sQQQ")
# Bound on the page count in a header that is not verified yet.
_MAX_PAGES = 1 << 20
# A pack is written and evicted as a whole; a read covers neighbouring pages of it.
PACK_BYTES, RUN_BYTES = 64 << 20, 32 << 20
# Seconds between scans for packs of other processes.
SCAN_SECONDS = 1.0
# A pack is dated at most once in so many seconds.
MTIME_SECONDS = 60.0
# Seconds between counts of other processes' bytes; and the share of the quota that one eviction
# frees, since it lists all files.
COUNT_SECONDS, SLACK = 10.0, 0.02
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Location of a page: its file, offset and size, and its checksum."""

    pack: str
    offset: int
    size: int
    checksum: int

    @property
    def stop(self) -> int:
        return self.offset + round_up(self.size, BLOCK_BYTES)


def pack_bytes(sizes: Sequence[int]) -> int:
    """Return the size of a file with pages of these sizes."""
    return _header_bytes(len(sizes)) + sum(round_up(size, BLOCK_BYTES) for size in sizes)


def _fill_pack(
    view: memoryview, pack: str, identity: bytes, pages: Mapping[bytes, memoryview]
) -> dict[bytes, Page]:
    """Fill memory of `pack_bytes` with a pack; returns its pages."""
    at, packed = _header_bytes(len(pages)), dict[bytes, Page]()
    for key, content in pages.items():
        page = Page(pack, at, len(content), xxhash.xxh3_64_intdigest(content))
        view[at : at + page.size] = content
        view[at + page.size : page.stop] = bytes(page.stop - at - page.size)
        at, packed[key] = page.stop, page
    entries = b"".join(
        _ENTRY.pack(key, page.offset, page.size, page.checksum) for key, page in packed.items()
    )
    body = identity + entries
    header = _PREAMBLE.pack(_MAGIC, len(packed), _digest(len(packed), body), identity) + entries
    view[: len(header)] = header
    view[len(header) : _header_bytes(len(packed))] = bytes(_header_bytes(len(packed)) - len(header))
    return packed


def _read_pack(files: FileSystem, path: Path, identity: bytes) -> dict[bytes, Page]:
    """Read the pages of a pack; `ValueError` if it is damaged, or of other weights."""
    preamble = bytearray(_PREAMBLE.size)
    try:
        with files.opened(path, os.O_RDONLY) as descriptor:
            files.read(descriptor, 0, memoryview(preamble))
            magic, count, digest, owner = _PREAMBLE.unpack(preamble)
            if magic != _MAGIC or count > _MAX_PAGES:
                raise ValueError("it is no pack of pages")
            entries = bytearray(count * _ENTRY.size)
            files.read(descriptor, _PREAMBLE.size, memoryview(entries))
    except EOFError as error:
        raise ValueError("it ends within its header") from error
    if _digest(count, owner + entries) != digest:
        raise ValueError("its header fails its checksum")
    if owner != identity:
        raise ValueError("it is of other weights")
    return {key: Page(path.name, *where) for key, *where in _ENTRY.iter_unpack(entries)}


def _header_bytes(pages: int) -> int:
    return round_up(_PREAMBLE.size + pages * _ENTRY.size, BLOCK_BYTES)


def _digest(count: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_MAGIC + struct.pack("<Q", count) + body)


_Run = list[tuple[int, Page]]
"""Neighbouring pages of a pack, each with its index among the requested ones."""


class PageStore:
    """Pages by keys of 16 bytes; thread-safe."""

    def __init__(
        self,
        ssd_dir: Path,
        identity: str,
        *,
        ssd_bytes: int,
        min_free_bytes: int = 0,
        patience: float = 30.0,
        files: FileSystem | None = None,
    ) -> None:
        """Find the pages of an `identity`, 32 hex digits for everything that pages depend on.

        Bytes above `ssd_bytes`, over all namespaces in `ssd_dir`, are evicted, and `min_free_bytes`
        of the file system stay free. After `patience` seconds a disk counts as stopped. Raises
        `ConfigError` if the directory cannot be used.
        """
        self._files = files or installed()
        self._root, self._folder = ssd_dir / FOLDER, ssd_dir / FOLDER / identity
        self._identity = bytes.fromhex(identity)
        self._quota, self._min_free, self._patience = ssd_bytes, min_free_bytes, patience
        self.health = Health()
        self._lock, self._reading, self._writing = (threading.RLock() for _ in range(3))
        self._index: dict[bytes, Page] = {}
        self._packs: dict[str, Sequence[bytes]] = {}
        self._probes: list[Future[None]] = []
        self._mtimes_set: dict[str, float] = {}
        self._used_bytes, self._counted_at, self._scanned_at = 0, -COUNT_SECONDS, -SCAN_SECONDS
        self._in, self._out = (AlignedBuffer(), AlignedBuffer()), AlignedBuffer()
        try:
            self._files.make_directory(self._folder, parents=True)
            self._direct = self._files.supports_direct_io(self._folder)
            self._scan()
        except OSError as error:
            raise ConfigError(f"{self._folder} cannot be used: {error}") from error
        self._reader, self._writer = BackgroundThread("pages-read"), BackgroundThread("pages-write")
        logger.info("pages of HiCache in %s: %d", self._folder, len(self._index))

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether pages are stored, as far as this process knows."""
        with self._lock:
            return [key in self._index for key in keys]

    def leading(self, keys: Sequence[bytes]) -> int:
        """Count the leading pages that are stored and can be read."""
        if not self._usable(reading=True):
            return 0
        has = self.has(keys)
        if not all(has) and time.monotonic() - self._scanned_at > SCAN_SECONDS:
            self._await(self._reader.submit(self._scan), "packs cannot be listed", reading=True)
            has = self.has(keys)
        return [*has, False].index(False)

    def get(self, keys: Sequence[bytes], put: Callable[[int, memoryview], None]) -> list[bool]:
        """Read pages; `put` gets the indices of the intact ones, and their bytes.

        Returns for each page whether it was read.
        """
        done = [False] * len(keys)
        with self._reading:
            begun: tuple[_Run, Future[dict[int, memoryview] | None]] | None = None
            # Each run is read while the previous one is put.
            for number, run in enumerate([*self._runs(keys), None]):
                earlier, begun = begun, None
                if run is not None and self._usable(reading=True):
                    begun = run, self._reader.submit(self._read, run, self._in[number % 2])
                contents = {} if earlier is None else self._read_run(*earlier)
                for place, content in contents.items():
                    put(place, content)
                    done[place] = True
        return done

    def set(self, keys: Sequence[bytes], content: Callable[[int], memoryview | None]) -> list[bool]:
        """Store pages that are not stored; `content` of an index is requested only then.

        It may be None: that page is not stored. Returns for each page whether it is stored now.
        """
        with self._writing:
            contents: dict[bytes, memoryview] = {}
            for place, has in enumerate(self.has(keys)):
                page = content(place) if not has and self._usable(reading=False) else None
                if page is not None:
                    contents[keys[place]] = page
                if contents and sum(map(len, contents.values())) >= PACK_BYTES:
                    self._store(contents)
                    contents = {}
            if contents:
                self._store(contents)
        return self.has(keys)

    def clear(self) -> None:
        def clear() -> None:
            for name in self._files.list(self._folder):
                self._remove(self._folder / name)

        self._await(self._writer.submit(clear), "packs cannot be removed", reading=False)

    def close(self) -> None:
        """End the threads; work that does not end in time is abandoned."""
        for thread in (self._reader, self._writer):
            thread.close(self._patience)

    def _runs(self, keys: Sequence[bytes]) -> list[_Run]:
        runs: list[_Run] = []
        with self._lock:
            pages = [(place, self._index.get(key)) for place, key in enumerate(keys)]
        for place, page in pages:
            if page is None:
                continue
            if runs:
                first, last = runs[-1][0][1], runs[-1][-1][1]
                follows = (last.pack, last.stop) == (page.pack, page.offset)
                if follows and page.stop - first.offset <= RUN_BYTES:
                    runs[-1].append((place, page))
                    continue
            runs.append([(place, page)])
        return runs

    def _read_run(
        self, run: _Run, read: Future[dict[int, memoryview] | None]
    ) -> dict[int, memoryview]:
        """Return the intact pages of a run that is being read; unless all are, drop its pack."""
        pack = run[0][1].pack
        whole = self._await(read, f"pack {pack} cannot be read", reading=True)
        if whole is not None and len(whole) == len(run):
            return whole
        self._give_up(pack)
        if whole is None:
            # The thread may still write to them.
            self._in = AlignedBuffer(), AlignedBuffer()
            return {}
        logger.warning("pack %s fails a checksum and is removed; its pages are computed", pack)
        self._writer.submit(self._remove, self._folder / pack)
        return whole

    def _store(self, contents: Mapping[bytes, memoryview]) -> None:
        name = f"{secrets.token_hex(16)}{SUFFIX}"
        view = self._out.view(pack_bytes([len(page) for page in contents.values()]))
        packed = _fill_pack(view, name, self._identity, contents)
        writing = self._writer.submit(self._write, name, view)
        stored = self._await(writing, "pages cannot be written", reading=False)
        if stored is None:
            # The thread may still read it.
            self._out = AlignedBuffer()
        elif stored:
            self._add(name, packed)

    def _usable(self, *, reading: bool) -> bool:
        """Whether the disk can be read, or written; begins and ends probes of a failed disk."""
        with self._lock:
            if self._probes and all(probe.done() for probe in self._probes):
                errors = [probe.exception() for probe in self._probes]
                self._probes = []
                self.health.on_probed(errors[0] or errors[1], readable=errors[0] is None)
            if DiskTask.PROBE in self.health.due():
                self._probes = [
                    self._reader.submit(self._try_read),
                    self._writer.submit(self._try_write),
                ]
            return self.health.readable if reading else self.health.writable

    def _await(self, future: Future[_T], what: str, *, reading: bool) -> _T | None:
        try:
            return future.result(self._patience)
        except Exception as error:
            # Whatever the error, answers are right without these pages.
            self.health.report_failure(what, error, reading=reading)
            return None

    def _add(self, pack: str, pages: Mapping[bytes, Page]) -> None:
        with self._lock:
            self._packs[pack] = list(pages)
            self._index.update(pages)

    def _give_up(self, pack: str) -> None:
        """Stop serving the pages of a pack, although its file may exist."""
        self._forget(pack)
        self._add(pack, {})

    def _forget(self, pack: str) -> None:
        with self._lock:
            for key in self._packs.pop(pack, ()):
                # Otherwise, another pack had the key as well.
                if (page := self._index.get(key)) is not None and page.pack == pack:
                    del self._index[key]

    # On the reader and writer threads.

    def _scan(self) -> None:
        """Add packs of other processes, and forget packs that were removed."""
        self._scanned_at = time.monotonic()
        with self._lock:
            indexed = set(self._packs)
        names = {name for name in self._files.list(self._folder) if name.endswith(SUFFIX)}
        for pack in indexed - names:
            self._forget(pack)
        for pack in sorted(names - indexed):
            try:
                self._add(pack, _read_pack(self._files, self._folder / pack, self._identity))
            except FileNotFoundError:
                continue
            except (ValueError, OSError) as error:
                logger.warning("pack %s is not used: %s", pack, error)
                self._give_up(pack)

    def _read(self, run: _Run, buffer: AlignedBuffer) -> dict[int, memoryview] | None:
        """Return the intact pages of a run, by index; None if another process has evicted it."""
        first, last = run[0][1], run[-1][1]
        view, whole = buffer.view(last.stop - first.offset), dict[int, memoryview]()
        flags = os.O_RDONLY | (os.O_DIRECT if self._direct else 0)
        # A wrong read may be right on the disk.
        for _ in range(2):
            try:
                with self._files.opened(self._folder / first.pack, flags) as descriptor:
                    self._files.read(descriptor, first.offset, view)
                    self._date(first.pack, descriptor)
            except FileNotFoundError:
                return None
            except EOFError:
                continue
            parts = (view[page.offset - first.offset :][: page.size] for _, page in run)
            whole = {
                place: part
                for (place, page), part in zip(run, parts, strict=True)
                if xxhash.xxh3_64_intdigest(part) == page.checksum
            }
            if len(whole) == len(run):
                break
        return whole

    def _date(self, pack: str, descriptor: int) -> None:
        """Date a pack that is used, of which the oldest go first."""
        now = time.monotonic()
        if now - self._mtimes_set.get(pack, -math.inf) >= MTIME_SECONDS:
            self._mtimes_set[pack] = now
            with contextlib.suppress(OSError):
                self._files.set_mtime(descriptor, time.time_ns())

    def _write(self, name: str, content: memoryview) -> bool:
        if not self._make_room(len(content)):
            return False
        path = self._folder / name
        with publishing(self._files, path, direct=self._direct) as descriptor:
            self._files.write(descriptor, 0, content)
        self._used_bytes += len(content)
        return True

    def _make_room(self, needed: int) -> bool:
        """Evict files of any namespace until `needed` bytes fit; False if they cannot."""
        free = self._files.free_bytes(self._folder) - self._min_free
        fresh = time.monotonic() - self._counted_at < COUNT_SECONDS
        if fresh and self._used_bytes + needed <= self._quota and needed <= free:
            return True
        held = list[tuple[int, int, Path]]()
        for folder in self._files.list(self._root):
            for name in self._files.list(self._root / folder):
                with contextlib.suppress(FileNotFoundError):
                    if name.endswith((SUFFIX, TEMPORARY_SUFFIX)):
                        path = self._root / folder / name
                        stat = self._files.stat(path)
                        held.append((stat.st_mtime_ns, stat.st_size, path))
        self._used_bytes, self._counted_at = sum(size for _, size, _ in held), time.monotonic()
        if needed > min(self._quota, free + self._used_bytes):
            return False
        limit: float = self._quota
        if self._used_bytes + needed > limit:
            limit *= 1 - SLACK
        for _, size, path in sorted(held):
            if self._used_bytes + needed <= limit and needed <= free:
                break
            self._remove(path)
            self._used_bytes, free = self._used_bytes - size, free + size
        return True

    def _remove(self, path: Path) -> None:
        self._files.unlink(path)
        if path.parent == self._folder:
            self._forget(path.name)

    def _try_read(self) -> None:
        self._files.make_directory(self._folder, parents=True)
        self._files.list(self._folder)

    def _try_write(self) -> None:
        path = self._folder / f"probe{SUFFIX}"
        with publishing(self._files, path, direct=self._direct) as descriptor:
            self._files.write(descriptor, 0, AlignedBuffer().view(BLOCK_BYTES))
        self._files.unlink(path)
