"""A SQLite connection whose statements fail; see `tests.faults`."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.faults import FaultyFileSystem


class FaultyConnection:
    """A connection whose statements fail by the rules; all else is the connection's."""

    def __init__(self, inner: sqlite3.Connection, path: Path, files: FaultyFileSystem) -> None:
        self._inner, self._path, self._files = inner, path, files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._inner, name, value)

    def _enter(self, statement: str) -> None:
        self._files.enter(f"sql.{statement.split(maxsplit=1)[0].lower()}", self._path)

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        self._enter(statement)
        return self._inner.execute(statement, *arguments)

    def executemany(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        self._enter(statement)
        return self._inner.executemany(statement, *arguments)

    def executescript(self, script: str) -> sqlite3.Cursor:
        self._enter(script)
        return self._inner.executescript(script)

    def commit(self) -> None:
        self._enter("commit")
        self._inner.commit()

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> FaultyConnection:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is not None:
            self._inner.rollback()
            return False
        try:
            self.commit()
        except BaseException:
            self._inner.rollback()
            raise
        return False


def cut_database(path: Path, connections: list[sqlite3.Connection], *, keep_log: bool) -> None:
    """Close connections without letting SQLite fold its log into the database."""
    log = Path(f"{path}-wal")
    kept = {file: file.read_bytes() for file in (path, log) if file.exists()}
    for connection in connections:
        connection.close()
    for file in (path, log, Path(f"{path}-shm")):
        file.unlink(missing_ok=True)
    for file, content in kept.items():
        if file == path or keep_log:
            file.write_bytes(content)
            file.chmod(0o600)
