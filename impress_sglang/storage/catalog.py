"""The index of the segment files: SQLite in WAL mode, so that a start reads one file, not all.

The segment files are the truth. A catalog that is missing or damaged is rebuilt from their headers,
a row without its file is dropped, a file without a row is read and added. So a change that the
database does not take now is kept and tried again, and nothing else depends on it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import logging
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from impress_sglang.storage.directory import CATALOG
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import Quality
from impress_sglang.storage.segment import SegmentInfo

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS segments (
    segment_id TEXT PRIMARY KEY,
    identity TEXT NOT NULL,
    namespace TEXT NOT NULL,
    prefix_digest TEXT NOT NULL,
    prefix_len INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    depth INTEGER NOT NULL,
    retention REAL NOT NULL,
    bits REAL NOT NULL,
    shape TEXT NOT NULL,
    chunk_tokens INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    file_bytes INTEGER NOT NULL,
    checksum TEXT NOT NULL,
    last_access INTEGER NOT NULL DEFAULT 0,
    hits INTEGER NOT NULL DEFAULT 0
) STRICT
"""

_INSERT = "INSERT OR REPLACE INTO segments VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
_DELETE = "DELETE FROM segments WHERE segment_id = ?"
_ACCESS = "UPDATE segments SET last_access = ?2, hits = ?3 WHERE segment_id = ?1"
# The first ones never change; their checksum follows.
_COLUMNS, _FIXED = 16, 13
# Changes that wait for the database at most; the next start mends what is forgotten.
_MOST_WAITING = 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A published segment as the catalog knows it; `last_access` is a logical time."""

    info: SegmentInfo
    file_bytes: int
    last_access: int = 0
    hits: int = 0


class Catalog:
    """The rows of one store directory; used by one thread at a time."""

    def __init__(self, files: FileSystem, directory: Path) -> None:
        """Connects when it is first used."""
        self._files = files
        self._path = directory / CATALOG
        self._connection: sqlite3.Connection | None = None
        self._waiting: collections.deque[tuple[str, Sequence[Any]]] = collections.deque(
            maxlen=_MOST_WAITING
        )

    def add(self, entry: CatalogEntry) -> None:
        """Record a published segment; like each change it waits where it cannot be made now.

        Raises:
            sqlite3.Error: the database refuses.
            OSError: the database cannot be opened.
        """
        self._waiting.append((_INSERT, _to_row(entry)))
        self.flush()

    def remove(self, segment_id: str) -> None:
        """Forget a segment; no error if it is unknown."""
        self._waiting.append((_DELETE, (segment_id,)))
        self.flush()

    def replace(self, segment_id: str, entry: CatalogEntry) -> None:
        """Record a published segment in the place of another."""
        self._waiting.append((_INSERT, _to_row(entry)))
        self.remove(segment_id)

    def record_accesses(self, accesses: Iterable[tuple[str, int, int]]) -> None:
        """Keep (segment_id, last_access, hits) for the next start."""
        self._waiting.extend((_ACCESS, access) for access in accesses)
        self.flush()

    def flush(self) -> None:
        """Make the changes that wait, all or none.

        Raises:
            sqlite3.Error: the database refuses; it is opened anew next time.
            OSError: it cannot be opened.
        """
        try:
            with self._connected() as connection:
                for statement, values in self._waiting:
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
            found = self._connected().execute("SELECT * FROM segments")
            if len(found.description) != _COLUMNS:
                raise sqlite3.DatabaseError("another table of that name")
            rows = found.fetchall()
            # Of the others the headers are read.
            entries = [_from_row(row) for row in rows if _checksum(row[:_FIXED]) == row[_FIXED]]
        except sqlite3.OperationalError:
            self.close()
            raise
        except sqlite3.DatabaseError as error:
            self._begin_anew(error)
            return {}
        return {entry.info.segment_id: entry for entry in entries}

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
        connection.text_factory = functools.partial(str, encoding="utf-8", errors="replace")
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_SCHEMA)
            if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("quick_check failed")
        except BaseException:
            connection.close()
            raise
        return connection


def _to_row(entry: CatalogEntry) -> tuple[object, ...]:
    info = entry.info
    fixed = (
        info.segment_id,
        info.identity,
        info.namespace,
        info.prefix_digest,
        info.prefix_len,
        info.tokens.astype("<i4", copy=False).tobytes(),
        info.quality.depth,
        info.quality.retention,
        info.quality.bits,
        json.dumps(info.shape.to_fields()),
        info.chunk_tokens,
        info.generation,
        entry.file_bytes,
    )
    return *fixed, _checksum(fixed), entry.last_access, entry.hits


def _checksum(fixed: tuple[object, ...]) -> str:
    """Of a row: SQLite has none, and what a row says decides which files are kept."""
    return xxhash.xxh3_64_hexdigest(repr(fixed).encode())


def _from_row(row: tuple[object, ...]) -> CatalogEntry:
    (
        segment_id,
        identity,
        namespace,
        digest,
        prefix_len,
        tokens,
        depth,
        retention,
        bits,
        shape_json,
        chunk_tokens,
        generation,
        file_bytes,
        _,
        last_access,
        hits,
    ) = row
    assert isinstance(tokens, bytes)
    info = SegmentInfo(
        segment_id=str(segment_id),
        identity=str(identity),
        namespace=str(namespace),
        prefix_digest=str(digest),
        prefix_len=int(str(prefix_len)),
        tokens=np.frombuffer(tokens, "<i4").astype(np.int32),
        shape=KVShape.from_fields(json.loads(str(shape_json))),
        chunk_tokens=int(str(chunk_tokens)),
        quality=Quality(int(str(depth)), float(str(retention)), float(str(bits))),
        generation=int(str(generation)),
    )
    return CatalogEntry(info, int(str(file_bytes)), int(str(last_access)), int(str(hits)))
