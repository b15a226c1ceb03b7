"""Attaches segments of an earlier process, or of other servers, to the tree, or keeps them apart.

A segment contains the id of the segment it builds on, and the digest of all tokens before it. As
long as these tokens are not in the tree, or a segment with the same first tokens is, it is kept
here, and attached later if possible.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

from impress_sglang.storage.segment import Tokens, common_prefix_len
from impress_sglang.store.journal import ORDER_SECONDS
from impress_sglang.store.prefix_hashes import empty_digest, extend_digest, prefix_digest
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

# Seconds between two attempts to attach segments; per attempt, maximum number of segments tried, of
# segments of the tree searched for a parent, and of seconds for each of both.
_RETRY_SECONDS, _MAX_RETRIES, _MAX_SEARCHED, _MAX_SECONDS = 1.0, 64, 512, 0.002
# Two servers write the same tokens simultaneously if they do so within this time. It is shorter
# than the time for which they do not use a segment that cannot be read.
_SIMULTANEOUS_SECONDS = 30.0

_Order: TypeAlias = tuple[str | None, bytes | None, float]
"""Order to purge: namespace, bytes of the prefix's tokens (None for all), and time up to which
segments must have been written."""
_Digests: TypeAlias = dict[StoredSegment, hashlib.blake2b]


class UnattachedSegments:
    """Segments that are not in the tree yet, and ids of segments that must not be used.

    Thread: the store's.
    """

    def __init__(self, tree: StoredTree) -> None:
        self._tree = tree
        self._unattached: dict[str, StoredSegment] = {}
        # The same by prefix digest, and their prefix lengths by namespace, ascending; lengths of
        # removed segments may remain.
        self._by_prefix_digest: dict[str, dict[str, StoredSegment]] = {}
        self._lengths: dict[str, list[int]] = {}
        # Times until which segments are not tried, by id.
        self._postponed_until: dict[str, float] = {}
        # Ids of segments that must not be used, and whether they were purged.
        self._banned: dict[str, bool] = {}
        # Orders to purge, and their times of arrival: segments reported later may be older.
        self._purged: dict[_Order, float] = {}
        self.to_remove: list[StoredSegment] = []
        """Purged segments that were not in the tree, which the caller removes."""
        self.undecided: frozenset[str] = frozenset()
        """Ids of segments that a purge of a prefix leaves, because it is soon known what they build
        on: the caller adds them then."""
        self._duplicates: list[tuple[StoredSegment, StoredSegment]] = []
        self._next_retry = 0.0
        # Segments of the tree that are still to be searched for parents.
        self._unsearched: Iterator[StoredSegment] = iter(())

    def restore(
        self, segments: Iterable[StoredSegment]
    ) -> tuple[list[StoredSegment], list[StoredSegment]]:
        """Attach segments of an earlier process, and of other servers, to an empty tree.

        The segment to which it was attached is tried first; if the digest differs, all paths of the
        right lengths are digested.

        Returns own segments that were not attached: those superseded by a newer file with the same
        tokens in the same place, as a crash may leave, and orphans. An orphan's ancestor is
        missing, or a segment that was used later has its place.
        """
        newest, older = dict[object, StoredSegment](), list[StoredSegment]()
        for segment in sorted(segments, key=_sort_key):
            info = segment.info
            key = info.tokens.tobytes(), info.prefix_digest, info.quality
            if newest.setdefault(key, segment) is not segment:
                older.append(segment)
        # Own segments first: they stay if those of other servers have the same first tokens.
        ordered = list(newest.values())
        ordered.sort(
            key=lambda segment: (
                segment.foreign_dir is not None,
                segment.info.prefix_len,
                -segment.last_access,
            )
        )
        self._tree.order.now = max((segment.last_access for segment in ordered), default=0)
        digests = _Digests()
        unattached = [
            segment for segment in ordered if not self._attach_to_parent(segment, digests)
        ]
        for segment in unattached:
            self.postpone(segment)
        for segment, digest in digests.items() if unattached else ():
            self.on_attached(segment, digest)
        rootless = set[str]()
        for segment in sorted(unattached, key=lambda segment: segment.info.prefix_len):
            prefix = None if segment.parent_hint in rootless else self._tokens_before(segment)
            if prefix is None:
                # Its descendants cannot be attached either, so a chain of any length is walked
                # once.
                rootless.add(segment.segment_id)
            elif self._tree.insert(segment, prefix):
                self.forget(segment.segment_id)
                self.on_attached(segment)
        self._tree.order.sort()
        orphans = [segment for segment in self._unattached.values() if segment.foreign_dir is None]
        for segment in orphans:
            self.forget(segment.segment_id)
        for segment in older:
            if segment.foreign_dir is not None:
                self.postpone(segment)
        return [segment for segment in older if segment.foreign_dir is None], orphans

    def _attach_to_parent(self, segment: StoredSegment, digests: _Digests) -> bool:
        """Attach a segment to its former parent; False if that is unknown, or wrong.

        `digests`: digest of the tokens before each segment of the tree.
        """
        info, parent = segment.info, self._tree.get(segment.parent_hint)
        if not info.prefix_len:
            parent, digest = None, empty_digest(info.namespace)
        elif parent is None or not parent.info.prefix_len < info.prefix_len <= parent.stop:
            return False
        else:
            length = info.prefix_len - parent.info.prefix_len
            digest = extend_digest(digests[parent], parent.info.tokens[:length])
        # The digest includes the namespace.
        is_parent = digest.hexdigest() == info.prefix_digest
        if is_attached := is_parent and self._tree.attach(segment, parent):
            digests[segment] = digest
        return is_attached

    def add(self, segment: StoredSegment, *, is_known: bool = False) -> None:
        """Attach a segment of another server, or keep it until that is possible; not if its tokens
        are known (`is_known`), stored under another id, or if it was purged or has expired."""
        if segment.segment_id in self._banned or (is_known and not self._purged):
            return
        prefix = self._tokens_before(segment)
        # What builds on a purged segment may belong to the same prefix; of others it is not known.
        is_unsure = prefix is None and not self._banned.get(segment.parent_hint)
        orders = (purge for purge in self._purged if purge[1] is None or not is_unsure)
        segment.expires_at = self._tree.order.expiry_of(segment)
        is_purged = any(_matches_order(purge, segment, prefix) for purge in orders)
        if is_purged or segment.expires_at <= time.time():
            self.ban(segment.segment_id, is_purged=is_purged)
            self.to_remove.append(segment)
            return
        if is_known:
            return
        # The report counts as a use.
        segment.last_access = min(segment.last_access, 0)
        if prefix is not None and self._tree.insert(segment, prefix):
            self.on_attached(segment)
            return
        self.postpone(segment)
        if prefix is not None and (duplicate := self._duplicate_of(segment, prefix)) is not None:
            self._duplicates.append((duplicate, segment))

    def add_with_ancestors(self, segment: StoredSegment) -> None:
        """`add` a segment, and before it the kept ones that it builds on, without their turn."""
        chain = [segment]
        while (parent := self._take(chain[-1].parent_hint)) is not None:
            chain.append(parent)
        for link in reversed(chain):
            self.add(link)

    def _duplicate_of(self, segment: StoredSegment, prefix: Tokens) -> StoredSegment | None:
        """Return this server's segment of the same tokens, if both were written simultaneously and
        this server is to remove its copy: both servers decide by the ids. Or one that cannot be
        used: `segment` has its tokens, and those of the hole that it builds on."""
        info, quality = segment.info, segment.info.quality
        key = info.namespace, np.concatenate([prefix, info.tokens])
        match = self._tree.match(*key, min_quality=quality)
        if match.num_tokens == len(prefix) and not info.windows_from:
            stored = self._tree.match(*key, min_quality=quality, only_ready=False)
            hole, last = stored.slice(len(prefix), len(prefix) + 1), stored.spans[-1:]
            if hole and hole[0].segment.lost and last != hole:
                unused = last[0].segment
                is_whole = len(last[0]) == unused.info.num_tokens
                if is_whole and unused.foreign_dir is None and unused.info.quality == quality:
                    return unused
        local = match.spans[-1].segment if match.spans else segment
        if (
            local.foreign_dir is not None
            or local.history is not None
            or _duplicate_key(local) != _duplicate_key(segment)
        ):
            return None
        # A later segment may have been written because the other one cannot be read.
        simultaneous = abs(segment.written - local.written) < _SIMULTANEOUS_SECONDS
        lives_longer = (segment.info.expires or math.inf) >= (local.info.expires or math.inf)
        return (
            local
            if simultaneous and lives_longer and segment.segment_id < local.segment_id
            else None
        )

    def on_attached(self, segment: StoredSegment, digest: hashlib.blake2b | None = None) -> None:
        """Make a new segment of the tree the future parent of kept segments that continue it.

        `digest`: digest of the tokens before it, if the caller has it.
        """
        if not self._unattached:
            return
        info, first, num_digested = segment.info, segment.info.prefix_len, 0
        lengths = self._lengths.get(info.namespace, [])
        low, high = (bisect.bisect_right(lengths, at) for at in (first, first + info.num_tokens))
        if low == high:
            return
        if digest is None:
            digest = extend_digest(empty_digest(info.namespace), segment.prompt()[:first])
        for length in lengths[low:high]:
            digest = extend_digest(digest, info.tokens[num_digested : length - first])
            num_digested = length - first
            for builder in self._by_prefix_digest.get(digest.hexdigest(), {}).values():
                builder.parent_hint = segment.segment_id

    def postpone(self, segment: StoredSegment, seconds: float = 0.0) -> None:
        """Keep a segment out of the tree for `seconds`, and until it can be attached."""
        info = segment.info
        self._unattached[info.segment_id] = segment
        self._by_prefix_digest.setdefault(info.prefix_digest, {})[info.segment_id] = segment
        lengths = self._lengths.setdefault(info.namespace, [])
        index = bisect.bisect_left(lengths, info.prefix_len)
        if lengths[index : index + 1] != [info.prefix_len]:
            lengths.insert(index, info.prefix_len)
        if seconds:
            self._postponed_until[info.segment_id] = time.monotonic() + seconds

    def _take(self, segment_id: str) -> StoredSegment | None:
        segment = self._unattached.pop(segment_id, None)
        if segment is not None:
            siblings = self._by_prefix_digest[segment.info.prefix_digest]
            del siblings[segment_id]
            if not siblings:
                del self._by_prefix_digest[segment.info.prefix_digest]
            if not self._unattached:
                self._lengths.clear()
        return segment

    def forget(self, segment_id: str) -> None:
        """Drop a segment that its server has removed, or that is in the tree."""
        self._take(segment_id)
        self._postponed_until.pop(segment_id, None)
        self._banned.pop(segment_id, None)

    def ban(self, segment_id: str, *, is_purged: bool = False) -> None:
        """Never use a segment again, because it is damaged, has expired or was purged."""
        self._take(segment_id)
        self._banned[segment_id] = is_purged

    def retry(self) -> None:
        """Try periodically to attach the kept segments."""
        if not self._unattached or time.monotonic() < self._next_retry:
            return
        self._search_parents()
        now = time.monotonic()
        self._next_retry = now + _RETRY_SECONDS
        due = (name for name in self._unattached if now >= self._postponed_until.get(name, now))
        for segment_id in list(itertools.islice(due, _MAX_RETRIES)):
            segment = self._take(segment_id)
            assert segment is not None
            self._postponed_until.pop(segment_id, None)
            # If it fails again, it is last in the queue.
            self.add(segment)
            if time.monotonic() - now > _MAX_SECONDS:
                return

    def _search_parents(self) -> None:
        """Continue to search the tree for parents: a parent may be stored under another id than on
        the server of its child, which has lost it since."""
        until = time.monotonic() + _MAX_SECONDS
        for number, segment in enumerate(self._unsearched):
            if segment.segment_id in self._tree:
                self.on_attached(segment)
            if number == _MAX_SEARCHED or time.monotonic() > until:
                return
        self._unsearched = iter(list(self._tree.segments()))

    def ban_unattached(self, namespace: str | None, tokens: Tokens | None, before: float) -> None:
        """Ban segments that belong to a prefix (see `Purge`), or may belong to it, and were written
        by the time `before`, also those reported later; the present ones become `to_remove`."""
        now = time.monotonic()
        self._purged = {purge: at for purge, at in self._purged.items() if now - at < ORDER_SECONDS}
        order = namespace, None if tokens is None else tokens.tobytes(), before
        self._purged[order] = now
        banned = [
            segment
            for segment in self._unattached.values()
            if (tokens is None or segment.segment_id not in self.undecided)
            and _matches_order(order, segment)
            and _matches_order(order, segment, self._tokens_before(segment))
        ]
        for segment in banned:
            self.ban(segment.segment_id, is_purged=True)
        self.to_remove += banned

    def take_duplicates(self) -> Iterator[tuple[StoredSegment, StoredSegment]]:
        """Yield own segments to remove, each with the duplicate of another server that stays."""
        while self._duplicates:
            duplicate, replacement = self._duplicates.pop()
            if (
                duplicate.ready
                and duplicate.segment_id in self._tree
                and replacement.segment_id in self._unattached
            ):
                yield duplicate, replacement

    def _tokens_before(self, segment: StoredSegment) -> Tokens | None:
        """Return the tokens before a segment, from its ancestors; None if one is not known."""
        info, chain, seen = segment.info, [segment], {segment}
        while chain[-1].info.prefix_len and chain[-1].parent_hint not in self._tree:
            parent = self._unattached.get(chain[-1].parent_hint)
            if parent is None or parent in seen:
                return None
            chain.append(parent)
            seen.add(parent)
        attached = self._tree.get(chain[-1].parent_hint) if chain[-1].info.prefix_len else None
        tokens = info.tokens[:0] if attached is None else attached.prompt()
        for link in reversed(chain):
            tokens = tokens[: link.info.prefix_len]
            if link is not segment:
                tokens = np.concatenate([tokens, link.info.tokens])
        is_prefix = prefix_digest(info.namespace, tokens) == info.prefix_digest
        return tokens if is_prefix else None


def _duplicate_key(segment: StoredSegment) -> tuple[object, ...]:
    """Return the properties that duplicates have in common."""
    info = segment.info
    tokens = info.tokens.tobytes()
    return info.prefix_digest, tokens, info.quality, info.priority, info.windows_from


def _matches_order(
    order: _Order, segment: StoredSegment, segment_prefix: Tokens | None = None
) -> bool:
    """Whether an order to purge concerns a segment, by the tokens before it if these are known."""
    namespace, prefix, until = order
    if segment.written > until or namespace not in (None, segment.info.namespace):
        return False
    tokens, length = np.frombuffer(prefix or b"", np.int32), segment.info.prefix_len
    head, tail = tokens[:length], tokens[length:]
    if common_prefix_len(segment.info.tokens, tail) < len(tail):
        return False
    return segment_prefix is None or common_prefix_len(segment_prefix, head) == len(head)


def _sort_key(segment: StoredSegment) -> tuple[bool, int, int, str]:
    """Return the sort key of files: own ones first, then the newest."""
    use = -segment.info.generation, -segment.last_access
    return segment.foreign_dir is not None, *use, segment.segment_id
