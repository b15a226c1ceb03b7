"""The index of the segment files: SQLite in WAL mode, so that a start reads one file, not all.

The segment files are authoritative. An index that is missing or damaged is rebuilt from their
headers, a row without its file is dropped, a file without a row is read and added. So a change that
the database refuses now is kept and tried again, and nothing else depends on it.

A waiting change is little more than a reference to its segment; rows are made when the database
accepts them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from impress_sglang.storage.directory import CATALOG
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Priority, SegmentInfo

logger = logging.getLogger(__name__)

_SEGMENTS = """
CREATE TABLE IF NOT EXISTS segments (
    segment_id TEXT PRIMARY KEY,
    identity TEXT NOT NULL,
    namespace TEXT NOT NULL,
    prefix_digest TEXT NOT NULL,
    prefix_len INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    quality TEXT NOT NULL,
    shape TEXT NOT NULL,
    chunk_tokens INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    file_bytes INTEGER NOT NULL,
    checksum TEXT NOT NULL
) STRICT
"""
# Separate, because uses change: otherwise each record of one would write the tokens again.
_USES = """
CREATE TABLE IF NOT EXISTS uses (
    segment_id TEXT PRIMARY KEY,
    last_access INTEGER NOT NULL,
    hits INTEGER NOT NULL,
    parent TEXT NOT NULL
) STRICT, WITHOUT ROWID
"""

_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_schema"

_INSERT = f"INSERT OR REPLACE INTO segments VALUES ({','.join('?' * 14)})"
_INSERT_USE = "INSERT OR REPLACE INTO uses VALUES (?,?,?,?)"
_DELETE = "DELETE FROM segments WHERE segment_id = ?"
_DELETE_ROW = "DELETE FROM segments WHERE rowid = ?"
_DELETE_USE = "DELETE FROM uses WHERE segment_id = ?"
_USE = "UPDATE uses SET last_access = ?2, hits = ?3, parent = ?4 WHERE segment_id = ?1"
_SUCCEED = "UPDATE uses SET parent = ?2 WHERE parent = ?1"
_SELECT = """
SELECT segments.*, ifnull(uses.last_access, 0), ifnull(uses.hits, 0), ifnull(uses.parent, ''),
    segments.rowid
FROM segments LEFT JOIN uses USING (segment_id)
"""
# The first columns never change, and their checksum follows; then come the use and the rowid.
_FIXED, _ROW = 13, 17
_TOKENS, _INTEGERS = 5, np.dtype("<i4")
# How many different shapes and qualities are cached: rows share them.
_SHARED = 1024
_Statement: TypeAlias = tuple[str, Sequence[Any]]
_Change: TypeAlias = Callable[[], Iterable[_Statement]]
"""Makes statements that belong together, with their values."""

SegmentUse: TypeAlias = tuple[str, int, int, str]
"""Name, last access, hits and parent of a segment, as in `CatalogEntry`."""

# The most changes in one transaction.
_TOGETHER = 1000
# The most changes that wait for a database that refuses them.
_MOST_WAITING = 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A published segment as the catalog knows it.

    `last_access` is a logical time. `parent` names the segment that it builds on; it is only a hint
    where its place is searched first.
    """

    info: SegmentInfo
    file_bytes: int
    last_access: int = 0
    hits: int = 0
    parent: str = ""

    @property
    def use(self) -> SegmentUse:
        """The part of the entry that changes."""
        return self.info.segment_id, self.last_access, self.hits, self.parent


class Catalog:
    """The rows of one store directory; used by one thread at a time."""

    def __init__(self, files: FileSystem, directory: Path, *, read_only: bool = False) -> None:
        """Prepare the database, which is opened at its first use.

        `read_only`: nothing is changed, even if the database is damaged.
        """
        self._files = files
        self._path = directory / CATALOG
        self._read_only = read_only
        self._connection: sqlite3.Connection | None = None
        self._waiting: collections.deque[_Change] = collections.deque()
        # Whether changes were forgotten since the database last accepted all of them.
        self._forgetful = False

    def add(self, *entries: CatalogEntry) -> None:
        """Record published segments; like every change, this waits if it cannot be made now.

        Raises:
            sqlite3.Error: the database refuses.
            OSError: the database cannot be opened.
        """
        self._make(functools.partial(_insertion, own) for own in entries)

    def remove(self, *segment_ids: str) -> None:
        """Forget segments; no error if one is unknown."""
        self._make(functools.partial(_deletion, own) for own in segment_ids)

    def replace(self, segment_id: str, entry: CatalogEntry) -> None:
        """Record a published segment that replaces another one."""
        self._make([functools.partial(_replacement, segment_id, entry)])

    def begin_with(self, entries: Sequence[CatalogEntry]) -> None:
        """Replace all rows by these entries; until that is done, the old rows stay."""
        self._waiting.clear()
        # One change, for any number of entries.
        self._make([functools.partial(_beginning, entries)])

    def record_uses(self, uses: Iterable[SegmentUse]) -> None:
        """Record how segments were used, for the next start; unknown segments are ignored."""
        self._make(functools.partial(_usage, own) for own in uses)

    def flush(self) -> None:
        """Make the waiting changes in order, each of them completely or not at all.

        Raises:
            sqlite3.Error: the database refuses; it is opened anew next time.
            OSError: it cannot be opened.
        """
        self._make(())

    def _make(self, changes: Iterable[_Change]) -> None:
        self._waiting.extend(changes)
        try:
            while self._waiting:
                together = list(itertools.islice(self._waiting, _TOGETHER))
                with self._connected() as connection:
                    for statement, values in itertools.chain.from_iterable(c() for c in together):
                        connection.execute(statement, values)
                for _ in together:
                    self._waiting.popleft()
            self._forgetful = False
        except (sqlite3.Error, OSError) as error:
            self.close()
            self._forget_oldest()
            # Not a subclass, such as that of errors which may pass: the database is damaged.
            if type(error) is sqlite3.DatabaseError:
                self._begin_anew(error)
            raise

    def _forget_oldest(self) -> None:
        """Bound the changes that wait; the next start learns the same from the files."""
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            if not self._forgetful:
                logger.warning(
                    "%s refuses more than %d changes: the next start makes up for the oldest ones, "
                    "from the segments",
                    self._path,
                    _MOST_WAITING,
                )
            self._forgetful = True

    def entries(self) -> dict[str, CatalogEntry]:
        """All sound rows by segment; none if the database is damaged, which is then made anew.

        A catalog that is `read_only` leaves that to others.

        Raises:
            sqlite3.Error: the database cannot be read now.
            OSError: it cannot be opened now.
        """
        if self._read_only and self._path.name not in self._files.list(self._path.parent):
            return {}
        try:
            entries, unsound = dict[str, CatalogEntry](), []
            for row in self._connected().execute(_SELECT):
                if _checksum(row[:_FIXED]) == row[_FIXED]:
                    entries[row[0]] = _from_row(row)
                else:
                    unsound.append(row[_ROW])
        except sqlite3.OperationalError:
            self.close()
            raise
        except sqlite3.DatabaseError as error:
            self._begin_anew(error)
            return {}
        if not self._read_only:
            # By rowid, as their names are unsound, too; headers of files have the same content.
            self._waiting.extend(functools.partial(_row_deletion, own) for own in unsound)
        return entries

    def indexed(self) -> dict[str, int]:
        """Segments of the index and the sizes that their files should have."""
        self.flush()
        return dict(self._connected().execute("SELECT segment_id, file_bytes FROM segments"))

    def close(self) -> None:
        """Close the database; the next use opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            try:
                self._connection = self._open()
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                if self._read_only:
                    raise
                self._begin_anew(error)
                self._connection = self._open()
        return self._connection

    def _begin_anew(self, error: Exception) -> None:
        self.close()
        if self._read_only:
            return
        logger.warning("%s is damaged (%s); rebuilding it from the segments", self._path, error)
        for suffix in ("", "-wal", "-shm"):
            self._files.unlink(self._path.with_name(self._path.name + suffix))

    def _open(self) -> sqlite3.Connection:
        connection = self._files.database(self._path, read_only=self._read_only)
        # Damaged text must fail its checksum, not the start.
        connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
        try:
            if not self._read_only:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                _make_tables(connection)
            # A database with other tables is of another version, or damaged.
            if set(connection.execute(_SCHEMA)) != _right_schema():
                raise sqlite3.DatabaseError("it has other tables")
            if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check failed")
        except UnicodeDecodeError as error:
            # SQLite's message quotes what it cannot read.
            connection.close()
            raise sqlite3.DatabaseError("its tables have no names") from error
        except BaseException:
            connection.close()
            raise
        return connection


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.execute(_SEGMENTS)
    connection.execute(_USES)


@functools.cache
def _right_schema() -> set[tuple[str | None, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        _make_tables(connection)
        return set(connection.execute(_SCHEMA))


def _insertion(entry: CatalogEntry) -> Iterator[_Statement]:
    yield _INSERT, _to_row(entry)
    yield _INSERT_USE, entry.use


def _deletion(segment_id: str) -> Iterator[_Statement]:
    yield _DELETE, (segment_id,)
    yield _DELETE_USE, (segment_id,)


def _row_deletion(row: int) -> Iterator[_Statement]:
    yield _DELETE_ROW, (row,)


def _replacement(segment_id: str, entry: CatalogEntry) -> Iterator[_Statement]:
    yield from _insertion(entry)
    yield _SUCCEED, (segment_id, entry.info.segment_id)
    yield from _deletion(segment_id)


def _beginning(entries: Iterable[CatalogEntry]) -> Iterator[_Statement]:
    yield "DELETE FROM segments", ()
    yield "DELETE FROM uses", ()
    for entry in entries:
        yield from _insertion(entry)


def _usage(use: SegmentUse) -> Iterator[_Statement]:
    yield _USE, use


def _to_row(entry: CatalogEntry) -> tuple[object, ...]:
    info = entry.info
    fixed = (
        info.segment_id,
        info.identity,
        info.namespace,
        info.prefix_digest,
        info.prefix_len,
        info.tokens.astype(_INTEGERS, copy=False).tobytes(),
        json.dumps(dataclasses.astuple(info.quality)),
        json.dumps(info.shape.to_fields()),
        info.chunk_tokens,
        info.generation,
        info.expires,
        int(info.priority),
        entry.file_bytes,
    )
    return *fixed, _checksum(fixed)


def _checksum(fixed: tuple[Any, ...]) -> str:
    """The checksum of a row: SQLite has none, and rows decide which files are kept."""
    others = repr(fixed[:_TOKENS] + fixed[_TOKENS + 1 :]).encode()
    return xxhash.xxh3_64_hexdigest(fixed[_TOKENS] + others)


def _from_row(row: tuple[Any, ...]) -> CatalogEntry:
    segment_id, identity, namespace, digest, prefix_len, tokens, *rest = row
    quality, shape, chunk_tokens, generation, expires, priority, file_bytes, _, *use, _ = rest
    info = SegmentInfo(
        segment_id=segment_id,
        identity=identity,
        namespace=namespace,
        prefix_digest=digest,
        prefix_len=prefix_len,
        tokens=np.frombuffer(tokens, _INTEGERS).astype(np.int32),
        shape=_shape(shape),
        chunk_tokens=chunk_tokens,
        quality=_quality(quality),
        generation=generation,
        expires=expires,
        priority=Priority(priority),
    )
    return CatalogEntry(info, file_bytes, *use)


@functools.lru_cache(_SHARED)
def _shape(text: str) -> KVShape:
    return KVShape.from_fields(json.loads(text))


@functools.lru_cache(_SHARED)
def _quality(text: str) -> Quality:
    quality = Quality(*json.loads(text))
    # Most are exact: with one object for all of them, comparisons are fast.
    return EXACT if quality == EXACT else quality
