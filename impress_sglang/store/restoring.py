"""What an earlier process has left: the segments on the disk, and their places in the tree.

The index is compared with the files. A file without a sound row is found by its header; so the
index may be missing.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from pathlib import Path

from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.storage.directory import StoreDirectory, segment_files
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import read_header
from impress_sglang.store.disk_worker import DiskWorker
from impress_sglang.store.health import Verdict
from impress_sglang.store.peers import Peers
from impress_sglang.store.places import Places
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

logger = logging.getLogger(__name__)

# From this number of segments on, a store is large.
_MANY = 10_000


def recover(directory: StoreDirectory, worker: DiskWorker) -> tuple[list[StoredSegment], int]:
    """Bring the index and the folder in line with each other; nothing else runs on the worker yet.

    Unfinished files are removed, damaged ones and those of another identity go to quarantine, and
    files that cannot be read now stay where they are.

    Returns the segments whose files can be used, and how many files cannot be read now, of which
    nobody knows what builds on them.
    """
    files, known = directory.files, worker.journal.segments()
    found, adopted, unread = list[StoredSegment](), [], 0
    for segment_id, path, finished in segment_files(files, directory.path):
        if not finished:
            logger.info("removing unfinished %s", path)
            files.unlink(Path(path))
            continue
        row = known.pop(segment_id, None)
        try:
            segment = _segment(files, segment_id, path, row)
            if segment.info.identity != directory.identity:
                raise SegmentUnreadable(segment_id, "belongs to another model")
        except SegmentUnreadable as error:
            if worker.condemn(error) is Verdict.UNCLEAR:
                worker.unused_bytes += _size_of(files, path)
            continue
        except (OSError, StoreUnavailable) as error:
            if row is None:
                unread += 1
                worker.unused_bytes += _size_of(files, path)
                logger.warning("%s stays where it is, unused: %s", path, error)
                continue
            # A segment that the index knows is verified when it is opened. Its age is not known, so
            # that it may be too old.
            segment = row
            segment.written = 0.0
        if row is None:
            adopted.append(segment)
        found.append(segment)
    for segment_id in known:
        logger.warning("segment %s is in the index but has no file", segment_id)
    if adopted or known:
        worker.index(worker.journal.change, adopted, list(known))
    worker.tidy_quarantine()
    return found, unread


def _segment(
    files: FileSystem, segment_id: str, path: str, row: StoredSegment | None
) -> StoredSegment:
    """The segment of a file, of which the header says what it is if no row does."""
    if row is None:
        info = read_header(Path(path), files).info
        if info.segment_id != segment_id:
            raise SegmentUnreadable(segment_id, f"is a copy of segment {info.segment_id}")
        row = StoredSegment(info, info.layout().file_bytes)
    status = files.stat(path)
    if status.st_size != row.file_bytes:
        raise SegmentUnreadable(segment_id, "has the wrong size")
    row.written = status.st_mtime
    return row


def _size_of(files: FileSystem, path: str) -> int:
    with contextlib.suppress(OSError):
        return files.stat(path).st_size
    return 0


def recover_tree(
    tree: StoredTree, directory: StoreDirectory, worker: DiskWorker, peers: Peers
) -> tuple[Places, bool]:
    """Put the segments on the disk into a tree; own files without a place in it are removed.

    Returns the places that segments of other servers, which are followed from here on, may still
    find, and whether the tree is frozen, so that `gc.unfreeze` is due when it goes.

    Garbage collection is off meanwhile, and a large tree is frozen: it has no garbage before the
    store closes, with 100,000 segments each collection would take 0.4 s longer, and requests would
    wait for it.

    Raises:
        OSError: the directory cannot be read.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        found, unread = recover(directory, worker)
        large = enabled and len(found) >= _MANY
        if large:
            # Present garbage would be frozen, too; it takes longer to collect with the tree there.
            gc.collect()
        others = peers.begin(worker.journal.orders)
        places = Places(tree)
        useless, orphans = places.restore(found + others)
        if unread or peers.unreadable:
            # They may build on a file that cannot be read now.
            worker.unused_bytes += sum(own.file_bytes for own in orphans)
        else:
            useless += orphans
        for own in useless:
            logger.warning(
                "segment %s has no place: what it builds on is gone, or others are there; removed",
                own.segment_id,
            )
        if useless:
            worker.delete({own.segment_id: own.file_bytes for own in useless})
        if large:
            gc.freeze()
    finally:
        if enabled:
            gc.enable()
    return places, large
