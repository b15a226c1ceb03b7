"""Keeps stores in order that no server uses: `impress rebuild` and `impress gc`.

This runs the same code as the start of a server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from impress_sglang.cli.orders import PATIENCE_S, check_done
from impress_sglang.storage.directory import StoreDirectory, quarantined_files
from impress_sglang.store.disk_worker import DiskWorker
from impress_sglang.store.health import Health
from impress_sglang.store.restoring import recover, restore_segments, survey
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree


def rebuild(directory: StoreDirectory) -> dict[str, Any]:
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


def collect(directory: StoreDirectory, *, dry_run: bool) -> list[dict[str, Any]]:
    """Remove what cannot be used of a store, or only say what that is; raises like `rebuild`."""
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
    return [removal(store, what, sizes) for what, sizes in found.items() if sizes]


def removal(store: str, what: str, sizes: list[int]) -> dict[str, Any]:
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
