"""Where segments belong in the tree that an earlier process has left, or other servers have stored.

A segment names its place by what it builds on and by the digest of all tokens before it. As long as
that is not in the tree, or others that begin like it are there, it is kept and tried again.
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

# Seconds between two attempts to place what has no place, how many are tried, in how many segments
# of the tree a place is looked for, and for how long each.
_AGAIN_SECONDS, _TRIED_AGAIN, _SEARCHED, _SEARCH_SECONDS = 1.0, 64, 512, 0.002
# What two servers have written within so many seconds, they have written at once. Less than for how
# long they do not use what they cannot read.
_AT_ONCE_SECONDS = 30.0

_Order: TypeAlias = tuple[str | None, bytes | None, float]
"""What is purged: namespace or all, the bytes of a prefix or all of it, written until when."""
_Digests: TypeAlias = dict[StoredSegment, hashlib.blake2b]


class UnattachedSegments:
    """Finds places, and has the segments without one, and the names of those that are not wanted;
    the store's thread owns it."""

    def __init__(self, tree: StoredTree) -> None:
        self._tree = tree
        self._unplaced: dict[str, StoredSegment] = {}
        # The same by the digest of what they build on, and how long that is in each namespace,
        # ascending; there may be lengths of some that have gone.
        self._builders: dict[str, dict[str, StoredSegment]] = {}
        self._lengths: dict[str, list[int]] = {}
        # Until when some of these are not tried.
        self._resting: dict[str, float] = {}
        self._unwanted: set[str] = set()
        # Orders to purge, and when they were heard: what is told later may be of before them.
        self._purged: dict[_Order, float] = {}
        self.late: list[StoredSegment] = []
        """What was purged and had no place in the tree: it has to be removed."""
        self._doubles: list[tuple[StoredSegment, StoredSegment]] = []
        self._again_at = 0.0
        # Those of the tree in which a place has not been looked for yet.
        self._search: Iterator[StoredSegment] = iter(())

    def restore(
        self, segments: Iterable[StoredSegment]
    ) -> tuple[list[StoredSegment], list[StoredSegment]]:
        """Put segments of an earlier process, and of other servers, into an empty tree.

        What a segment was attached to is tried first; if the digest disagrees, all paths of the
        right lengths are digested.

        Returns, of our own, those of which a newer file has the same tokens in the same place, as
        a crash may leave, and those whose place was not found: a segment above them is gone, or one
        that was used later has their place.
        """
        newest, older = dict[object, StoredSegment](), list[StoredSegment]()
        for segment in sorted(segments, key=_age):
            info = segment.info
            place = info.tokens.tobytes(), info.prefix_digest, info.quality
            if newest.setdefault(place, segment) is not segment:
                older.append(segment)
        # Those of other servers come last: where they begin like own ones, these stay.
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
                # Nor can what builds on it have any: however long, a chain is walked once.
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
        """Put a segment where it was; False if that is unknown, or wrong. `digests`: of the tokens
        before each segment of the tree."""
        info, above = segment.info, self._tree.get(segment.above)
        if not info.prefix_len:
            above, digest = None, begun_digest(info.namespace)
        elif above is None or not above.info.prefix_len < info.prefix_len <= above.stop:
            return False
        else:
            length = info.prefix_len - above.info.prefix_len
            digest = extended(digests[above], above.info.tokens[:length])
        # A namespace is part of the digest.
        same = digest.hexdigest() == info.prefix_digest
        if put := same and self._tree.attach(segment, above):
            digests[segment] = digest
        return put

    def add(self, segment: StoredSegment, *, known: bool = False) -> None:
        """Put a segment of another server into the tree, or keep it until there is a place; not
        if it is `known` by another name, or was purged."""
        if segment.segment_id in self._unwanted or (known and not self._purged):
            return
        before = self._tokens_before(segment)
        if before is not None and any(_concerns(purge, segment, before) for purge in self._purged):
            self.refuse(segment.segment_id)
            self.late.append(segment)
            return
        if known:
            return
        # Being told of counts as a use.
        segment.last_access = min(segment.last_access, 0)
        if before is not None and self._tree.insert(segment, before):
            self.note_stored(segment)
            return
        self.set_aside(segment)
        if before is not None and (double := self._double(segment, before)) is not None:
            self._doubles.append((double, segment))

    def _double(self, segment: StoredSegment, before: Tokens) -> StoredSegment | None:
        """What this server has written of the same tokens at the same time, and should remove; None
        if there is no such thing."""
        match = self._tree.match(
            segment.info.namespace,
            np.concatenate([before, segment.info.tokens]),
            least=segment.info.quality,
        )
        other = match.spans[-1].segment if match.spans else segment
        if other.home is not None or other.history is not None or _what(other) != _what(segment):
            return None
        # What was written later may be there because the other one cannot be read.
        at_once = abs(segment.written - other.written) < _AT_ONCE_SECONDS
        lives = (segment.info.expires or math.inf) >= (other.info.expires or math.inf)
        return other if at_once and lives and segment.segment_id < other.segment_id else None

    def note_stored(self, segment: StoredSegment, digest: hashlib.blake2b | None = None) -> None:
        """Let what has no place build on a new segment of the tree, if it has the right tokens;
        `digest`: of the tokens before it, if at hand."""
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
        """Keep a segment out of the tree until there is a place, and for so many seconds."""
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
        """Forget a segment whose server has removed it."""
        self._take(segment_id)
        self._resting.pop(segment_id, None)
        self._unwanted.discard(segment_id)

    def refuse(self, segment_id: str) -> None:
        """Never use a segment again: it is damaged, or must not be served."""
        self._take(segment_id)
        self._unwanted.add(segment_id)

    def place_again(self) -> None:
        """Try again, now and then, to place what had no place."""
        if not self._unplaced or time.monotonic() < self._again_at:
            return
        self._search_places()
        now = time.monotonic()
        self._again_at = now + _AGAIN_SECONDS
        for segment_id in list(itertools.islice(self._unplaced, _TRIED_AGAIN)):
            segment = self._take(segment_id)
            assert segment is not None
            # Behind the others, if it fails again.
            if now < self._resting.get(segment_id, now):
                self.set_aside(segment)
            else:
                self._resting.pop(segment_id, None)
                self.add(segment)
            if time.monotonic() - now > _SEARCH_SECONDS:
                return

    def _search_places(self) -> None:
        """Look on for a place in the tree: what a segment builds on may be there by another name
        than its server's, which has lost it since."""
        until = time.monotonic() + _SEARCH_SECONDS
        for number, segment in enumerate(self._search):
            if segment.segment_id in self._tree:
                self.note_stored(segment)
            if number == _SEARCHED or time.monotonic() > until:
                return
        self._search = iter(list(self._tree.segments()))

    def refuse_unplaced(self, namespace: str | None, tokens: Tokens | None, before: float) -> None:
        """Never use the segments without a place that belong to a prefix (see `Purge`), or may do,
        and were written by then, also those told of later; they are `late`, too."""
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
        """What this server should remove, each with what another has, which is to be used."""
        while self._doubles:
            double, other = self._doubles.pop()
            if (
                double.ready
                and double.segment_id in self._tree
                and other.segment_id in self._unplaced
            ):
                yield double, other

    def _tokens_before(self, segment: StoredSegment) -> Tokens | None:
        """The tokens before a segment, by what it builds on; None if that is not known."""
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
    """What segments have in common that may stand for each other."""
    info = segment.info
    tokens = info.tokens.tobytes()
    return info.prefix_digest, tokens, info.quality, info.priority, info.windows_from


def _concerns(order: _Order, segment: StoredSegment, before: Tokens | None = None) -> bool:
    """Whether an order to purge concerns a segment behind these tokens; None: unknown ones."""
    namespace, prefix, until = order
    if segment.written > until or namespace not in (None, segment.info.namespace):
        return False
    tokens, length = np.frombuffer(prefix or b"", np.int32), segment.info.prefix_len
    head, rest = tokens[:length], tokens[length:]
    if common_prefix_len(segment.info.tokens, rest) < len(rest):
        return False
    return before is None or common_prefix_len(before, head) == len(head)


def _age(segment: StoredSegment) -> tuple[bool, int, int, str]:
    """Sort key of files: own ones first, then the newest."""
    use = -segment.info.generation, -segment.last_access
    return segment.home is not None, *use, segment.segment_id
