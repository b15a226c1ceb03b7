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
from collections.abc import Container, Iterator

import numpy as np

from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import STATE_TOKEN, SegmentInfo, Tokens, common_prefix_len
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
_MAX_STATES = 256


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
        self.bytes_by_namespace = Counter[str]()
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

    def without(self, segment_ids: Container[str]) -> list[StoredSegment]:
        """Return all segments but these, without a look at these."""
        return [self._segments[name] for name in self._segments if name not in segment_ids]

    def match(
        self,
        namespace: str,
        tokens: Tokens,
        *,
        min_quality: Quality = EXACT,
        only_ready: bool = True,
    ) -> StoredMatch:
        """Return the longest stored prefix of `tokens`, in O(len(tokens)); changes nothing.

        Among children with the same first token, the best one is followed, if its quality suffices.
        The match ends before a segment that cannot be read, unless `only_ready` is False.
        """
        spans, position, now = list[StoredSpan](), 0, time.time()
        children = self._roots.get(namespace, {})
        while position < len(tokens):
            segment = next(
                _children_for(children, position, int(tokens[position]), min_quality), None
            )
            if segment is None or (only_ready and not segment.may_be_read(now)):
                break
            length = common_prefix_len(segment.info.tokens, tokens[position:])
            spans.append(StoredSpan(segment, 0, length))
            children, position = segment.children, position + length
        return StoredMatch(tuple(spans))

    def state_positions(self, match: StoredMatch) -> Iterator[int]:
        """Yield the prefix lengths of readable states in a match, descending.

        Only the last `_MAX_STATES` states are considered, because requests wait meanwhile.
        """
        now, num_left = time.time(), _MAX_STATES
        for span in reversed(match.spans):
            states = span.segment.states
            stop = bisect.bisect_right(states, span.segment.info.prefix_len + span.stop)
            last_states = states[max(stop - num_left, 0) : stop]
            num_left -= len(last_states)
            for position in reversed(last_states):
                if _state_at(span.segment, position, now):
                    yield position

    def end_state_of(self, match: StoredMatch) -> tuple[StoredSpan, ...]:
        """Return the state at the end of a match, if one is stored and can be read now."""
        if not match.spans:
            return ()
        last = match.spans[-1]
        return _state_at(last.segment, last.segment.info.prefix_len + last.stop, time.time())

    def subtree(
        self, namespace: str | None, prefix: Tokens | None = None
    ) -> Iterator[StoredSegment]:
        """Yield the segments that have the end of a prefix or tokens after it, in all qualities.

        A segment comes after its descendants. `namespace`, `prefix`: None for all. Segments are
        found lazily, so the time of the first ones does not depend on their number; the tree must
        not change meanwhile.
        """
        prefix = np.empty(0, np.int32) if prefix is None else prefix
        for name in self._roots if namespace is None else (namespace,):
            for end in self._ends(name, prefix):
                # The segments on the path, each with its children that are still to come.
                stack = [(end, _children_from(self._children_of(name, end), len(prefix)))]
                while stack:
                    segment, children = stack[-1]
                    if (child := next(children, None)) is not None:
                        stack.append((child, _children_from(child.children)))
                        continue
                    stack.pop()
                    if segment is not None:
                        yield segment

    def ends(self, namespace: str, prefix: Tokens) -> set[StoredSegment]:
        """Return the segments that have the last token of a prefix, in all qualities and states."""
        return {end for end in self._ends(namespace, prefix) if end is not None}

    def children_of(self, segment: StoredSegment) -> Iterator[StoredSegment]:
        """Yield the children of a segment lazily, as `subtree`."""
        return _children_from(segment.children)

    def touch(self, match: StoredMatch) -> None:
        """Count a use of every segment of a match, and of the state at its end."""
        spans = (*match.spans, *self.end_state_of(match))
        if spans:
            self.order.count_use(spans[-1].segment)
        for span in spans:
            span.segment.hits += 1

    def insert(self, segment: StoredSegment, prefix: Tokens) -> bool:
        """Attach a segment after the tokens `prefix`; False if that prefix is not in the tree.

        It is attached to any path of these tokens whose quality suffices; see `attach`.
        """
        assert segment.info.prefix_len == len(prefix)
        ends = self._ends(segment.info.namespace, prefix, segment.info.quality)
        return any(self.attach(segment, parent) for parent in ends)

    def attach(self, segment: StoredSegment, parent: StoredSegment | None) -> bool:
        """Attach a segment to one that has the token before it, or None at the start of a prompt.

        Tombstones of its quality along its first tokens are filled, the last one perhaps only in
        part. Returns False if the next token is already stored there in its quality, or if the
        quality of `parent` does not suffice: the caller matches first and stores only new tokens.
        """
        info, tombstones = segment.info, list[StoredSegment]()
        if info.segment_id in self._segments:
            return False
        if parent is not None and not parent.info.quality.is_at_least(info.quality):
            return False
        stop, child = info.prefix_len, parent
        if parent is not None and parent.lost:
            self._split_tombstone(parent, stop)
        while (child := self._same_start(segment, stop, child)) is not None:
            if not child.lost:
                return False
            stop += common_prefix_len(child.info.tokens, info.tokens[stop - info.prefix_len :])
            self._split_tombstone(child, stop)
            tombstones.append(child)
        for tombstone in tombstones:
            self._unlink(tombstone)
            self._move_children(segment, tombstone.children)
        self._link(segment, parent)
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
        segment.info, segment.file_bytes, segment.foreign_dir = info, file_bytes, None
        for changed in (segment, *(self.children_of(segment) if renamed else ())):
            self.order.mark_changed(changed)

    def lose(self, segment: StoredSegment) -> None:
        """Remove a segment that has lost its file.

        Its tokens before its last child become a tombstone. Tombstones above it that are left
        without children are removed from the tree.
        """
        segment.state, parent = SegmentState.LOST, segment.parent
        self._unlink(segment)
        self._make_tombstone(segment, segment.info.prefix_len, segment.children, parent)
        while parent is not None and parent.lost and not parent.children:
            self._unlink(parent)
            parent = parent.parent
        if parent is not None and parent.lost and parent.stop not in parent.children:
            _shorten_tombstone(parent)
        self.order.update_levels(parent)

    def check(self, segment: StoredSegment) -> None:
        """Check a segment's place in the tree.

        The time does not depend on the number of its children, unless it is a tombstone.
        """
        info, parent = segment.info, segment.parent
        assert self._segments[segment.segment_id] is segment
        by_token = self._children_of(info.namespace, parent).get(info.prefix_len, {})
        siblings = by_token.get(int(info.tokens[0]), ())
        assert segment in siblings
        assert len({other.info.quality for other in siblings}) == len(siblings)
        if segment.lost:
            assert max(segment.children, default=0) == segment.stop
        if parent is None:
            assert not info.prefix_len
        else:
            assert self._segments[parent.segment_id] is parent
            assert parent.info.prefix_len < info.prefix_len <= parent.stop
            assert parent.info.namespace == info.namespace
            assert parent.info.quality.is_at_least(info.quality)
        self.order.check(segment)

    def _children_of(self, namespace: str, parent: StoredSegment | None) -> Children:
        return self._roots.get(namespace, {}) if parent is None else parent.children

    def _same_start(
        self, segment: StoredSegment, stop: int, parent: StoredSegment | None
    ) -> StoredSegment | None:
        """Return the segment that has the same token after `stop` tokens of a prompt as a new one,
        in the same quality: `parent` or one of its children."""
        info = segment.info
        if stop == segment.stop:
            return None
        token = info.tokens[stop - info.prefix_len]
        candidates = list(
            self._children_of(info.namespace, parent).get(stop, {}).get(int(token), ())
        )
        if parent is not None and stop < parent.stop:
            following = parent.info.tokens[stop - parent.info.prefix_len]
            candidates += [parent] if following == token else []
        return next((child for child in candidates if child.info.quality == info.quality), None)

    def _move_children(self, parent: StoredSegment, children: Children) -> None:
        parent.children |= children
        states = (position for position, by_token in children.items() if STATE_TOKEN in by_token)
        parent.states = sorted([*parent.states, *states])
        for child in _children_from(children):
            assert child.parent is not None
            child.parent.dependents[child.level] -= 1
            child.parent = parent
            parent.dependents[child.level] += 1
            self.order.mark_changed(child)

    def _link(self, segment: StoredSegment, parent: StoredSegment | None) -> None:
        """Put a segment, with its children, into the tree."""
        info = segment.info
        segment.parent, segment.level = parent, segment.effective_level
        if parent is None:
            children = self._roots.setdefault(info.namespace, {})
        else:
            children = parent.children
            parent.dependents[segment.level] += 1
        by_token, token = children.setdefault(info.prefix_len, {}), int(info.tokens[0])
        if parent is not None and token == STATE_TOKEN and token not in by_token:
            bisect.insort(parent.states, info.prefix_len)
        siblings = by_token.setdefault(token, [])
        siblings.append(segment)
        siblings.sort(key=lambda other: other.info.quality.rank)
        self._segments[info.segment_id] = segment
        self._count(segment, segment.file_bytes)
        if self.content is not None and not segment.lost:
            self.content.add(segment)

    def _unlink(self, segment: StoredSegment) -> None:
        """Take a segment out of the tree, but not its children."""
        info, parent = segment.info, segment.parent
        del self._segments[info.segment_id]
        children, token = self._children_of(info.namespace, parent), int(info.tokens[0])
        by_token = children[info.prefix_len]
        by_token[token].remove(segment)
        if not by_token[token]:
            del by_token[token]
            if parent is not None and token == STATE_TOKEN:
                del parent.states[bisect.bisect_left(parent.states, info.prefix_len)]
        if not by_token:
            del children[info.prefix_len]
        if parent is not None:
            parent.dependents[segment.level] -= 1
        elif not children:
            del self._roots[info.namespace]
        self._count(segment, -segment.file_bytes)
        if self.content is not None:
            self.content.discard(segment)
        self.order.remove(segment)

    def _count(self, segment: StoredSegment, change: int) -> None:
        self.file_bytes += change
        self.bytes_by_namespace[segment.info.namespace] += change
        if not self.bytes_by_namespace[segment.info.namespace]:
            del self.bytes_by_namespace[segment.info.namespace]

    def _make_tombstone(
        self, lost: StoredSegment, start: int, children: Children, parent: StoredSegment | None
    ) -> None:
        """Make a tombstone of the tokens of a lost segment from position `start` of the prompt to
        its last child in `children`, if it has any."""
        if not children:
            return
        info, old_start = lost.info, lost.info.prefix_len
        info = dataclasses.replace(
            info,
            segment_id=uuid.uuid4().hex,
            # Not needed without a file: a segment that fills it comes with all tokens before it.
            prefix_digest="",
            prefix_len=start,
            tokens=info.tokens[start - old_start : max(children) - old_start],
            generation=0,
        )
        tombstone = StoredSegment(
            info, 0, SegmentState.LOST, last_access=lost.last_access, hits=lost.hits
        )
        self._move_children(tombstone, children)
        self._link(tombstone, parent)

    def _split_tombstone(self, tombstone: StoredSegment, stop: int) -> None:
        """Split a tombstone that continues after `stop` tokens of a prompt."""
        later_children = {at: child for at, child in tombstone.children.items() if at > stop}
        for at in later_children:
            del tombstone.children[at]
        del tombstone.states[bisect.bisect_right(tombstone.states, stop) :]
        self._make_tombstone(tombstone, stop, later_children, tombstone)
        _shorten_tombstone(tombstone)

    def _ends(
        self, namespace: str, prefix: Tokens, min_quality: Quality | None = None
    ) -> Iterator[StoredSegment | None]:
        """Yield the segments that have the last token of a prefix, best paths first; None for an
        empty prefix.

        A match follows only the best child; segments stored before it existed are on other paths.
        `min_quality`: None for all qualities, also after tombstones.
        """
        stack: list[tuple[StoredSegment | None, int]] = [(None, 0)]
        while stack:
            parent, stop = stack.pop()
            if stop == len(prefix):
                yield parent
            children = self._children_of(namespace, parent)
            for at in sorted(at for at in children if at <= stop and at < len(prefix)):
                for child in reversed(
                    list(_children_for(children, at, int(prefix[at]), min_quality))
                ):
                    length = common_prefix_len(child.info.tokens, prefix[at:])
                    stack.append((child, at + length))


def _state_at(segment: StoredSegment, position: int, now: float) -> tuple[StoredSpan, ...]:
    """Return the state after the first `position` tokens of a prompt, the last of which `segment`
    has; empty if none is stored or it cannot be read now."""
    state = next(_children_for(segment.children, position, STATE_TOKEN, EXACT), None)
    if state is None or not state.may_be_read(now):
        return ()
    return (StoredSpan(state, 0, state.info.num_tokens),)


def _shorten_tombstone(tombstone: StoredSegment) -> None:
    """Let a tombstone end where its last child begins."""
    length = max(tombstone.children) - tombstone.info.prefix_len
    tombstone.info = dataclasses.replace(tombstone.info, tokens=tombstone.info.tokens[:length])


def _children_for(
    children: Children, position: int, token: int, min_quality: Quality | None
) -> Iterator[StoredSegment]:
    """Yield the children with this first token and at least this quality, best first; None for all.

    A tombstone of better quality is left out: it cannot be read, and worse KVs cannot fill it.
    """
    for child in children.get(position, {}).get(token, ()):
        quality = child.info.quality
        # The common case, in which both are exact, is decided first.
        if (
            quality is min_quality
            or quality == min_quality
            or min_quality is None
            or (not child.lost and quality.is_at_least(min_quality))
        ):
            yield child


def _children_from(children: Children, first: int = 0) -> Iterator[StoredSegment]:
    """Yield the children after `first` tokens of a prompt or later."""
    by_position = (child for position, child in children.items() if position >= first)
    return itertools.chain.from_iterable(
        siblings for by_token in by_position for siblings in by_token.values()
    )
