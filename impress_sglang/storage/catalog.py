"""The index of the segment files: SQLite in WAL mode, so that a start reads one file, not all.

The segment files are the truth. A catalog that is missing or damaged is rebuilt from their headers,
a row without its file is dropped, a file without a row is read and added. So a change that the
database does not take now is kept and tried again, and nothing else depends on it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import logging
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from impress_sglang.storage.directory import CATALOG
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import Quality
from impress_sglang.storage.segment import SegmentInfo

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
    file_bytes INTEGER NOT NULL,
    checksum TEXT NOT NULL
) STRICT
"""
# What changes stands apart: else each note of a use would write the tokens again.
_USES = """
CREATE TABLE IF NOT EXISTS uses (
    segment_id TEXT PRIMARY KEY,
    last_access INTEGER NOT NULL,
    hits INTEGER NOT NULL,
    parent TEXT NOT NULL
) STRICT, WITHOUT ROWID
"""

_INSERT = f"INSERT OR REPLACE INTO segments VALUES ({','.join('?' * 13)})"
_INSERT_USE = "INSERT OR REPLACE INTO uses VALUES (?,?,?,?)"
_DELETE = "DELETE FROM segments WHERE segment_id = ?"
_DELETE_USE = "DELETE FROM uses WHERE segment_id = ?"
_USE = "UPDATE uses SET last_access = ?2, hits = ?3, parent = ?4 WHERE segment_id = ?1"
_SUCCEED = "UPDATE uses SET parent = ?2 WHERE parent = ?1"
_CLEARING = (("DELETE FROM segments", ()), ("DELETE FROM uses", ()))
_SELECT = """
SELECT segments.*, ifnull(uses.last_access, 0), ifnull(uses.hits, 0), ifnull(uses.parent, '')
FROM segments LEFT JOIN uses USING (segment_id)
"""
# The first ones never change, and their checksum follows; then what is used.
_FIXED, _COLUMNS = 12, 16
_TOKENS, _INTEGERS = 5, np.dtype("<i4")
# Shapes and qualities that rows have together.
_SHARED = 1024
_Change: TypeAlias = tuple[tuple[str, Sequence[Any]], ...]
"""Statements that are made together, and their values."""

SegmentUse: TypeAlias = tuple[str, int, int, str]
"""Of a segment its name, last access, hits and parent, as in `CatalogEntry`."""

# Changes that wait for the database at most; the next start mends what is forgotten.
_MOST_WAITING = 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A published segment as the catalog knows it.

    `last_access` is a logical time. `parent` names the segment that it builds on: where its place
    is looked for first, and no more than that.
    """

    info: SegmentInfo
    file_bytes: int
    last_access: int = 0
    hits: int = 0
    parent: str = ""

    @property
    def use(self) -> SegmentUse:
        """What of it changes."""
        return self.info.segment_id, self.last_access, self.hits, self.parent


class Catalog:
    """The rows of one store directory; used by one thread at a time."""

    def __init__(self, files: FileSystem, directory: Path) -> None:
        """Connects when it is first used."""
        self._files = files
        self._path = directory / CATALOG
        self._connection: sqlite3.Connection | None = None
        self._waiting: collections.deque[_Change] = collections.deque(maxlen=_MOST_WAITING)

    def add(self, *entries: CatalogEntry) -> None:
        """Record published segments; like each change it waits where it cannot be made now.

        Raises:
            sqlite3.Error: the database refuses.
            OSError: the database cannot be opened.
        """
        self._waiting.extend(map(_insertion, entries))
        self.flush()

    def remove(self, *segment_ids: str) -> None:
        """Forget segments; no error if one is unknown."""
        self._waiting.extend(map(_deletion, segment_ids))
        self.flush()

    def replace(self, segment_id: str, entry: CatalogEntry) -> None:
        """Record a published segment in the place of another."""
        moved = _SUCCEED, (segment_id, entry.info.segment_id)
        self._waiting.append((*_insertion(entry), moved, *_deletion(segment_id)))
        self.flush()

    def begin_with(self, entries: Iterable[CatalogEntry]) -> None:
        """Record these in place of all that there was; until that is done, all is as it was."""
        self._waiting.clear()
        # One change, however many they are.
        insertions = itertools.chain.from_iterable(map(_insertion, entries))
        self._waiting.append((*_CLEARING, *insertions))
        self.flush()

    def record_uses(self, uses: Iterable[SegmentUse]) -> None:
        """Keep how segments were used for the next start; unknown ones are none."""
        self._waiting.extend(((_USE, use),) for use in uses)
        self.flush()

    def flush(self) -> None:
        """Make the changes that wait, all or none.

        Raises:
            sqlite3.Error: the database refuses; it is opened anew next time.
            OSError: it cannot be opened.
        """
        try:
            with self._connected() as connection:
                for statement, values in itertools.chain.from_iterable(self._waiting):
                    connection.execute(statement, values)
        except (sqlite3.Error, OSError):
            self.close()
            raise
        self._waiting.clear()

    def entries(self) -> dict[str, CatalogEntry]:
        """All sound rows by segment; none of a database that is damaged, which is made anew.

        Raises:
            sqlite3.Error: the database cannot be read now.
            OSError: it cannot be opened now.
        """
        try:
            rows = self._connected().execute(_SELECT)
            if len(rows.description) != _COLUMNS:
                raise sqlite3.DatabaseError("it has other columns")
            # Of the others the headers are read.
            return {
                row[0]: _from_row(row) for row in rows if _checksum(row[:_FIXED]) == row[_FIXED]
            }
        except sqlite3.OperationalError:
            self.close()
            raise
        except sqlite3.DatabaseError as error:
            self._begin_anew(error)
            return {}

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
                self._begin_anew(error)
                self._connection = self._open()
        return self._connection

    def _begin_anew(self, error: Exception) -> None:
        logger.warning("%s is damaged (%s); rebuilding it from the segments", self._path, error)
        self.close()
        for suffix in ("", "-wal", "-shm"):
            self._files.unlink(self._path.with_name(self._path.name + suffix))

    def _open(self) -> sqlite3.Connection:
        connection = self._files.database(self._path)
        # What is damaged fails its checksum, not the start.
        connection.text_factory = lambda text: text.decode(errors="replace")
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_SEGMENTS)
            connection.execute(_USES)
            if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check failed")
        except BaseException:
            connection.close()
            raise
        return connection


def _insertion(entry: CatalogEntry) -> _Change:
    return (_INSERT, _to_row(entry)), (_INSERT_USE, entry.use)


def _deletion(segment_id: str) -> _Change:
    return (_DELETE, (segment_id,)), (_DELETE_USE, (segment_id,))


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
        entry.file_bytes,
    )
    return *fixed, _checksum(fixed)


def _checksum(fixed: tuple[Any, ...]) -> str:
    """Of a row: SQLite has none, and what a row says decides which files are kept."""
    state = xxhash.xxh3_64(fixed[_TOKENS])
    state.update(repr(fixed[:_TOKENS] + fixed[_TOKENS + 1 :]).encode())
    return state.hexdigest()


def _from_row(row: tuple[Any, ...]) -> CatalogEntry:
    segment_id, identity, namespace, digest, prefix_len, tokens, *rest = row
    quality, shape, chunk_tokens, generation, expires, file_bytes, _, *use = rest
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
    )
    return CatalogEntry(info, file_bytes, *use)


@functools.lru_cache(_SHARED)
def _shape(text: str) -> KVShape:
    return KVShape.from_fields(json.loads(text))


@functools.lru_cache(_SHARED)
def _quality(text: str) -> Quality:
    return Quality(*json.loads(text))
