"""Keeps stores in order that no server uses: `impress rebuild` and `impress gc`.

This runs the same code as the start of a server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from impress_sglang.cli.orders import PATIENCE_S, check_done
from impress_sglang.management.keeper import Keeper
from impress_sglang.management.restoring import restore_entries
from impress_sglang.management.tree import StoredTree
from impress_sglang.storage.catalog import CatalogEntry
from impress_sglang.storage.directory import StoreDirectory, quarantined_files
from impress_sglang.storage.health import Health


def rebuild(directory: StoreDirectory) -> dict[str, Any]:
    """Rebuild the index of a store from the headers of all its files.

    The times of use come from the old index, which stays until the new one is complete.

    Raises:
        Unreachable: the disk failed something.
        OSError: the directory cannot be read.
        sqlite3.Error: the index can neither be read nor rebuilt.
    """
    with _kept(directory) as keeper:
        survey = keeper.survey(directory.path.name, anew=True)
        keeper.recover(survey)
    return {
        "store": directory.path.name,
        "segments": len(survey.entries),
        "not_indexed": len(survey.adopted),
        "without_file": len(survey.missing),
        "quarantined": len(survey.damaged),
        "unreadable_now": keeper.unused_files,
    }


def collect(directory: StoreDirectory, *, dry_run: bool) -> list[dict[str, Any]]:
    """Remove what cannot be used of a store, or only say what that is; raises like `rebuild`."""
    store, now = directory.path.name, time.time()
    expired: list[CatalogEntry] = []
    current: list[CatalogEntry] = []
    with _kept(directory, read_only=dry_run) as keeper:
        survey = keeper.survey(store)
        for own in survey.entries:
            (expired if 0 < own.info.expires <= now else current).append(own)
        useless, _ = restore_entries(StoredTree(), current, all_read=not keeper.unused_files)
        placeless = [own.entry for own in useless]
        damaged = [directory.segment_path(own.segment_id) for own in survey.damaged]
        damaged += quarantined_files(directory.files, directory.path)
        found = {
            "unfinished": [directory.files.stat(own).st_size for own in survey.unfinished],
            "damaged": [directory.files.stat(own).st_size for own in damaged],
            "expired": [own.file_bytes for own in expired],
            "without a place": [own.file_bytes for own in placeless],
        }
        if not dry_run:
            keeper.recover(survey)
            keeper.delete({own.info.segment_id: own.file_bytes for own in expired + placeless})
            keeper.empty_quarantine()
    return [removal(store, what, sizes) for what, sizes in found.items() if sizes]


def removal(store: str, what: str, sizes: list[int]) -> dict[str, Any]:
    """A row for the files of one kind: how many, and their bytes."""
    return {"store": store, "what": what, "files": len(sizes), "bytes": sum(sizes)}


@contextlib.contextmanager
def _kept(directory: StoreDirectory, *, read_only: bool = False) -> Iterator[Keeper]:
    """A keeper of a store, which has done all its work in the end; `read_only` as in `Keeper`."""
    health = Health()
    keeper = Keeper(directory, health, direct=False, read_only=read_only)
    try:
        yield keeper
    finally:
        keeper.close(PATIENCE_S)
    check_done(health)
