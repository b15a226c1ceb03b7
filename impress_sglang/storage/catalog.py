"""The index of the segment files: SQLite in WAL mode, so that a start reads one file, not all.

The segment files are the truth. A catalog that is missing or damaged is rebuilt from their headers,
a row without its file is dropped, a file without a row is read and added.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from impress_sglang.errors import ChunkUnreadable
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import SEGMENT_SUFFIX, SegmentInfo, read_header
from impress_sglang.storage.writer import TEMPORARY_SUFFIX

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS segments (
    segment_id TEXT PRIMARY KEY,
    identity TEXT NOT NULL,
    namespace TEXT NOT NULL,
    prefix_digest TEXT NOT NULL,
    prefix_len INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    approximate INTEGER NOT NULL,
    shape TEXT NOT NULL,
    chunk_tokens INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    file_bytes INTEGER NOT NULL,
    last_access INTEGER NOT NULL DEFAULT 0,
    hits INTEGER NOT NULL DEFAULT 0
) STRICT
"""

_INSERT = "INSERT OR REPLACE INTO segments VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"


@dataclasses.dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A published segment as the catalog knows it; `last_access` is a logical time."""

    info: SegmentInfo
    file_bytes: int
    last_access: int = 0
    hits: int = 0


def segment_path(directory: Path, segment_id: str) -> Path:
    """Where a segment stands; 256 folders keep each one short."""
    return directory / "segments" / segment_id[:2] / f"{segment_id}{SEGMENT_SUFFIX}"


class Catalog:
    """The rows of one store directory; used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "catalog.sqlite"
        self._connection = self._connect()

    def add(self, entry: CatalogEntry) -> None:
        """Record a published segment."""
        with self._connection as connection:
            connection.execute(_INSERT, _to_row(entry))

    def remove(self, segment_id: str) -> None:
        """Forget a segment; no error if it is unknown."""
        with self._connection as connection:
            connection.execute("DELETE FROM segments WHERE segment_id = ?", (segment_id,))

    def replace(self, segment_id: str, entry: CatalogEntry) -> None:
        """Record a published segment in the place of another."""
        with self._connection as connection:
            connection.execute(_INSERT, _to_row(entry))
            connection.execute("DELETE FROM segments WHERE segment_id = ?", (segment_id,))

    def record_accesses(self, accesses: Iterable[tuple[str, int, int]]) -> None:
        """Keep (segment_id, last_access, hits) for the next start."""
        with self._connection as connection:
            connection.executemany(
                "UPDATE segments SET last_access = ?2, hits = ?3 WHERE segment_id = ?1", accesses
            )

    def recover(self, identity: str) -> list[CatalogEntry]:
        """All published segments of this identity, after comparing the rows with the files.

        Unfinished files, and files that cannot be used, are removed and logged.
        """
        self._sweep_temporary_files()
        known = {entry.info.segment_id: entry for entry in self._entries()}
        found = []
        for path in sorted(self._directory.glob(f"segments/*/*{SEGMENT_SUFFIX}")):
            segment_id = path.name.removesuffix(SEGMENT_SUFFIX)
            entry = self._usable_entry(path, known.pop(segment_id, None), identity)
            if entry is not None:
                found.append(entry)
        for segment_id in known:
            logger.warning("segment %s is in the index but has no file", segment_id)
            self.remove(segment_id)
        return found

    def indexed(self) -> dict[str, int]:
        """Segments of the index and the sizes that their files should have."""
        return dict(self._connection.execute("SELECT segment_id, file_bytes FROM segments"))

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def _connect(self) -> sqlite3.Connection:
        try:
            return _open_database(self._path)
        except sqlite3.DatabaseError as error:
            logger.warning("%s is damaged (%s); rebuilding it from the segments", self._path, error)
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            return _open_database(self._path)

    def _entries(self) -> list[CatalogEntry]:
        return [_from_row(row) for row in self._connection.execute("SELECT * FROM segments")]

    def _usable_entry(
        self, path: Path, entry: CatalogEntry | None, identity: str
    ) -> CatalogEntry | None:
        segment_id = path.name.removesuffix(SEGMENT_SUFFIX)
        try:
            if entry is None:
                info = read_header(path).info
                if info.segment_id != segment_id:
                    raise ChunkUnreadable(segment_id, f"is a copy of segment {info.segment_id}")
                entry = CatalogEntry(info, info.layout().file_bytes)
                self.add(entry)
            if path.stat().st_size != entry.file_bytes or entry.info.identity != identity:
                raise ChunkUnreadable(entry.info.segment_id, "wrong size or identity")
            return entry
        except ChunkUnreadable as error:
            logger.warning("%s; removed", error)
            path.unlink(missing_ok=True)
            self.remove(segment_id)
            return None

    def _sweep_temporary_files(self) -> None:
        for path in self._directory.glob(f"segments/*/*{TEMPORARY_SUFFIX}"):
            logger.info("removing unfinished %s", path.name)
            path.unlink()


def _open_database(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(_SCHEMA)
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("quick_check failed")
    except sqlite3.DatabaseError:
        connection.close()
        raise
    return connection


def _to_row(entry: CatalogEntry) -> tuple[object, ...]:
    info = entry.info
    return (
        info.segment_id,
        info.identity,
        info.namespace,
        info.prefix_digest,
        info.prefix_len,
        info.tokens.astype("<i4", copy=False).tobytes(),
        int(info.approximate),
        json.dumps(info.shape.to_fields()),
        info.chunk_tokens,
        info.generation,
        entry.file_bytes,
        entry.last_access,
        entry.hits,
    )


def _from_row(row: tuple[object, ...]) -> CatalogEntry:
    (
        segment_id,
        identity,
        namespace,
        digest,
        prefix_len,
        tokens,
        approximate,
        shape_json,
        chunk_tokens,
        generation,
        file_bytes,
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
        approximate=bool(approximate),
        shape=KVShape.from_fields(json.loads(str(shape_json))),
        chunk_tokens=int(str(chunk_tokens)),
        generation=int(str(generation)),
    )
    return CatalogEntry(info, int(str(file_bytes)), int(str(last_access)), int(str(hits)))
