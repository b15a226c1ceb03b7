"""What an earlier process has left: the segments on the disk, and their places in the tree.

The index is compared with the files. A file without a sound row is found by its header; so the
index may be missing.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.storage.directory import StoreDirectory, segment_files
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.quality import Quality
from impress_sglang.storage.segment import Tokens, read_header
from impress_sglang.store.disk_worker import DiskWorker
from impress_sglang.store.health import Verdict
from impress_sglang.store.losses import prompt_of
from impress_sglang.store.peers import ForeignSegments, Peers
from impress_sglang.store.prefix_hashes import begun_digest, extended
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
) -> tuple[ForeignSegments, bool]:
    """Put the segments on the disk into a tree; own files without a place in it are removed.

    Returns what other servers, which are followed from here on, have and has no place in the tree,
    and whether it is frozen, so that `gc.unfreeze` is due when it goes.

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
        useless, orphans = restore_segments(tree, found + others)
        foreign = ForeignSegments(tree)
        for own in useless + orphans:
            if own.home is not None:
                foreign.set_aside(own)
        if unread or peers.unreadable:
            # They may build on a file that cannot be read now.
            worker.unused_bytes += sum(own.file_bytes for own in orphans)
        else:
            useless += orphans
        useless = [own for own in useless if own.home is None]
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
    return foreign, large


def restore_segments(
    tree: StoredTree, segments: Iterable[StoredSegment]
) -> tuple[list[StoredSegment], list[StoredSegment]]:
    """Put segments of an earlier process into an empty tree.

    A segment knows only the digest of the tokens before it; the tokens themselves are in the
    segments above it. What it was attached to is tried first; if the digest disagrees, all paths of
    the right lengths are digested.

    Returns those of which a newer file has the same tokens in the same place: a crash leaves two
    files while one replaces the other, or brings back one that was removed. And those whose place
    was not found: a segment above them is gone, or one that was used later has their place.
    """
    newest: dict[tuple[bytes, str, Quality], StoredSegment] = {}
    older = []
    for segment in segments:
        info = segment.info
        place = info.tokens.tobytes(), info.prefix_digest, info.quality
        first = newest.setdefault(place, segment)
        if first is not segment:
            newest[place], other = sorted((first, segment), key=_age)
            older.append(other)
    # Generations are versions of one segment, and say nothing of others.
    ordered = sorted(newest.values(), key=_age)
    # Those of other servers come last: where they begin like own ones, these stay.
    ordered.sort(key=lambda own: (own.home is not None, own.info.prefix_len, -own.last_access))
    tree.order.now = max((own.last_access for own in ordered), default=0)
    restoring = _Restoring(tree)
    others = [own for own in ordered if not restoring.put_below(own)]
    others.sort(key=lambda own: own.info.prefix_len)
    orphans = restoring.put_anywhere(others) if others else []
    tree.order.sort()
    return older, orphans


class _Restoring:
    """Finds the places of segments by the digests of the tokens before them."""

    def __init__(self, tree: StoredTree) -> None:
        self._tree = tree
        # For segments that have their place: the digest of the tokens before it.
        self._before: dict[StoredSegment, hashlib.blake2b] = {}

    def put_below(self, segment: StoredSegment) -> bool:
        """Put a segment where it was; False if that is unknown, or wrong."""
        info, above = segment.info, self._tree.get(segment.above)
        if not info.prefix_len:
            return self._put_behind(segment, info.tokens[:0])
        length = info.prefix_len - (0 if above is None else above.info.prefix_len)
        if above is None or not 0 < length <= above.info.num_tokens:
            return False
        digest = extended(self._before[above], above.info.tokens[:length])
        if info.namespace != above.info.namespace or digest.hexdigest() != info.prefix_digest:
            return False
        if not self._tree.insert_below(segment, above, length):
            return False
        self._before[segment] = digest
        return True

    def _put_behind(self, segment: StoredSegment, text: Tokens) -> bool:
        """Put a segment behind tokens of the tree; False if its digest is not theirs."""
        digest = extended(begun_digest(segment.info.namespace), text)
        same = digest.hexdigest() == segment.info.prefix_digest
        if not same or not self._tree.insert(segment, text):
            return False
        self._before[segment] = digest
        return True

    def put_anywhere(self, ordered: Sequence[StoredSegment]) -> list[StoredSegment]:
        """Put segments behind the tokens of their digests; returns those for which none are."""
        texts: dict[tuple[str, str], Tokens | None] = {_place_of(own): None for own in ordered}
        sets: dict[str, set[int]] = {}
        for segment in ordered:
            sets.setdefault(segment.info.namespace, set()).add(segment.info.prefix_len)
        lengths = {name: sorted(own) for name, own in sets.items()}

        def look(segment: StoredSegment) -> None:
            """Find the searched places that are inside a segment or at its end."""
            info = segment.info
            own, first = lengths.get(info.namespace, []), info.prefix_len
            low, high = (bisect.bisect_right(own, at) for at in (first, first + info.num_tokens))
            digest, done = self._before[segment], 0
            for length in own[low:high]:
                digest = extended(digest, info.tokens[done : length - first])
                done = length - first
                place = info.namespace, digest.hexdigest()
                if place in texts and texts[place] is None:
                    texts[place] = prompt_of(segment)[:length]

        for segment in self._before:
            look(segment)
        lost = []
        for segment in ordered:
            text = texts[_place_of(segment)]
            if text is not None and self._put_behind(segment, text):
                look(segment)
            else:
                lost.append(segment)
        return lost


def _place_of(segment: StoredSegment) -> tuple[str, str]:
    """Its namespace, and the digest of the tokens before it."""
    return segment.info.namespace, segment.info.prefix_digest


def _age(segment: StoredSegment) -> tuple[bool, int, int, str]:
    """Sort key of files: own ones first, then the newest."""
    use = -segment.info.generation, -segment.last_access
    return segment.home is not None, *use, segment.segment_id
