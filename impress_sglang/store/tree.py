"""The tree of stored prefixes: which segments hold the KVs of a token sequence.

A radix tree per namespace (SGLang's `extra_key` and `cache_salt`). A node is a run of tokens inside
one segment; splitting a node moves no data, both halves refer to the same segment. KVs of the same
tokens in different qualities are different children, so that they are never mixed unnoticed.

A segment that has lost its file stays in the tree as long as others build on it. Each of its nodes
becomes a lost segment of its own: a hole, which is filled when its tokens are stored again.

Invariants (`check`):
  * a node's tokens are `segment.tokens[start : start + len]`, and its parent ends where it begins;
  * the nodes of a segment form one path; `dependents` counts the segments that hang below it;
  * no segment leaves the disk at a lower level than what hangs below it;
  * a lost segment is one node, and something hangs below it;
  * no node is of better quality than the one above it.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence

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
    Node,
    SegmentState,
    StoredMatch,
    StoredSegment,
    StoredSpan,
)

_start = operator.attrgetter("start")
# In how many of its nodes a segment is checked, and of a match states are looked for.
_MOST_NODES = 256


class StoredTree:
    """Finds and keeps stored prefixes; not thread-safe, one thread owns it."""

    def __init__(self, content: ContentIndex | None = None, ttl: float = 0.0) -> None:
        """Begin with an empty tree.

        `content` is kept in step with it; None: tokens are found behind their prefix only. `ttl` is
        in how many seconds segments expire that have no shorter time; 0: never.
        """
        self.content = content
        self._roots: dict[str, Node] = {}
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
        spans: list[StoredSpan] = []
        now = time.time()
        for span in self._walk(namespace, tokens, least):
            if only_ready and not span.segment.may_be_read(now):
                break
            if spans and spans[-1].segment is span.segment:
                spans[-1] = StoredSpan(span.segment, spans[-1].start, span.stop)
            else:
                spans.append(span)
        return StoredMatch(tuple(spans))

    def states_in(self, match: StoredMatch) -> Iterator[int]:
        """How many tokens of a match are before each state that may be read now, the last first.

        Only the last nodes are looked at: requests wait meanwhile.
        """
        now, first, left = time.time(), match.num_tokens, _MOST_NODES
        for span in reversed(match.spans):
            first -= len(span)
            path = span.segment.path
            stop = bisect.bisect_left(path, span.stop, key=_start)
            nodes = path[max(stop - left, 0) : stop]
            left -= len(nodes)
            for node in reversed(nodes):
                if span.start < node.stop <= span.stop and _state_below(node, now):
                    yield first + node.stop - span.start

    def state_behind(self, match: StoredMatch) -> tuple[StoredSpan, ...]:
        """The state where a match ends, if there is one that may be read now."""
        if not match.spans or not (path := match.spans[-1].segment.path):
            return ()
        node, stop = _holder(path, match.spans[-1].stop), match.spans[-1].stop
        return _state_below(node, time.time()) if node.stop == stop else ()

    def below(self, namespace: str | None, prefix: Tokens | None = None) -> Iterator[StoredSegment]:
        """Segments that have the end of a prefix or tokens behind it, in all qualities.

        A segment comes after those that build on its end. `namespace`, `prefix`: None for all.
        Segments are found lazily, so the first ones cost the same however many follow; the tree
        must not change meanwhile.
        """
        prefix = np.empty(0, np.int32) if prefix is None else prefix
        for own in self._roots if namespace is None else (namespace,):
            for end, _ in self._ends(own, prefix):
                for node in _deepest_first(end):
                    if node.segment is not None and node.segment.path[-1] is node:
                        yield node.segment

    def ends(self, namespace: str, prefix: Tokens) -> set[StoredSegment]:
        """Segments that have the last token of a prefix, in all qualities, also lost ones."""
        nodes = self._ends(namespace, prefix)
        return {node.segment for node, _ in nodes if node.segment is not None}

    def on_top(self, segment: StoredSegment) -> Iterator[StoredSegment]:
        """Segments that build directly on one; found lazily, as by `below`."""
        for node in reversed(segment.path):
            for below in _below(node):
                if below.segment is not None and below.segment is not segment:
                    yield below.segment

    def touch(self, match: StoredMatch) -> None:
        """Count an access to every segment of a match, and to the state behind it."""
        spans = (*match.spans, *self.state_behind(match))
        if spans:
            self.order.note(spans[-1].segment)
        for span in spans:
            span.segment.hits += 1

    def insert(self, segment: StoredSegment, prefix: Tokens) -> bool:
        """Attach a segment after the tokens `prefix`; False if that prefix is not in the tree.

        Any path of these tokens will do whose quality suffices for the segment. Holes of its
        quality along its first tokens are filled, the last one perhaps only in part. The segment is
        refused if its other tokens begin like stored ones of its quality there: the caller matches
        first and stores only new tokens.
        """
        info = segment.info
        self._roots.setdefault(info.namespace, Node(np.empty(0, np.int32), None, 0, None))
        ends = self._ends(info.namespace, prefix, info.quality)
        return any(self._attach(segment, node, length) for node, length in ends)

    def insert_below(self, segment: StoredSegment, above: StoredSegment, length: int) -> bool:
        """Attach a segment after the first `length` tokens of another; False if impossible.

        Like `insert`, for a caller who knows the place: the tokens before it are not compared.
        """
        if not above.info.quality.suffices(segment.info.quality):
            return False
        node = _holder(above.path, length)
        return self._attach(segment, node, length - node.start)

    def replace(self, segment: StoredSegment, info: SegmentInfo, file_bytes: int) -> None:
        """Give a segment another file with the same tokens, which is one of ours."""
        assert np.array_equal(segment.info.tokens, info.tokens)
        renamed = info.segment_id != segment.segment_id
        del self._segments[segment.segment_id]
        assert info.segment_id not in self._segments
        self._segments[info.segment_id] = segment
        self._count(segment, file_bytes - segment.file_bytes)
        segment.info, segment.file_bytes, segment.home = info, file_bytes, None
        for own in (segment, *(self.on_top(segment) if renamed else ())):
            self.order.change(own)

    def lose(self, segment: StoredSegment) -> None:
        """Mark a segment as lost: it has no file any more.

        Those of its nodes that others build on become holes. Nodes that nothing builds on leave the
        tree, and so do holes above them that nothing builds on then.
        """
        segment.state = SegmentState.LOST
        node = segment.path[-1]
        while node.lost and not node.children:
            assert node.segment is not None and node.parent is not None
            node.parent.remove(node)
            if node.start == 0:
                self._forget(node.segment)
            node = node.parent
        if node.parent is None and not node.children:
            del self._roots[segment.info.namespace]
        if segment.segment_id in self._segments:
            self._forget(segment)
            while node.segment is segment:
                self._dig(node)
                assert node.parent is not None
                node = node.parent
        if node.segment is not None:
            self.order.settle(node.segment)

    def check(self, segment: StoredSegment, most: int = _MOST_NODES) -> None:
        """Check that a segment has its place in the tree, in its last `most` nodes.

        The time does not depend on how many segments build on it.
        """
        info, above, path = segment.info, segment.parent, segment.path
        assert self._segments[segment.segment_id] is segment
        stop, node = info.num_tokens, path[-1]
        for own in itertools.islice(reversed(path), most):
            assert node is own and node.segment is segment and node.parent is not None
            assert len(node.tokens) > 0 and node.start + len(node.tokens) == stop
            assert np.array_equal(node.tokens, info.tokens[node.start : stop])
            siblings = node.parent.children[int(node.tokens[0])]
            assert node in siblings and len({own.quality for own in siblings}) == len(siblings)
            stop, node = node.start, node.parent
        if not stop:
            assert node.segment is above
            assert above is not None or self._roots[info.namespace] is node
        assert path[0].start == 0
        if segment.state is SegmentState.LOST:
            assert len(path) == 1 and segment.num_dependents
        if above is not None:
            assert self._segments[above.segment_id] is above
            assert above.info.namespace == info.namespace
            assert above.info.quality.suffices(info.quality)
        self.order.check(segment)

    def _attach(self, segment: StoredSegment, node: Node, length: int) -> bool:
        """Attach a segment after `length` tokens of a node, filling the holes there; False if
        impossible."""
        if segment.segment_id in self._segments:
            return False
        above = self._split(node, length)
        nodes, rest = list[Node](), segment.info.tokens
        while len(rest) and (hole := _hole(above, int(rest[0]), segment.info.quality)) is not None:
            length = common_prefix_len(hole.tokens, rest)
            above, rest = self._split(hole, length), rest[length:]
            nodes.append(above)
        if len(rest):
            nodes.append(Node(rest, segment, 0, above))
            if not above.add(nodes[-1]):
                return False
        for own in nodes:
            if own.segment is not None and own.segment is not segment:
                self._forget(own.segment)
        self._own(segment, nodes)
        self.order.add(segment)
        return True

    def _own(self, segment: StoredSegment, nodes: list[Node]) -> None:
        """Make nodes, each below the one before, the nodes of a new segment."""
        start = segment.info.num_tokens
        for node in reversed(nodes):
            start -= len(node.tokens)
            node.segment, node.start = segment, start
            for below in _below(node):
                if below.segment is not None and below.segment is not segment:
                    below.segment.parent = segment
                    segment.dependents[below.segment.level] += 1
                    self.order.change(below.segment)
        assert start == 0 and nodes[0].parent is not None
        segment.parent = nodes[0].parent.segment
        segment.level = segment.own_level
        if segment.parent is not None:
            segment.parent.dependents[segment.level] += 1
        self._segments[segment.segment_id] = segment
        self._count(segment, segment.file_bytes)
        segment.path = nodes
        if self.content is not None and segment.state is not SegmentState.LOST:
            self.content.add(segment)

    def _forget(self, segment: StoredSegment) -> None:
        """Forget a segment; its nodes belong to another one, or go as well."""
        del self._segments[segment.segment_id]
        segment.path = []
        self._count(segment, -segment.file_bytes)
        if self.content is not None:
            self.content.discard(segment)
        self.order.remove(segment)
        if segment.parent is not None:
            segment.parent.dependents[segment.level] -= 1

    def _count(self, segment: StoredSegment, more: int) -> None:
        """Count bytes of the file of a segment, perhaps fewer than 0."""
        self.file_bytes += more
        self.held[segment.info.namespace] += more
        if not self.held[segment.info.namespace]:
            del self.held[segment.info.namespace]

    def _dig(self, node: Node) -> None:
        """Make a node of a lost segment, which is forgotten already, a hole of its own."""
        old = node.segment
        assert old is not None
        info = dataclasses.replace(
            old.info,
            segment_id=uuid.uuid4().hex,
            # No file needs it: whoever fills the hole knows all tokens before it.
            prefix_digest="",
            prefix_len=old.info.prefix_len + node.start,
            tokens=node.tokens,
            generation=0,
        )
        hole = StoredSegment(info, 0, SegmentState.LOST, last_access=old.last_access, hits=old.hits)
        self._own(hole, [node])

    def _walk(self, namespace: str, tokens: Tokens, least: Quality) -> Iterator[StoredSpan]:
        """Spans of segments along `tokens`."""
        node = self._roots.get(namespace)
        position = 0
        while node is not None and position < len(tokens):
            child = next(node.choices(int(tokens[position]), least), None)
            if child is None:
                return
            segment, start = child.segment, child.start
            assert segment is not None
            # Exact KVs have no better siblings, so their segment is followed as far as it goes,
            # over any number of nodes.
            exact = segment.info.quality == EXACT
            path = segment.path if exact else [child]
            own = segment.info.tokens[start : path[-1].stop]
            stop = start + common_prefix_len(own, tokens[position:])
            yield StoredSpan(segment, start, stop)
            node = _holder(path, stop)
            if stop < node.stop:
                return
            position += stop - start

    def _ends(
        self, namespace: str, prefix: Tokens, least: Quality | None = None
    ) -> Iterator[tuple[Node, int]]:
        """Nodes in which a prefix ends, and how many of their tokens are in it, best paths first.

        A match follows the best child only; what was stored before that one existed is on others.
        `least`: None for all qualities, also behind holes.
        """
        root = self._roots.get(namespace)
        stack = [] if root is None else [(root, 0, 0)]
        while stack:
            node, length, position = stack.pop()
            if position == len(prefix):
                yield node, length
            elif length == len(node.tokens):
                token = int(prefix[position])
                every = node.children.get(token, ())
                choices = every if least is None else list(node.choices(token, least))
                for child in reversed(choices):
                    length = common_prefix_len(child.tokens, prefix[position:])
                    stack.append((child, length, position + length))

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node after `length` tokens, if it goes on there; returns the upper part."""
        if length == len(node.tokens):
            return node
        assert node.parent is not None and node.segment is not None
        upper = Node(node.tokens[:length], node.segment, node.start, node.parent)
        path = node.segment.path
        path.insert(bisect.bisect_left(path, node.start, key=_start), upper)
        node.parent.remove(node)
        node.parent.add(upper)
        node.tokens, node.start, node.parent = node.tokens[length:], node.start + length, upper
        upper.add(node)
        if upper.lost:
            self._forget(node.segment)
            self._dig(node)
            self._dig(upper)
        return upper


def _state_below(node: Node, now: float) -> tuple[StoredSpan, ...]:
    """The state behind a node, if there is one that may be read now."""
    child = next(node.choices(STATE_TOKEN, EXACT), None)
    segment = None if child is None else child.segment
    if segment is None or not segment.may_be_read(now):
        return ()
    return (StoredSpan(segment, 0, segment.info.num_tokens),)


def _holder(path: Sequence[Node], length: int) -> Node:
    """The node of a segment that has the last of the segment's first `length` tokens."""
    return path[bisect.bisect_left(path, length, key=_start) - 1]


def _hole(above: Node, token: int, quality: Quality) -> Node | None:
    """The child that begins with a token and has this quality, if it is lost."""
    holes = (own for own in above.children.get(token, ()) if own.lost and own.quality == quality)
    return next(holes, None)


def _below(node: Node) -> Iterator[Node]:
    return itertools.chain.from_iterable(node.children.values())


def _deepest_first(top: Node) -> Iterator[Node]:
    """A node and all below it, each after those below it; the tree must not change meanwhile."""
    # Each node on the way down, with those of its children that are still to come.
    stack = [(top, _below(top))]
    while stack:
        node, children = stack[-1]
        if (child := next(children, None)) is None:
            stack.pop()
            yield node
        else:
            stack.append((child, _below(child)))
