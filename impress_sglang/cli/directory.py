"""A directory of stores that no server uses: each is locked while it is looked at.

This is the part that needs the package's dependencies, torch among them.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from impress_sglang.cli.outcome import Unreachable
from impress_sglang.errors import PrefixUnreadable, StoreError
from impress_sglang.storage.catalog import Catalog, CatalogEntry
from impress_sglang.storage.directory import (
    StoreDirectory,
    is_store,
    quarantined_files,
    remove_store,
    segment_files,
)
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.open_segment import OpenSegment


class Directory:
    """The stores below one `--impress-ssd-dir`, one for each model."""

    def __init__(self, root: Path) -> None:
        self._files = FileSystem()
        self._root = root.expanduser()

    def stat(self) -> list[dict[str, Any]]:
        """Of each store how much there is."""
        return [self._stat(path) for path in self._stores()]

    def segments(self) -> list[dict[str, Any]]:
        """All segments, those of a store behind each other, the last used first."""
        found = []
        for path in self._stores():
            with self._locked(path):
                entries = self._entries(path)
            found += [_described(path.name, own) for own in sorted(entries, key=_latest_first)]
        return found

    def verify(self) -> list[dict[str, Any]]:
        """What is wrong with files: each is read as a whole, and nothing is changed."""
        wrong = []
        for path in self._stores():
            with self._locked(path):
                for segment_id, own, finished in segment_files(self._files, path):
                    error = self._error_in(own) if finished else None
                    if error is not None:
                        wrong.append({"store": path.name, "segment": segment_id, "error": error})
        return wrong

    def clear(self) -> list[dict[str, Any]]:
        """Remove all stores; says what was in them."""
        removed = self.stat()
        for path in self._stores():
            if not remove_store(self._files, path):
                raise _in_use(path)
        return removed

    def _stores(self) -> list[Path]:
        try:
            paths = [self._root / name for name in self._files.list(self._root)]
            found = [path for path in paths if is_store(self._files, path)]
        except OSError as error:
            raise Unreachable(f"{self._root} cannot be read: {error}") from error
        if not found:
            raise Unreachable(f"there is no store in {self._root}")
        return found

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        try:
            directory = StoreDirectory(self._files, path.parent, path.name)
        except StoreError as error:
            raise _in_use(path) from error
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise Unreachable(f"{path} cannot be read: {error}") from error
        finally:
            directory.close()

    def _stat(self, path: Path) -> dict[str, Any]:
        with self._locked(path):
            sizes = [
                self._files.stat(own).st_size for _, own, _ in segment_files(self._files, path)
            ]
            aside = quarantined_files(self._files, path)
            return {
                "store": path.name,
                "segments": len(sizes),
                "bytes": sum(sizes),
                "quarantined": len(aside),
                "tokens": sum(own.info.num_tokens for own in self._entries(path)),
            }

    def _entries(self, path: Path) -> list[CatalogEntry]:
        catalog = Catalog(self._files, path)
        try:
            return list(catalog.entries().values())
        finally:
            catalog.close()

    def _error_in(self, path: Path) -> str | None:
        try:
            segment = OpenSegment(path, self._files, direct=False)
            try:
                segment.check_all()
            finally:
                segment.close()
        except PrefixUnreadable as error:
            return str(error)
        return None


def _described(store: str, entry: CatalogEntry) -> dict[str, Any]:
    info = entry.info
    return {
        "store": store,
        "segment": info.segment_id,
        "namespace": info.namespace,
        "from_token": info.prefix_len,
        "tokens": info.num_tokens,
        "bytes": entry.file_bytes,
        "hits": entry.hits,
        "exact": not info.quality.depth,
    }


def _latest_first(entry: CatalogEntry) -> tuple[int, str]:
    return -entry.last_access, entry.info.segment_id


def _in_use(path: Path) -> Unreachable:
    return Unreachable(f"{path} serves a running server: ask that, with --url")
