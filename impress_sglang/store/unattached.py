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
from impress_sglang.store.prefix_hashes import begun_digest, extended, prefix_digest
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

# Seconds between two attempts to attach segments; per attempt, maximum number of segments tried, of
# segments of the tree searched for a parent, and of seconds for each of both.
_AGAIN_SECONDS, _TRIED_AGAIN, _SEARCHED, _SEARCH_SECONDS = 1.0, 64, 512, 0.002
# Two servers write the same tokens simultaneously if they do so within this time. It is shorter
# than the time for which they do not use a segment that cannot be read.
_AT_ONCE_SECONDS = 30.0

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
        self._unplaced: dict[str, StoredSegment] = {}
        # The same by prefix digest, and their prefix lengths by namespace, ascending; lengths of
        # removed segments may remain.
        self._builders: dict[str, dict[str, StoredSegment]] = {}
        self._lengths: dict[str, list[int]] = {}
        # Times until which segments are not tried, by id.
        self._resting: dict[str, float] = {}
        self._unwanted: set[str] = set()
        # Orders to purge, and their times of arrival: segments reported later may be older.
        self._purged: dict[_Order, float] = {}
        self.late: list[StoredSegment] = []
        """Purged segments that were not in the tree, which the caller removes."""
        self._doubles: list[tuple[StoredSegment, StoredSegment]] = []
        self._again_at = 0.0
        # Segments of the tree that are still to be searched for parents.
        self._search: Iterator[StoredSegment] = iter(())

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
        for segment in sorted(segments, key=_age):
            info = segment.info
            place = info.tokens.tobytes(), info.prefix_digest, info.quality
            if newest.setdefault(place, segment) is not segment:
                older.append(segment)
        # Own segments first: they stay if those of other servers have the same first tokens.
        ordered = list(newest.values())
        ordered.sort(
            key=lambda segment: (
                segment.home is not None,
                segment.info.prefix_len,
                -segment.last_access,
            )
        )
        self._tree.order.now = max((segment.last_access for segment in ordered), default=0)
        digests = _Digests()
        left = [segment for segment in ordered if not self._put_below(segment, digests)]
        for segment in left:
            self.set_aside(segment)
        for segment, digest in digests.items() if left else ():
            self.note_stored(segment, digest)
        rootless = set[str]()
        for segment in sorted(left, key=lambda segment: segment.info.prefix_len):
            before = None if segment.above in rootless else self._tokens_before(segment)
            if before is None:
                # Its descendants cannot be attached either, so a chain of any length is walked
                # once.
                rootless.add(segment.segment_id)
            elif self._tree.insert(segment, before):
                self.forget(segment.segment_id)
                self.note_stored(segment)
        self._tree.order.sort()
        orphans = [segment for segment in self._unplaced.values() if segment.home is None]
        for segment in orphans:
            self.forget(segment.segment_id)
        for segment in older:
            if segment.home is not None:
                self.set_aside(segment)
        return [segment for segment in older if segment.home is None], orphans

    def _put_below(self, segment: StoredSegment, digests: _Digests) -> bool:
        """Attach a segment to its former parent; False if that is unknown, or wrong.

        `digests`: digest of the tokens before each segment of the tree.
        """
        info, above = segment.info, self._tree.get(segment.above)
        if not info.prefix_len:
            above, digest = None, begun_digest(info.namespace)
        elif above is None or not above.info.prefix_len < info.prefix_len <= above.stop:
            return False
        else:
            length = info.prefix_len - above.info.prefix_len
            digest = extended(digests[above], above.info.tokens[:length])
        # The digest includes the namespace.
        same = digest.hexdigest() == info.prefix_digest
        if put := same and self._tree.attach(segment, above):
            digests[segment] = digest
        return put

    def add(self, segment: StoredSegment, *, known: bool = False) -> None:
        """Attach a segment of another server, or keep it until that is possible; not if its tokens
        are `known`, stored under another id, or if it was purged."""
        if segment.segment_id in self._unwanted or (known and not self._purged):
            return
        before = self._tokens_before(segment)
        if before is not None and any(_concerns(purge, segment, before) for purge in self._purged):
            self.refuse(segment.segment_id)
            self.late.append(segment)
            return
        if known:
            return
        # The report counts as a use.
        segment.last_access = min(segment.last_access, 0)
        if before is not None and self._tree.insert(segment, before):
            self.note_stored(segment)
            return
        self.set_aside(segment)
        if before is not None and (double := self._double(segment, before)) is not None:
            self._doubles.append((double, segment))

    def _double(self, segment: StoredSegment, before: Tokens) -> StoredSegment | None:
        """Return this server's segment of the same tokens, if both were written simultaneously and
        this server is to remove its copy: both servers decide by the ids."""
        match = self._tree.match(
            segment.info.namespace,
            np.concatenate([before, segment.info.tokens]),
            least=segment.info.quality,
        )
        other = match.spans[-1].segment if match.spans else segment
        if other.home is not None or other.history is not None or _what(other) != _what(segment):
            return None
        # A later segment may have been written because the other one cannot be read.
        at_once = abs(segment.written - other.written) < _AT_ONCE_SECONDS
        lives = (segment.info.expires or math.inf) >= (other.info.expires or math.inf)
        return other if at_once and lives and segment.segment_id < other.segment_id else None

    def note_stored(self, segment: StoredSegment, digest: hashlib.blake2b | None = None) -> None:
        """Make a new segment of the tree the future parent of kept segments that continue it.

        `digest`: digest of the tokens before it, if the caller has it.
        """
        if not self._unplaced:
            return
        info, first, done = segment.info, segment.info.prefix_len, 0
        lengths = self._lengths.get(info.namespace, [])
        low, high = (bisect.bisect_right(lengths, at) for at in (first, first + info.num_tokens))
        if low == high:
            return
        if digest is None:
            digest = extended(begun_digest(info.namespace), segment.prompt()[:first])
        for length in lengths[low:high]:
            digest = extended(digest, info.tokens[done : length - first])
            done = length - first
            for builder in self._builders.get(digest.hexdigest(), {}).values():
                builder.above = segment.segment_id

    def set_aside(self, segment: StoredSegment, seconds: float = 0.0) -> None:
        """Keep a segment out of the tree for `seconds`, and until it can be attached."""
        info = segment.info
        self._unplaced[info.segment_id] = segment
        self._builders.setdefault(info.prefix_digest, {})[info.segment_id] = segment
        lengths = self._lengths.setdefault(info.namespace, [])
        at = bisect.bisect_left(lengths, info.prefix_len)
        if lengths[at : at + 1] != [info.prefix_len]:
            lengths.insert(at, info.prefix_len)
        if seconds:
            self._resting[info.segment_id] = time.monotonic() + seconds

    def _take(self, segment_id: str) -> StoredSegment | None:
        segment = self._unplaced.pop(segment_id, None)
        if segment is not None:
            same = self._builders[segment.info.prefix_digest]
            del same[segment_id]
            if not same:
                del self._builders[segment.info.prefix_digest]
            if not self._unplaced:
                self._lengths.clear()
        return segment

    def forget(self, segment_id: str) -> None:
        """Drop a segment that its server has removed, or that is in the tree."""
        self._take(segment_id)
        self._resting.pop(segment_id, None)
        self._unwanted.discard(segment_id)

    def refuse(self, segment_id: str) -> None:
        """Never use a segment again, because it is damaged or was purged."""
        self._take(segment_id)
        self._unwanted.add(segment_id)

    def place_again(self) -> None:
        """Try periodically to attach the kept segments."""
        if not self._unplaced or time.monotonic() < self._again_at:
            return
        self._search_places()
        now = time.monotonic()
        self._again_at = now + _AGAIN_SECONDS
        for segment_id in list(itertools.islice(self._unplaced, _TRIED_AGAIN)):
            segment = self._take(segment_id)
            assert segment is not None
            # If it fails again, it is last in the queue.
            if now < self._resting.get(segment_id, now):
                self.set_aside(segment)
            else:
                self._resting.pop(segment_id, None)
                self.add(segment)
            if time.monotonic() - now > _SEARCH_SECONDS:
                return

    def _search_places(self) -> None:
        """Continue to search the tree for parents: a parent may be stored under another id than on
        the server of its child, which has lost it since."""
        until = time.monotonic() + _SEARCH_SECONDS
        for number, segment in enumerate(self._search):
            if segment.segment_id in self._tree:
                self.note_stored(segment)
            if number == _SEARCHED or time.monotonic() > until:
                return
        self._search = iter(list(self._tree.segments()))

    def refuse_unplaced(self, namespace: str | None, tokens: Tokens | None, before: float) -> None:
        """Never use kept segments that belong to a prefix (see `Purge`), or may belong to it, and
        were written by the time `before`, nor those reported later; the former become `late`."""
        now = time.monotonic()
        self._purged = {purge: at for purge, at in self._purged.items() if now - at < ORDER_SECONDS}
        order = namespace, None if tokens is None else tokens.tobytes(), before
        self._purged[order] = now
        found = [
            segment
            for segment in self._unplaced.values()
            if _concerns(order, segment) and _concerns(order, segment, self._tokens_before(segment))
        ]
        for segment in found:
            self.refuse(segment.segment_id)
        self.late += found

    def take_doubles(self) -> Iterator[tuple[StoredSegment, StoredSegment]]:
        """Yield own segments to remove, each with the duplicate of another server that stays."""
        while self._doubles:
            double, other = self._doubles.pop()
            if (
                double.ready
                and double.segment_id in self._tree
                and other.segment_id in self._unplaced
            ):
                yield double, other

    def _tokens_before(self, segment: StoredSegment) -> Tokens | None:
        """Return the tokens before a segment, from its ancestors; None if one is not known."""
        info, chain, seen = segment.info, [segment], {segment}
        while chain[-1].info.prefix_len and chain[-1].above not in self._tree:
            above = self._unplaced.get(chain[-1].above)
            if above is None or above in seen:
                return None
            chain.append(above)
            seen.add(above)
        known = self._tree.get(chain[-1].above) if chain[-1].info.prefix_len else None
        tokens = info.tokens[:0] if known is None else known.prompt()
        for link in reversed(chain):
            tokens = tokens[: link.info.prefix_len]
            if link is not segment:
                tokens = np.concatenate([tokens, link.info.tokens])
        same = prefix_digest(info.namespace, tokens) == info.prefix_digest
        return tokens if same else None


def _what(segment: StoredSegment) -> tuple[object, ...]:
    """Return the properties that duplicates have in common."""
    info = segment.info
    tokens = info.tokens.tobytes()
    return info.prefix_digest, tokens, info.quality, info.priority, info.windows_from


def _concerns(order: _Order, segment: StoredSegment, before: Tokens | None = None) -> bool:
    """Whether an order to purge concerns a segment; `before`: tokens before it, None if unknown."""
    namespace, prefix, until = order
    if segment.written > until or namespace not in (None, segment.info.namespace):
        return False
    tokens, length = np.frombuffer(prefix or b"", np.int32), segment.info.prefix_len
    head, rest = tokens[:length], tokens[length:]
    if common_prefix_len(segment.info.tokens, rest) < len(rest):
        return False
    return before is None or common_prefix_len(before, head) == len(head)


def _age(segment: StoredSegment) -> tuple[bool, int, int, str]:
    """Return the sort key of files: own ones first, then the newest."""
    use = -segment.info.generation, -segment.last_access
    return segment.home is not None, *use, segment.segment_id
