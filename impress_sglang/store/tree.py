"""The tree of stored prefixes: maps token sequences to the segments that hold their KVs.

A radix tree per namespace (SGLang's `extra_key` and `cache_salt`), whose nodes are segments.
Children may branch off at any token of a segment, which moves no data. KVs of the same tokens in
different qualities are different children, so that they are never mixed unnoticed.

When a segment loses its file, the tokens before its last child stay in the tree as a tombstone, a
new segment in state `LOST`. When its tokens are stored again, it is filled, perhaps in part.

Invariants (`check`):
  * a segment is a child of its parent, at the parent's token at which it begins;
  * `dependents` counts the children;
  * no segment has a lower level than its children;
  * a tombstone has a child after its last token;
  * no segment is of better quality than its parent.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Iterator

import numpy as np

from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import (
    STATE_TOKEN,
    SegmentInfo,
    Tokens,
    common_prefix_len,
)
from impress_sglang.store.content import ContentIndex
from impress_sglang.store.eviction_order import EvictionOrder
from impress_sglang.store.stored import (
    Children,
    SegmentState,
    StoredMatch,
    StoredSegment,
    StoredSpan,
)

# Number of recurrent states of a match that are considered.
_MOST_STATES = 256


class StoredTree:
    """Finds and keeps stored prefixes; not thread-safe."""

    def __init__(self, content: ContentIndex | None = None, ttl: float = 0.0) -> None:
        """Create an empty tree.

        `content`: index that gets all segments of the tree; None to find tokens only after their
        prefix. `ttl`: seconds after which all segments expire, unless they do earlier; 0: never.
        """
        self.content = content
        # Segments at the start of a prompt, by namespace.
        self._roots: dict[str, Children] = {}
        self._segments: dict[str, StoredSegment] = {}
        self.file_bytes = 0
        """Bytes of the files of all segments, including those that are being written."""
        self.held = Counter[str]()
        """The same per namespace; no value is 0."""
        self.order = EvictionOrder(ttl)

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, segment_id: str) -> bool:
        return segment_id in self._segments

    def get(self, segment_id: str) -> StoredSegment | None:
        return self._segments.get(segment_id)

    def segments(self) -> Iterator[StoredSegment]:
        return iter(self._segments.values())

    def match(
        self,
        namespace: str,
        tokens: Tokens,
        *,
        least: Quality = EXACT,
        only_ready: bool = True,
    ) -> StoredMatch:
        """Return the longest stored prefix of `tokens`, in O(len(tokens)); changes nothing.

        Among children with the same first token, the best one is followed, if its quality is at
        least `least`. The match ends before a segment that cannot be read, unless `only_ready` is
        False.
        """
        spans, position, now = list[StoredSpan](), 0, time.time()
        children = self._roots.get(namespace, {})
        while position < len(tokens):
            segment = next(_choices(children, position, int(tokens[position]), least), None)
            if segment is None or (only_ready and not segment.may_be_read(now)):
                break
            length = common_prefix_len(segment.info.tokens, tokens[position:])
            spans.append(StoredSpan(segment, 0, length))
            children, position = segment.children, position + length
        return StoredMatch(tuple(spans))

    def states_in(self, match: StoredMatch) -> Iterator[int]:
        """Yield the prefix lengths of readable states in a match, descending.

        Only the last `_MOST_STATES` states are considered, because requests wait meanwhile.
        """
        now, left = time.time(), _MOST_STATES
        for span in reversed(match.spans):
            states = span.segment.states
            stop = bisect.bisect_right(states, span.segment.info.prefix_len + span.stop)
            last = states[max(stop - left, 0) : stop]
            left -= len(last)
            for place in reversed(last):
                if _state_at(span.segment, place, now):
                    yield place

    def state_behind(self, match: StoredMatch) -> tuple[StoredSpan, ...]:
        """Return the state at the end of a match, if one is stored and can be read now."""
        if not match.spans:
            return ()
        last = match.spans[-1]
        return _state_at(last.segment, last.segment.info.prefix_len + last.stop, time.time())

    def below(self, namespace: str | None, prefix: Tokens | None = None) -> Iterator[StoredSegment]:
        """Yield the segments that have the end of a prefix or tokens after it, in all qualities.

        A segment comes after its descendants. `namespace`, `prefix`: None for all. Segments are
        found lazily, so the time of the first ones does not depend on their number; the tree must
        not change meanwhile.
        """
        prefix = np.empty(0, np.int32) if prefix is None else prefix
        for name in self._roots if namespace is None else (namespace,):
            for end in self._ends(name, prefix):
                # The segments on the path, each with its children that are still to come.
                stack = [(end, _each(self._below(name, end), len(prefix)))]
                while stack:
                    segment, children = stack[-1]
                    if (child := next(children, None)) is not None:
                        stack.append((child, _each(child.children)))
                        continue
                    stack.pop()
                    if segment is not None:
                        yield segment

    def ends(self, namespace: str, prefix: Tokens) -> set[StoredSegment]:
        """Return the segments that have the last token of a prefix, in all qualities and states."""
        return {end for end in self._ends(namespace, prefix) if end is not None}

    def on_top(self, segment: StoredSegment) -> Iterator[StoredSegment]:
        """Yield the children of a segment lazily, as `below`."""
        return _each(segment.children)

    def touch(self, match: StoredMatch) -> None:
        """Count a use of every segment of a match, and of the state at its end."""
        spans = (*match.spans, *self.state_behind(match))
        if spans:
            self.order.note(spans[-1].segment)
        for span in spans:
            span.segment.hits += 1

    def insert(self, segment: StoredSegment, prefix: Tokens) -> bool:
        """Attach a segment after the tokens `prefix`; False if that prefix is not in the tree.

        It is attached to any path of these tokens whose quality suffices; see `attach`.
        """
        assert segment.info.prefix_len == len(prefix)
        ends = self._ends(segment.info.namespace, prefix, segment.info.quality)
        return any(self.attach(segment, above) for above in ends)

    def attach(self, segment: StoredSegment, above: StoredSegment | None) -> bool:
        """Attach a segment to one that has the token before it, or None at the start of a prompt.

        Tombstones of its quality along its first tokens are filled, the last one perhaps only in
        part. Returns False if the next token is already stored there in its quality, or if the
        quality of `above` does not suffice: the caller matches first and stores only new tokens.
        """
        info, holes = segment.info, list[StoredSegment]()
        if info.segment_id in self._segments:
            return False
        if above is not None and not above.info.quality.suffices(info.quality):
            return False
        stop, last = info.prefix_len, above
        if above is not None and above.lost:
            self._split(above, stop)
        while (last := self._alike(segment, stop, last)) is not None:
            if not last.lost:
                return False
            stop += common_prefix_len(last.info.tokens, info.tokens[stop - info.prefix_len :])
            self._split(last, stop)
            holes.append(last)
        for hole in holes:
            self._leave(hole)
            self._adopt(segment, hole.children)
        self._join(segment, above)
        self.order.add(segment)
        return True

    def replace(self, segment: StoredSegment, info: SegmentInfo, file_bytes: int) -> None:
        """Give a segment another file with the same tokens, in this server's folder."""
        assert np.array_equal(segment.info.tokens, info.tokens)
        renamed = info.segment_id != segment.segment_id
        del self._segments[segment.segment_id]
        assert info.segment_id not in self._segments
        self._segments[info.segment_id] = segment
        self._count(segment, file_bytes - segment.file_bytes)
        segment.info, segment.file_bytes, segment.home = info, file_bytes, None
        for changed in (segment, *(self.on_top(segment) if renamed else ())):
            self.order.change(changed)

    def lose(self, segment: StoredSegment) -> None:
        """Remove a segment that has lost its file.

        Its tokens before its last child become a tombstone. Tombstones above it that are left
        without children are removed from the tree.
        """
        segment.state, above = SegmentState.LOST, segment.parent
        self._leave(segment)
        self._dig(segment, segment.info.prefix_len, segment.children, above)
        while above is not None and above.lost and not above.children:
            self._leave(above)
            above = above.parent
        if above is not None and above.lost and above.stop not in above.children:
            _shorten(above)
        self.order.settle(above)

    def check(self, segment: StoredSegment) -> None:
        """Check a segment's place in the tree.

        The time does not depend on the number of its children, unless it is a tombstone.
        """
        info, above = segment.info, segment.parent
        assert self._segments[segment.segment_id] is segment
        place = self._below(info.namespace, above).get(info.prefix_len, {})
        same = place.get(int(info.tokens[0]), ())
        assert segment in same and len({other.info.quality for other in same}) == len(same)
        if segment.lost:
            assert max(segment.children, default=0) == segment.stop
        if above is None:
            assert not info.prefix_len
        else:
            assert self._segments[above.segment_id] is above
            assert above.info.prefix_len < info.prefix_len <= above.stop
            assert above.info.namespace == info.namespace
            assert above.info.quality.suffices(info.quality)
        self.order.check(segment)

    def _below(self, namespace: str, above: StoredSegment | None) -> Children:
        return self._roots.get(namespace, {}) if above is None else above.children

    def _alike(
        self, segment: StoredSegment, stop: int, above: StoredSegment | None
    ) -> StoredSegment | None:
        """Return the segment that has the same token after `stop` tokens of a prompt as a new one,
        in the same quality: `above` or one of its children."""
        info = segment.info
        if stop == segment.stop:
            return None
        token = info.tokens[stop - info.prefix_len]
        found = list(self._below(info.namespace, above).get(stop, {}).get(int(token), ()))
        if above is not None and stop < above.stop:
            following = above.info.tokens[stop - above.info.prefix_len]
            found += [above] if following == token else []
        return next((child for child in found if child.info.quality == info.quality), None)

    def _adopt(self, above: StoredSegment, children: Children) -> None:
        """Make the children of one segment children of another."""
        above.children |= children
        states = (at for at, place in children.items() if STATE_TOKEN in place)
        above.states = sorted([*above.states, *states])
        for child in _each(children):
            assert child.parent is not None
            child.parent.dependents[child.level] -= 1
            child.parent = above
            above.dependents[child.level] += 1
            self.order.change(child)

    def _join(self, segment: StoredSegment, above: StoredSegment | None) -> None:
        """Put a segment, with its children, into the tree."""
        info = segment.info
        segment.parent, segment.level = above, segment.own_level
        if above is None:
            children = self._roots.setdefault(info.namespace, {})
        else:
            children = above.children
            above.dependents[segment.level] += 1
        place, token = children.setdefault(info.prefix_len, {}), int(info.tokens[0])
        if above is not None and token == STATE_TOKEN and token not in place:
            bisect.insort(above.states, info.prefix_len)
        same = place.setdefault(token, [])
        same.append(segment)
        same.sort(key=lambda other: other.info.quality.rank)
        self._segments[info.segment_id] = segment
        self._count(segment, segment.file_bytes)
        if self.content is not None and not segment.lost:
            self.content.add(segment)

    def _leave(self, segment: StoredSegment) -> None:
        """Take a segment out of the tree, but not its children."""
        info, above = segment.info, segment.parent
        del self._segments[info.segment_id]
        children, token = self._below(info.namespace, above), int(info.tokens[0])
        place = children[info.prefix_len]
        place[token].remove(segment)
        if not place[token]:
            del place[token]
            if above is not None and token == STATE_TOKEN:
                del above.states[bisect.bisect_left(above.states, info.prefix_len)]
        if not place:
            del children[info.prefix_len]
        if above is not None:
            above.dependents[segment.level] -= 1
        elif not children:
            del self._roots[info.namespace]
        self._count(segment, -segment.file_bytes)
        if self.content is not None:
            self.content.discard(segment)
        self.order.remove(segment)

    def _count(self, segment: StoredSegment, more: int) -> None:
        self.file_bytes += more
        self.held[segment.info.namespace] += more
        if not self.held[segment.info.namespace]:
            del self.held[segment.info.namespace]

    def _dig(
        self, old: StoredSegment, start: int, children: Children, above: StoredSegment | None
    ) -> None:
        """Make a tombstone of the tokens of a lost segment from position `start` of the prompt to
        its last child in `children`, if it has any."""
        if not children:
            return
        info, first = old.info, old.info.prefix_len
        info = dataclasses.replace(
            info,
            segment_id=uuid.uuid4().hex,
            # Not needed without a file: a segment that fills it comes with all tokens before it.
            prefix_digest="",
            prefix_len=start,
            tokens=info.tokens[start - first : max(children) - first],
            generation=0,
        )
        hole = StoredSegment(info, 0, SegmentState.LOST, last_access=old.last_access, hits=old.hits)
        self._adopt(hole, children)
        self._join(hole, above)

    def _split(self, hole: StoredSegment, stop: int) -> None:
        """Split a tombstone that continues after `stop` tokens of a prompt."""
        behind = {at: child for at, child in hole.children.items() if at > stop}
        for at in behind:
            del hole.children[at]
        del hole.states[bisect.bisect_right(hole.states, stop) :]
        self._dig(hole, stop, behind, hole)
        _shorten(hole)

    def _ends(
        self, namespace: str, prefix: Tokens, least: Quality | None = None
    ) -> Iterator[StoredSegment | None]:
        """Yield the segments that have the last token of a prefix, best paths first; None for an
        empty prefix.

        A match follows only the best child; segments stored before it existed are on other paths.
        `least`: None for all qualities, also after tombstones.
        """
        stack: list[tuple[StoredSegment | None, int]] = [(None, 0)]
        while stack:
            above, stop = stack.pop()
            if stop == len(prefix):
                yield above
            children = self._below(namespace, above)
            for place in sorted(at for at in children if at <= stop and at < len(prefix)):
                for child in reversed(list(_choices(children, place, int(prefix[place]), least))):
                    length = common_prefix_len(child.info.tokens, prefix[place:])
                    stack.append((child, place + length))


def _state_at(segment: StoredSegment, place: int, now: float) -> tuple[StoredSpan, ...]:
    """Return the state after `place` tokens of a prompt, the last of which a segment has, if one is
    stored and can be read now."""
    state = next(_choices(segment.children, place, STATE_TOKEN, EXACT), None)
    if state is None or not state.may_be_read(now):
        return ()
    return (StoredSpan(state, 0, state.info.num_tokens),)


def _shorten(hole: StoredSegment) -> None:
    """Let a tombstone end where its last child begins."""
    length = max(hole.children) - hole.info.prefix_len
    hole.info = dataclasses.replace(hole.info, tokens=hole.info.tokens[:length])


def _choices(
    children: Children, place: int, token: int, least: Quality | None
) -> Iterator[StoredSegment]:
    """Yield the children with this first token and at least this quality, best first; `least`: None
    for all.

    A tombstone of better quality is left out: it cannot be read, and worse KVs cannot fill it.
    """
    for child in children.get(place, {}).get(token, ()):
        quality = child.info.quality
        # The common case, in which both are exact, is decided first.
        if (
            quality is least
            or quality == least
            or least is None
            or (not child.lost and quality.suffices(least))
        ):
            yield child


def _each(children: Children, first: int = 0) -> Iterator[StoredSegment]:
    """Yield the children after `first` tokens of a prompt or later."""
    places = (child for at, child in children.items() if at >= first)
    return itertools.chain.from_iterable(same for tokens in places for same in tokens.values())
