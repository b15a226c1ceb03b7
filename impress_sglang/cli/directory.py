"""A directory of stores that no server uses; each store is locked while it is used here.

This part of the command line needs the package's dependencies, torch among them.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from impress_sglang.cli.orders import PATIENCE_S, carry_out, check_done, in_use, opened
from impress_sglang.cli.outcome import Refused, Unreachable
from impress_sglang.cli.prefix_file import PrefixFile
from impress_sglang.cli.shipping import export_file, import_file
from impress_sglang.errors import ConfigError, PrefixUnreadable, StoreError
from impress_sglang.storage.directory import (
    StoreDirectory,
    format_of,
    is_identity,
    is_store,
    quarantined_files,
    remove_store,
    segment_files,
)
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.segment import FORMAT_VERSION
from impress_sglang.store.catalog import Catalog
from impress_sglang.store.disk_worker import DiskWorker
from impress_sglang.store.health import Health
from impress_sglang.store.restoring import recover, restore_segments, survey
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree


class Directory:
    """The stores below one `--impress-ssd-dir`, one for each model."""

    def __init__(self, root: Path) -> None:
        self._files = FileSystem()
        self._root = root.expanduser()

    def stat(self) -> list[dict[str, Any]]:
        """How much each store has."""
        return [self._stat(path) for path in self._stores()]

    def ls(self) -> list[dict[str, Any]]:
        """All segments, store by store, the last used first."""
        found = []
        for path in self._stores():
            with self._locked(path):
                entries = self._entries(path)
            found += [_described(path.name, own) for own in sorted(entries, key=_latest_first)]
        return found

    def verify(self) -> list[dict[str, Any]]:
        """Find damaged files: each is read as a whole, and nothing is changed."""
        wrong = []
        for path in self._stores():
            with self._locked(path):
                for segment_id, own, finished in segment_files(self._files, path):
                    error = self._error_in(Path(own)) if finished else None
                    if error is not None:
                        wrong.append({"store": path.name, "segment": segment_id, "error": error})
        return wrong

    def clear(self) -> list[dict[str, Any]]:
        """Remove all stores; returns what was in them."""
        removed = self.stat()
        self._remove(self._stores())
        return removed

    def rebuild(self) -> list[dict[str, Any]]:
        """Rebuild all indexes; stores of other formats are left alone."""
        with self._all_locked() as (stores, _):
            return [_rebuilt(own) for own in stores]

    def gc(self, *, dry_run: bool) -> list[dict[str, Any]]:
        """Remove what cannot be used; stores of older formats are removed as a whole."""
        with self._all_locked() as (stores, old):
            rows = [_removal(path.name, "older format", self._sizes(path)) for path in old]
            self._remove(() if dry_run else old)
            return rows + [row for own in stores for row in _collected(own, dry_run=dry_run)]

    def order(self, verb: str, which: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See `orders.carry_out`."""
        with contextlib.ExitStack() as stack:
            paths = self._stores()
            stores = {own.name: stack.enter_context(opened(self._files, own)) for own in paths}
            return carry_out(verb, which, stores)

    def export(self, which: Mapping[str, Any], path: Path, name: str | None) -> dict[str, Any]:
        """See `shipping.export_file`; `name` names the store, if there are several."""
        found = {own.name: own for own in self._stores()}
        if name is None and len(found) == 1:
            (name,) = found
        if name not in found:
            raise Refused(f"which store? give --store, one of {', '.join(found)}")
        with opened(self._files, found[name]) as store:
            return export_file(self._files, store, found[name], which, path)

    def import_(self, which: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """See `shipping.import_file`. If there is no store at all, one is made."""
        found = PrefixFile(path)
        identity = found.contents.identity
        if not is_identity(identity):
            raise Refused(f"{path} is not named by a model identity")
        with contextlib.suppress(Unreachable):
            names = [own.name for own in self._stores()]
            if identity not in names:
                raise Refused(
                    f"{path} is of the model identity {identity}, and here are stores of "
                    f"{', '.join(names)} only: start its server here once"
                )
        with opened(self._files, self._root / identity, found.contents.shape) as store:
            return import_file(store, found, which, self._files.free_bytes(self._root))

    def _stores(self) -> list[Path]:
        try:
            paths = [self._root / name for name in self._files.list(self._root)]
            found = [path for path in paths if is_store(self._files, path)]
        except OSError as error:
            raise Unreachable(f"{self._root} cannot be read: {error}") from error
        if not found:
            raise Unreachable(f"there is no store in {self._root}")
        return found

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if not remove_store(self._files, path):
                raise in_use(path)

    @contextlib.contextmanager
    def _all_locked(self) -> Iterator[tuple[list[StoreDirectory], list[Path]]]:
        """Yield all stores of this version's format, locked, and the paths of older ones."""
        with contextlib.ExitStack() as stack:
            try:
                formats = {path: format_of(self._files, path) for path in self._stores()}
                own = [path for path in formats if formats[path] == FORMAT_VERSION]
                old = [path for path in formats if formats[path] < FORMAT_VERSION]
                yield [stack.enter_context(self._locked(path)) for path in own], old
            except (OSError, sqlite3.Error) as error:
                raise Unreachable(f"not everything was done in {self._root}: {error}") from error

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[StoreDirectory]:
        try:
            directory = StoreDirectory(self._files, path.parent, path.name)
        except StoreError as error:
            raise in_use(path) from error
        except ConfigError as error:
            raise Unreachable(f"{path} cannot be opened: {error}") from error
        try:
            yield directory
        except (OSError, sqlite3.Error) as error:
            raise Unreachable(f"{path} cannot be read: {error}") from error
        finally:
            directory.close()

    def _stat(self, path: Path) -> dict[str, Any]:
        with self._locked(path):
            sizes = self._sizes(path)
            aside = quarantined_files(self._files, path)
            return {
                "store": path.name,
                "segments": len(sizes),
                "bytes": sum(sizes),
                "quarantined": len(aside),
                "tokens": sum(own.info.num_tokens for own in self._entries(path)),
            }

    def _sizes(self, path: Path) -> list[int]:
        return [self._files.stat(own).st_size for _, own, _ in segment_files(self._files, path)]

    def _entries(self, path: Path) -> list[StoredSegment]:
        catalog = Catalog(self._files, path, read_only=True)
        try:
            return list(catalog.segments().values())
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


def _described(store: str, segment: StoredSegment) -> dict[str, Any]:
    info = segment.info
    return {
        "store": store,
        "segment": info.segment_id,
        "namespace": info.namespace,
        "from_token": info.prefix_len,
        "tokens": info.num_tokens,
        "bytes": segment.file_bytes,
        "hits": segment.hits,
        "priority": info.priority.name.lower(),
        "exact": not info.quality.depth,
    }


def _latest_first(segment: StoredSegment) -> tuple[int, str]:
    return -segment.last_access, segment.segment_id


def _rebuilt(directory: StoreDirectory) -> dict[str, Any]:
    """Rebuild the index of a store from the headers of all its files.

    The times of use come from the old index, which stays until the new one is complete.

    Raises:
        Unreachable: the disk failed something.
        OSError: the directory cannot be read.
        sqlite3.Error: the index can neither be read nor rebuilt.
    """
    with _kept(directory) as worker:
        found = survey(directory, worker.catalog, directory.path.name, anew=True)
        recover(found, directory, worker)
    return {
        "store": directory.path.name,
        "segments": len(found.segments),
        "not_indexed": len(found.adopted),
        "without_file": len(found.missing),
        "quarantined": len(found.damaged),
        "unreadable_now": found.unread,
    }


def _collected(directory: StoreDirectory, *, dry_run: bool) -> list[dict[str, Any]]:
    """Remove what cannot be used of a store, or only say what that is; raises like `_rebuilt`."""
    store, now = directory.path.name, time.time()
    expired: list[StoredSegment] = []
    current: list[StoredSegment] = []
    with _kept(directory, read_only=dry_run) as worker:
        there = survey(directory, worker.catalog, store)
        for own in there.segments:
            (expired if 0 < own.info.expires <= now else current).append(own)
        placeless, orphans = restore_segments(StoredTree(), current)
        # Those that may build on what cannot be read now are not useless.
        placeless += [] if there.unread else orphans
        damaged = [directory.segment_path(own.segment_id) for own in there.damaged]
        damaged += quarantined_files(directory.files, directory.path)
        found = {
            "unfinished": [directory.files.stat(own).st_size for own in there.unfinished],
            "damaged": [directory.files.stat(own).st_size for own in damaged],
            "expired": [own.file_bytes for own in expired],
            "without a place": [own.file_bytes for own in placeless],
        }
        if not dry_run:
            recover(there, directory, worker)
            worker.delete({own.segment_id: own.file_bytes for own in expired + placeless})
            worker.submit(worker.tidy, False)
    return [_removal(store, what, sizes) for what, sizes in found.items() if sizes]


def _removal(store: str, what: str, sizes: list[int]) -> dict[str, Any]:
    """A row for the files of one kind: how many, and their bytes."""
    return {"store": store, "what": what, "files": len(sizes), "bytes": sum(sizes)}


@contextlib.contextmanager
def _kept(directory: StoreDirectory, *, read_only: bool = False) -> Iterator[DiskWorker]:
    """A worker on a store, which has done all its work in the end; `read_only`: as there."""
    health = Health()
    worker = DiskWorker(directory, health, direct=False, read_only=read_only)
    try:
        yield worker
    finally:
        worker.close(PATIENCE_S)
    check_done(health)
