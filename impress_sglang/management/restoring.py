"""Which segments an earlier process has left, and where they stand in the tree."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from impress_sglang.management.content import ContentIndex
from impress_sglang.management.keeper import Keeper
from impress_sglang.management.stored import StoredSegment
from impress_sglang.management.tree import StoredTree, prefix_digest
from impress_sglang.storage.quality import Quality

logger = logging.getLogger(__name__)


def recover_tree(keeper: Keeper, identity: str, content: ContentIndex | None = None) -> StoredTree:
    """The tree of the segments that are on the disk; files without a place in it are removed.

    `content` is the tree's, if it is to find tokens anywhere.

    Raises:
        OSError: the directory cannot be read.
        sqlite3.Error: the index can neither be read nor made anew.
    """
    segments = [
        StoredSegment(e.info, e.file_bytes, last_access=e.last_access, hits=e.hits)
        for e in keeper.recover(identity)
    ]
    tree = StoredTree(max((s.last_access for s in segments), default=0) + 1, content)
    newest, others = newest_files(segments)
    for other in others:
        logger.info("segment %s was replaced by a newer one; removed", other.segment_id)
        keeper.delete(other.segment_id, other.file_bytes)
    for orphan in restore_segments(tree, newest):
        # What builds on a file that cannot be read now may be found at another start.
        if keeper.unused_files:
            keeper.unused_bytes += orphan.file_bytes
        else:
            logger.warning(
                "segment %s has no place: what it builds on is gone, or others are there; removed",
                orphan.segment_id,
            )
            keeper.delete(orphan.segment_id, orphan.file_bytes)
    return tree


def newest_files(
    segments: Iterable[StoredSegment],
) -> tuple[list[StoredSegment], list[StoredSegment]]:
    """Of segments of the same tokens in the same place the newest, and all the others.

    A crash leaves two while one replaces the other, or brings back one that was removed.
    """
    newest: dict[tuple[str, str, Quality, bytes], StoredSegment] = {}
    others = []
    for segment in sorted(segments, key=_age):
        info = segment.info
        place = (info.namespace, info.prefix_digest, info.quality, info.tokens.tobytes())
        if place in newest:
            others.append(segment)
        else:
            newest[place] = segment
    return list(newest.values()), others


def restore_segments(tree: StoredTree, segments: Iterable[StoredSegment]) -> list[StoredSegment]:
    """Put the segments of an earlier process back into an empty tree.

    A segment knows only the digest of the tokens before it; their text is that of the segments it
    hangs below. Returns the segments whose place was not found: a segment above them is gone, or
    one that was used later stands there.
    """
    # Generations are versions of one segment, and say nothing of others.
    ordered = sorted(
        segments,
        key=lambda s: (s.info.prefix_len, -s.last_access, -s.info.generation, s.segment_id),
    )
    wanted_lens: dict[str, set[int]] = {}
    for segment in ordered:
        wanted_lens.setdefault(segment.info.namespace, set()).add(segment.info.prefix_len)
    empty = np.empty(0, np.int32)
    places = {(name, prefix_digest(name, empty)): empty for name in wanted_lens}
    lost = []
    for segment in ordered:
        info = segment.info
        prefix = places.get((info.namespace, info.prefix_digest))
        if prefix is None or not tree.insert(segment, prefix):
            lost.append(segment)
            continue
        path = np.concatenate([prefix, info.tokens])
        for length in wanted_lens[info.namespace]:
            if len(prefix) < length <= len(path):
                digest = prefix_digest(info.namespace, path[:length])
                places[info.namespace, digest] = path[:length]
    return lost


def _age(segment: StoredSegment) -> tuple[int, int, str]:
    """By which files are sorted, newest first."""
    return -segment.info.generation, -segment.last_access, segment.segment_id
