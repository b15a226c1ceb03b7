"""Which segments an earlier process has left, and their places in the tree."""

from __future__ import annotations

import bisect
import gc
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from impress_sglang.storage.catalog import CatalogEntry
from impress_sglang.storage.directory import StoreDirectory
from impress_sglang.storage.quality import Quality
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.content import ContentIndex
from impress_sglang.store.disk_worker import DiskWorker
from impress_sglang.store.losses import prompt_of
from impress_sglang.store.prefix_hashes import begun_digest, extended
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.survey import Survey, survey
from impress_sglang.store.tree import StoredTree

logger = logging.getLogger(__name__)

_Place: TypeAlias = tuple[str, str]
"""A namespace, and the digest of the tokens before a segment."""
_NO_TOKENS = np.empty(0, np.int32)
# From this number of segments on, a store is large.
_MANY = 10_000


def recover_tree(
    directory: StoreDirectory,
    worker: DiskWorker,
    identity: str,
    content: ContentIndex | None = None,
) -> tuple[StoredTree, bool]:
    """Build the tree of the segments on the disk; files without a place in it are removed.

    Returns the tree, and whether it is frozen, so that `gc.unfreeze` is due when it goes.

    Garbage collection is off meanwhile, and a large tree is frozen: it has no garbage before the
    store closes, with 100,000 segments each collection would take 0.4 s longer, and requests would
    wait for it. `content` is the tree's, if tokens are to be found anywhere.

    Raises:
        OSError: the directory cannot be read.
        sqlite3.Error: the index can neither be read nor made anew.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        found = survey(directory, worker.catalog, identity)
        large = enabled and len(found.entries) >= _MANY
        if large:
            # Present garbage would be frozen, too; it takes longer to collect with the tree there.
            gc.collect()
        tree = _recover_tree(worker, found, content)
        if large:
            gc.freeze()
    finally:
        if enabled:
            gc.enable()
    return tree, large


def _recover_tree(worker: DiskWorker, found: Survey, content: ContentIndex | None) -> StoredTree:
    entries = worker.recover(found)
    tree = StoredTree(content)
    useless, waiting = restore_entries(tree, entries, all_read=not found.unread)
    for own in useless:
        logger.warning(
            "segment %s has no place: what it builds on is gone, or others are there; removed",
            own.segment_id,
        )
    if useless:
        worker.delete({own.segment_id: own.file_bytes for own in useless})
    worker.unused_bytes += sum(own.file_bytes for own in waiting)
    return tree


def restore_entries(
    tree: StoredTree, entries: Iterable[CatalogEntry], *, all_read: bool
) -> tuple[list[StoredSegment], list[StoredSegment]]:
    """Put the segments of the index into an empty tree.

    Returns those that are useless, because another file has their tokens or what they build on is
    gone; and those that may be useful later, because they may build on a file that could not be
    read now. `all_read`: there is no such file.
    """
    parents, segments = {}, []
    for own in entries:
        parents[own.info.segment_id] = own.parent
        segments.append(
            StoredSegment(own.info, own.file_bytes, last_access=own.last_access, hits=own.hits)
        )
    newest, others = newest_files(segments)
    orphans = restore_segments(tree, newest, parents)
    return (others + orphans, []) if all_read else (others, orphans)


def newest_files(
    segments: Iterable[StoredSegment],
) -> tuple[list[StoredSegment], list[StoredSegment]]:
    """The newest of each group of segments with the same tokens in the same place, and the others.

    A crash leaves two files while one replaces the other, or brings back one that was removed.
    """
    newest: dict[tuple[bytes, str, Quality], StoredSegment] = {}
    others = []
    for segment in segments:
        info = segment.info
        place = info.tokens.tobytes(), info.prefix_digest, info.quality
        first = newest.setdefault(place, segment)
        if first is not segment:
            newest[place], other = sorted((first, segment), key=_age)
            others.append(other)
    return list(newest.values()), others


def restore_segments(
    tree: StoredTree, segments: Iterable[StoredSegment], parents: Mapping[str, str] | None = None
) -> list[StoredSegment]:
    """Put the segments of an earlier process back into an empty tree.

    A segment knows only the digest of the tokens before it; the tokens themselves are in the
    segments above it. `parents` names, for each segment, the one it was attached to: this place is
    tried first, and taken only if the digest agrees.

    Returns the segments whose place was not found: a segment above them is gone, or one that was
    used later has their place.
    """
    # Generations are versions of one segment, and say nothing of others.
    ordered = sorted(
        segments,
        key=lambda s: (s.info.prefix_len, -s.last_access, -s.info.generation, s.segment_id),
    )
    tree.order.go_on_from(max((s.last_access for s in ordered), default=0))
    restoring = _Restoring(tree)
    others = restoring.put_below(ordered, parents or {})
    lost = restoring.put_anywhere(others) if others else []
    tree.order.sort()
    return lost


class _Restoring:
    """Finds the places of segments by the digests of the tokens before them."""

    def __init__(self, tree: StoredTree) -> None:
        self._tree = tree
        # For segments that have their place: the digest of the tokens before it.
        self._before: dict[StoredSegment, hashlib.blake2b] = {}
        # Places that are searched, and by namespace the lengths of the prefixes before them.
        self._wanted: set[_Place] = set()
        self._lengths: dict[str, list[int]] = {}
        self._texts: dict[_Place, Tokens] = {}

    def put_below(
        self, ordered: Iterable[StoredSegment], parents: Mapping[str, str]
    ) -> list[StoredSegment]:
        """Put segments where they were, those with the fewest tokens before them first.

        Returns the others: for them, or for what they build on, this place is unknown or wrong.
        """
        others = []
        for segment in ordered:
            if segment.info.prefix_len:
                above = self._tree.get(parents.get(segment.info.segment_id, ""))
                placed = above is not None and self._put_below(segment, above)
            else:
                placed = self._put_behind(segment, _NO_TOKENS)
            if not placed:
                others.append(segment)
        return others

    def put_anywhere(self, ordered: Sequence[StoredSegment]) -> list[StoredSegment]:
        """Put segments behind the tokens of their digests, if these are in the tree.

        All paths of the right lengths are digested to find them. Returns the other segments.
        """
        self._look_for(ordered)
        for segment in self._before:
            self._note_places(segment)
        lost = []
        for segment in ordered:
            text = self._texts.get(_place_of(segment))
            if text is not None and self._put_behind(segment, text):
                self._note_places(segment)
            else:
                lost.append(segment)
        return lost

    def _put_below(self, segment: StoredSegment, above: StoredSegment) -> bool:
        """Put a segment below another if its digest agrees; False if it does not fit there."""
        info, base = segment.info, above.info
        length = info.prefix_len - base.prefix_len
        if not 0 < length <= base.num_tokens or info.namespace != base.namespace:
            return False
        digest = extended(self._before[above], base.tokens[:length])
        same = digest.hexdigest() == info.prefix_digest
        if not same or not self._tree.insert_below(segment, above, length):
            return False
        self._before[segment] = digest
        return True

    def _put_behind(self, segment: StoredSegment, text: Tokens) -> bool:
        """Put a segment behind tokens of the tree if its digest is theirs; see `_put_below`."""
        digest = extended(begun_digest(segment.info.namespace), text)
        same = digest.hexdigest() == segment.info.prefix_digest
        if not same or not self._tree.insert(segment, text):
            return False
        self._before[segment] = digest
        return True

    def _look_for(self, segments: Iterable[StoredSegment]) -> None:
        lengths: dict[str, set[int]] = {}
        for segment in segments:
            self._wanted.add(_place_of(segment))
            lengths.setdefault(segment.info.namespace, set()).add(segment.info.prefix_len)
        self._lengths = {name: sorted(own) for name, own in lengths.items()}

    def _note_places(self, segment: StoredSegment) -> None:
        """Find the searched places that are inside a segment or at its end."""
        info = segment.info
        lengths, first = self._lengths.get(info.namespace, []), info.prefix_len
        low, high = (bisect.bisect_right(lengths, own) for own in (first, first + info.num_tokens))
        if low == high:
            return
        digest, done = self._before[segment], 0
        for length in lengths[low:high]:
            digest = extended(digest, info.tokens[done : length - first])
            done = length - first
            place = info.namespace, digest.hexdigest()
            if place in self._wanted and place not in self._texts:
                self._texts[place] = prompt_of(segment)[:length]


def _place_of(segment: StoredSegment) -> _Place:
    return segment.info.namespace, segment.info.prefix_digest


def _age(segment: StoredSegment) -> tuple[int, int, str]:
    """Sort key of files, newest first."""
    return -segment.info.generation, -segment.last_access, segment.segment_id
