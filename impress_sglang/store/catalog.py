"""The index of the segment files: SQLite in WAL mode, so that a start reads one file, not all.

The segment files are authoritative. An index that is missing or damaged is rebuilt from their
headers, a row without its file is dropped, a file without a row is read and added. So what the
database refuses now waits, and nothing else depends on it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from impress_sglang.storage.directory import CATALOG
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import SegmentInfo, info_from
from impress_sglang.store.stored import SegmentUse, StoredSegment

logger = logging.getLogger(__name__)

# Uses are separate, because they change: otherwise each record of one would write the tokens again.
_TABLES = (
    """CREATE TABLE IF NOT EXISTS segments (
    segment_id TEXT PRIMARY KEY,
    description BLOB NOT NULL,
    tokens BLOB NOT NULL,
    file_bytes INTEGER NOT NULL,
    checksum TEXT NOT NULL
) STRICT""",
    """CREATE TABLE IF NOT EXISTS uses (
    segment_id TEXT PRIMARY KEY,
    last_access INTEGER NOT NULL,
    hits INTEGER NOT NULL,
    parent TEXT NOT NULL
) STRICT, WITHOUT ROWID""",
)
_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_schema"
_INSERT = "INSERT OR REPLACE INTO segments VALUES (?,?,?,?,?)"
_INSERT_USE = "INSERT OR REPLACE INTO uses VALUES (?,?,?,?)"
_USE = "UPDATE uses SET last_access = ?2, hits = ?3, parent = ?4 WHERE segment_id = ?1"
_SELECT = """
SELECT segments.*, ifnull(uses.last_access, 0), ifnull(uses.hits, 0), ifnull(uses.parent, ''),
    segments.rowid
FROM segments LEFT JOIN uses USING (segment_id)
"""
_INTEGERS = np.dtype("<i4")
# The most segments whose changes wait for a database that refuses them.
_MOST_WAITING = 100_000

Row: TypeAlias = tuple[SegmentInfo, int, SegmentUse]
"""What the index has of a segment: its description, the bytes of its file, and its use."""


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
        # What is still to be recorded of segments: a row, only its use, or that they are gone.
        self._waiting: dict[str, Row | SegmentUse | None] = {}
        # The numbers of unsound rows, whose names are unsound.
        self._unsound: list[int] = []
        # Whether changes were forgotten since the database last accepted all of them.
        self._forgetful = False

    def change(self, added: Iterable[Row] = (), removed: Iterable[str] = ()) -> None:
        """Forget segments, of which some may be unknown, and record published ones.

        Like every change, this waits if it cannot be made now.

        Raises:
            sqlite3.Error: the database refuses; it is opened anew next time.
            OSError: the database cannot be opened.
        """
        self._wait_for(dict.fromkeys(removed))
        self._wait_for({row[0].segment_id: row for row in added})
        self.flush()

    def record_uses(self, uses: Iterable[SegmentUse]) -> None:
        """Record how segments were used, for the next start; unknown segments are ignored."""
        for use in uses:
            row = self._waiting.get(use[0], use)
            if row is not None:
                self._wait_for({use[0]: (row[0], row[1], use) if len(row) == 3 else use})
        self.flush()

    def _wait_for(self, changes: dict[str, Row | SegmentUse | None]) -> None:
        for segment_id, change in changes.items():
            # Behind what waits already, so that the oldest changes come first.
            self._waiting.pop(segment_id, None)
            self._waiting[segment_id] = change

    def flush(self) -> None:
        """Make the waiting changes, all or none; raises like `change`."""
        if not (self._waiting or self._unsound):
            return
        try:
            with self._connected() as connection:
                self._write(connection)
        except (sqlite3.Error, OSError) as error:
            self.close()
            self._forget_oldest()
            # Not a subclass, such as that of errors which may pass: the database is damaged.
            if type(error) is sqlite3.DatabaseError:
                self._delete(error)
            raise
        self._waiting.clear()
        self._unsound.clear()
        self._forgetful = False

    def _write(self, connection: sqlite3.Connection) -> None:
        rows, uses, gone = list[Row](), list[SegmentUse](), list[tuple[str]]()
        for segment_id, change in self._waiting.items():
            if change is None:
                gone.append((segment_id,))
            elif len(change) == 3:
                rows.append(change)
            else:
                uses.append(change)
        unsound = ((row,) for row in self._unsound)
        connection.executemany("DELETE FROM segments WHERE rowid = ?", unsound)
        for table in ("segments", "uses"):
            connection.executemany(f"DELETE FROM {table} WHERE segment_id = ?", gone)
        connection.executemany(_INSERT, map(_fixed, rows))
        connection.executemany(_INSERT_USE, (row[2] for row in rows))
        connection.executemany(_USE, uses)

    def _forget_oldest(self) -> None:
        """Bound the changes that wait; the next start learns the same from the files."""
        more = len(self._waiting) - _MOST_WAITING
        for segment_id in list(itertools.islice(self._waiting, max(more, 0))):
            del self._waiting[segment_id]
        if more > 0 and not self._forgetful:
            self._forgetful = True
            logger.warning(
                "%s refuses more than %d changes: the next start makes up for the oldest ones, "
                "from the segments",
                self._path,
                _MOST_WAITING,
            )

    def segments(self) -> dict[str, StoredSegment]:
        """All sound rows by name; none if the database is damaged, which is then made anew.

        A catalog that is `read_only` leaves that to others.

        Raises:
            sqlite3.Error: the database cannot be read now.
            OSError: it cannot be opened now.
        """
        if self._read_only and self._path.name not in self._files.list(self._path.parent):
            return {}
        found, unsound = dict[str, StoredSegment](), []
        try:
            for *fixed, checksum, last_access, hits, above, number in self._connected().execute(
                _SELECT
            ):
                segment_id, description, tokens, file_bytes = fixed
                if _checksum(*fixed) != checksum:
                    unsound.append(number)
                    continue
                integers = np.frombuffer(tokens, _INTEGERS).astype(np.int32)
                info = info_from(json.loads(description), integers)
                found[segment_id] = StoredSegment(
                    info, file_bytes, last_access=last_access, hits=hits, above=above
                )
        except sqlite3.OperationalError:
            self.close()
            raise
        except sqlite3.DatabaseError as error:
            self._delete(error)
            return {}
        if not self._read_only:
            self._unsound = unsound
        return found

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
                self._delete(error)
                self._connection = self._open()
        return self._connection

    def _delete(self, error: Exception) -> None:
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
    for table in _TABLES:
        connection.execute(table)


@functools.cache
def _right_schema() -> set[tuple[str | None, ...]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        _make_tables(connection)
        return set(connection.execute(_SCHEMA))


def _fixed(row: Row) -> tuple[Any, ...]:
    info, file_bytes, _ = row
    tokens = info.tokens.astype(_INTEGERS, copy=False).tobytes()
    fixed = info.segment_id, info.description(), tokens, file_bytes
    return *fixed, _checksum(*fixed)


def _checksum(segment_id: str, description: bytes, tokens: bytes, file_bytes: int) -> str:
    """The checksum of a row: SQLite has none, and rows decide which files are kept."""
    return xxhash.xxh3_64_hexdigest(tokens + description + repr((segment_id, file_bytes)).encode())
