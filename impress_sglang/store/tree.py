"""The tree of stored prefixes: which segments hold the KVs of a token sequence.

A radix tree per namespace (SGLang's `extra_key` and `cache_salt`), whose nodes are segments: others
may branch off at any of its tokens, which moves no data. KVs of the same tokens in different
qualities are different children, so that they are never mixed unnoticed.

What others build on of a segment that has lost its file stays in the tree as a hole, a lost segment
of its own. It is filled, perhaps in part, when its tokens are stored again.

Invariants (`check`):
  * a segment is a child of its parent, at that of the parent's tokens at which it begins;
  * `dependents` counts the children;
  * no segment leaves the disk at a lower level than what hangs below it;
  * something hangs below the last token of a hole;
  * no segment is of better quality than the one above it.
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

# Of how many states of a match it is asked whether they may be read.
_MOST_STATES = 256


class StoredTree:
    """Finds and keeps stored prefixes; not thread-safe, one thread owns it."""

    def __init__(self, content: ContentIndex | None = None, ttl: float = 0.0) -> None:
        """Begin with an empty tree.

        `content` is kept in step with it; None: tokens are found behind their prefix only. `ttl` is
        in how many seconds segments expire that have no shorter time; 0: never.
        """
        self.content = content
        # By namespace, what begins with the first token of a prompt.
        self._roots: dict[str, Children] = {}
        self._segments: dict[str, StoredSegment] = {}
        self.file_bytes = 0
        """Bytes of the files of all segments, including those that are being written."""
        self.held = Counter[str]()
        """The part of them that each namespace has; no value is 0."""
        self.order = EvictionOrder(ttl)
        """The order in which segments were used."""

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, segment_id: str) -> bool:
        return segment_id in self._segments

    def get(self, segment_id: str) -> StoredSegment | None:
        """The segment of this name; None if it is not in the tree."""
        return self._segments.get(segment_id)

    def segments(self) -> Iterator[StoredSegment]:
        """All segments, ready or not."""
        return iter(self._segments.values())

    def match(
        self,
        namespace: str,
        tokens: Tokens,
        *,
        least: Quality = EXACT,
        only_ready: bool = True,
    ) -> StoredMatch:
        """The longest stored prefix of `tokens`. O(len(tokens)); changes nothing.

        Of children that begin with the same token, the best one is followed, if it suffices. The
        match ends before a segment that cannot be read, unless `only_ready` is False.
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
        """How many tokens of a match are before each state that may be read now, the last first.

        Only the last ones are looked at: requests wait meanwhile.
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
        """The state where a match ends, if there is one that may be read now."""
        if not match.spans:
            return ()
        last = match.spans[-1]
        return _state_at(last.segment, last.segment.info.prefix_len + last.stop, time.time())

    def below(self, namespace: str | None, prefix: Tokens | None = None) -> Iterator[StoredSegment]:
        """Segments that have the end of a prefix or tokens behind it, in all qualities.

        A segment comes after those that build on it. `namespace`, `prefix`: None for all. Segments
        are found lazily, so the first ones cost the same however many follow; the tree must not
        change meanwhile.
        """
        prefix = np.empty(0, np.int32) if prefix is None else prefix
        for name in self._roots if namespace is None else (namespace,):
            for end in self._ends(name, prefix):
                # Each segment on the way down, with those that build on it and are still to come.
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
        """Segments that have the last token of a prefix, in all qualities, also lost ones."""
        return {end for end in self._ends(namespace, prefix) if end is not None}

    def on_top(self, segment: StoredSegment) -> Iterator[StoredSegment]:
        """Segments that build directly on one; found lazily, as by `below`."""
        return _each(segment.children)

    def touch(self, match: StoredMatch) -> None:
        """Count an access to every segment of a match, and to the state behind it."""
        spans = (*match.spans, *self.state_behind(match))
        if spans:
            self.order.note(spans[-1].segment)
        for span in spans:
            span.segment.hits += 1

    def insert(self, segment: StoredSegment, prefix: Tokens) -> bool:
        """Attach a segment after the tokens `prefix`; False if that prefix is not in the tree.

        Any path of these tokens will do whose quality suffices for the segment; see `attach`.
        """
        assert segment.info.prefix_len == len(prefix)
        ends = self._ends(segment.info.namespace, prefix, segment.info.quality)
        return any(self.attach(segment, above) for above in ends)

    def attach(self, segment: StoredSegment, above: StoredSegment | None) -> bool:
        """Attach a segment to one that has the tokens before it, None: there are none.

        Holes of its quality along its first tokens are filled, the last one perhaps only in part.
        It is refused if its other tokens begin like stored ones of its quality there, or if those
        above are of too bad quality: the caller matches first and stores only new tokens.
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
        """Give a segment another file with the same tokens, which is one of ours."""
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
        """Mark a segment as lost: it has no file any more.

        Of its tokens those that others build on become a hole. Holes above it that nothing builds
        on then leave the tree.
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
        """Check that a segment has its place in the tree.

        The time does not depend on how many segments build on it, unless it is a hole.
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
        """What goes on behind `stop` tokens of a prompt as a segment does, in the same quality:
        `above` or one that builds on it."""
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
        """Let what has built on one segment build on another."""
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
        """Put a segment, with what builds on it, into the tree."""
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
        """Take a segment out of the tree, but not what builds on it."""
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
        """Count bytes of the file of a segment, perhaps fewer than 0."""
        self.file_bytes += more
        self.held[segment.info.namespace] += more
        if not self.held[segment.info.namespace]:
            del self.held[segment.info.namespace]

    def _dig(
        self, old: StoredSegment, start: int, children: Children, above: StoredSegment | None
    ) -> None:
        """Make a hole of the tokens of a lost segment that come after `start` tokens of a prompt,
        and that `children` build on."""
        if not children:
            return
        info, first = old.info, old.info.prefix_len
        info = dataclasses.replace(
            info,
            segment_id=uuid.uuid4().hex,
            # No file needs it: whoever fills the hole knows all tokens before it.
            prefix_digest="",
            prefix_len=start,
            tokens=info.tokens[start - first : max(children) - first],
            generation=0,
        )
        hole = StoredSegment(info, 0, SegmentState.LOST, last_access=old.last_access, hits=old.hits)
        self._adopt(hole, children)
        self._join(hole, above)

    def _split(self, hole: StoredSegment, stop: int) -> None:
        """Make two of a hole that goes on behind `stop` tokens of a prompt."""
        behind = {at: child for at, child in hole.children.items() if at > stop}
        for at in behind:
            del hole.children[at]
        del hole.states[bisect.bisect_right(hole.states, stop) :]
        self._dig(hole, stop, behind, hole)
        _shorten(hole)

    def _ends(
        self, namespace: str, prefix: Tokens, least: Quality | None = None
    ) -> Iterator[StoredSegment | None]:
        """Segments that have the last token of a prefix, best paths first; None for no tokens.

        A match follows the best child only; what was stored before that one existed is on others.
        `least`: None for all qualities, also behind holes.
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
    """The state behind so many tokens of a prompt, of which a segment has the last, if there is one
    that may be read now."""
    state = next(_choices(segment.children, place, STATE_TOKEN, EXACT), None)
    if state is None or not state.may_be_read(now):
        return ()
    return (StoredSpan(state, 0, state.info.num_tokens),)


def _shorten(hole: StoredSegment) -> None:
    """Let a hole end where the last one begins that builds on it."""
    length = max(hole.children) - hole.info.prefix_len
    hole.info = dataclasses.replace(hole.info, tokens=hole.info.tokens[:length])


def _choices(
    children: Children, place: int, token: int, least: Quality | None
) -> Iterator[StoredSegment]:
    """Children that begin with a token and suffice, best first; `least`: None for all.

    A hole of better quality is left out: it cannot be read, and worse KVs cannot fill it.
    """
    for child in children.get(place, {}).get(token, ()):
        quality = child.info.quality
        # The usual case, in which both are exact, is decided first.
        if (
            quality is least
            or quality == least
            or least is None
            or (not child.lost and quality.suffices(least))
        ):
            yield child


def _each(children: Children, first: int = 0) -> Iterator[StoredSegment]:
    """Segments that come after `first` tokens of a prompt or later."""
    places = (child for at, child in children.items() if at >= first)
    return itertools.chain.from_iterable(same for tokens in places for same in tokens.values())
