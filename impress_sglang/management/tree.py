"""The tree of stored prefixes: which segments hold the KVs of a token sequence.

A radix tree per namespace (SGLang's `extra_key` and `cache_salt`). A node is a run of tokens inside
one segment; splitting a node moves no data, both halves refer to the same segment. KVs of the same
tokens in different qualities are different children, so that they are never mixed unseen.

Invariants (`check_integrity`):
  * a node's tokens are `segment.tokens[start : start + len]`, and its parent ends where it begins;
  * the nodes of a segment form one path; `dependents` counts the segments that hang below it;
  * no node is of better quality than the one above it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from impress_sglang.importance.history import TokenHistory
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import SegmentInfo, Tokens


class SegmentState(enum.Enum):
    """What can be done with a segment of the tree."""

    PENDING = "pending"
    """Its file is being written."""
    READY = "ready"
    """It can be read."""
    SUSPECT = "suspect"
    """It could not be read; a second look decides."""
    LOST = "lost"
    """It has no file, but others build on it: the same tokens can be stored in its place."""


@dataclasses.dataclass(eq=False, slots=True)
class StoredSegment:
    """A segment in the tree.

    `dependents` counts segments attached below it; `last_access` is a logical time; `history`
    exists once a request has read the segment.
    """

    info: SegmentInfo
    file_bytes: int
    state: SegmentState = SegmentState.READY
    dependents: int = 0
    last_access: int = 0
    hits: int = 0
    parent: StoredSegment | None = None
    history: TokenHistory | None = None

    @property
    def segment_id(self) -> str:
        """Name of the segment."""
        return self.info.segment_id

    @property
    def ready(self) -> bool:
        """Whether it can be read."""
        return self.state is SegmentState.READY

    @property
    def on_disk(self) -> bool:
        """Whether it has a file, which may be damaged."""
        return self.state in (SegmentState.READY, SegmentState.SUSPECT)


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    """Tokens [start, start + len(tokens)) of a segment, below `parent`.

    `children` by first token, of each the best quality first.
    """

    tokens: Tokens
    segment: StoredSegment | None
    start: int
    parent: _Node | None
    children: dict[int, list[_Node]] = dataclasses.field(default_factory=dict)

    @property
    def quality(self) -> Quality:
        return EXACT if self.segment is None else self.segment.info.quality

    @property
    def first_token(self) -> int:
        return int(self.tokens[0])

    def child(self, token: int, least: Quality) -> _Node | None:
        """The best child that begins with a token, if it suffices."""
        for child in self.children.get(token, ()):
            if child.quality.suffices(least):
                return child
        return None

    def add(self, child: _Node) -> bool:
        """Take a child; False if there is one of its first token and quality."""
        siblings = self.children.setdefault(child.first_token, [])
        if any(own.quality == child.quality for own in siblings):
            return False
        siblings.append(child)
        siblings.sort(key=lambda own: (own.quality.depth, -own.quality.retention))
        return True

    def remove(self, child: _Node) -> None:
        """Give a child up."""
        siblings = self.children[child.first_token]
        siblings.remove(child)
        if not siblings:
            del self.children[child.first_token]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredSpan:
    """Tokens [start, stop) of a segment."""

    segment: StoredSegment
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class StoredMatch:
    """The longest stored prefix of a token sequence: spans in order, from token 0."""

    spans: tuple[StoredSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the match."""
        return sum(map(len, self.spans))

    @property
    def quality(self) -> Quality:
        """Of the whole: as its worst part."""
        return functools.reduce(Quality.worst, (s.segment.info.quality for s in self.spans), EXACT)

    def slice(self, start: int, stop: int) -> tuple[StoredSpan, ...]:
        """The spans of the tokens [start, stop)."""
        parts, first = [], 0
        for span in self.spans:
            low, high = max(start - first, 0), min(stop - first, len(span))
            if low < high:
                parts.append(StoredSpan(span.segment, span.start + low, span.start + high))
            first += len(span)
        return tuple(parts)


class StoredTree:
    """Finds and keeps stored prefixes; not thread-safe, one thread owns it."""

    def __init__(self, first_time: int = 1) -> None:
        """An empty tree whose logical time starts at `first_time`."""
        self._roots: dict[str, _Node] = {}
        self._tails: dict[str, _Node] = {}
        self._segments: dict[str, StoredSegment] = {}
        self._clock = itertools.count(first_time)

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, segment_id: str) -> bool:
        return segment_id in self._segments

    def get(self, segment_id: str) -> StoredSegment | None:
        """The segment of that name."""
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

        Of children that begin with the same token the best one is followed, if it suffices. It ends
        before a segment that cannot be read, unless `only_ready` is False.
        """
        spans: list[StoredSpan] = []
        for node, length in self._walk(namespace, tokens, least):
            segment = node.segment
            assert segment is not None
            if only_ready and not segment.ready:
                break
            if spans and spans[-1].segment is segment:
                spans[-1] = StoredSpan(segment, spans[-1].start, node.start + length)
            else:
                spans.append(StoredSpan(segment, node.start, node.start + length))
        return StoredMatch(tuple(spans))

    def touch(self, match: StoredMatch) -> None:
        """Count an access to every segment of a match."""
        now = next(self._clock)
        for span in match.spans:
            span.segment.last_access = now
            span.segment.hits += 1

    def insert(self, segment: StoredSegment, prefix: Tokens) -> bool:
        """Attach a segment after the tokens `prefix`; False if that prefix is not in the tree.

        A segment whose first token is already a child there is refused as well: the caller matches
        first and stores only what is new.
        """
        info = segment.info
        parent = self._node_at(info.namespace, prefix, info.quality)
        if parent is None:
            return False
        return self._attach(segment, parent)

    def replace(self, segment: StoredSegment, info: SegmentInfo, file_bytes: int) -> None:
        """The same tokens are in another file now."""
        assert np.array_equal(segment.info.tokens, info.tokens)
        assert info.segment_id not in self._segments
        self._tails[info.segment_id] = self._tails.pop(segment.segment_id)
        self._segments[info.segment_id] = self._segments.pop(segment.segment_id)
        segment.info, segment.file_bytes = info, file_bytes

    def node_starts(self, segment: StoredSegment) -> list[int]:
        """First token of each node of a segment, ascending; the first one is 0."""
        starts = []
        node: _Node | None = self._tails[segment.segment_id]
        while node is not None and node.segment is segment:
            starts.append(node.start)
            node = node.parent
        return starts[::-1]

    def remove(self, segment: StoredSegment) -> None:
        """Take a segment out; it must have no dependents."""
        assert segment.dependents == 0
        node: _Node | None = self._tails.pop(segment.segment_id)
        while node is not None and node.segment is segment:
            assert not node.children
            parent = node.parent
            assert parent is not None
            parent.remove(node)
            node = parent
        if node is not None and node.parent is None and not node.children:
            del self._roots[segment.info.namespace]
        if segment.parent is not None:
            segment.parent.dependents -= 1
        del self._segments[segment.segment_id]

    def prune(self, segment: StoredSegment | None) -> None:
        """Take a lost segment out, and lost ones above it, if nothing else builds on them."""
        while segment is not None and segment.state is SegmentState.LOST and not segment.dependents:
            parent = segment.parent
            self.remove(segment)
            segment = parent

    def check_integrity(self) -> None:
        """Recompute every invariant from the nodes.

        Raises:
            AssertionError: the tree is damaged, which is a bug.
        """
        covered: dict[str, int] = {}
        parents: dict[str, StoredSegment | None] = {}
        for namespace, root in self._roots.items():
            for node in _descendants(root):
                self._check_node(namespace, node, covered, parents)
        segments = list(self._segments.values())
        assert covered == {s.segment_id: s.info.num_tokens for s in segments}
        dependents = Counter(s.parent.segment_id for s in segments if s.parent is not None)
        for segment in segments:
            above = segment.parent
            assert above is parents[segment.segment_id]
            assert segment.dependents == dependents[segment.segment_id]
            assert above is None or above.info.quality.suffices(segment.info.quality)

    def _check_node(
        self,
        namespace: str,
        node: _Node,
        covered: dict[str, int],
        parents: dict[str, StoredSegment | None],
    ) -> None:
        segment, parent = node.segment, node.parent
        assert segment is not None and parent is not None
        assert self._segments[segment.segment_id] is segment
        assert segment.info.namespace == namespace
        stop = node.start + len(node.tokens)
        assert len(node.tokens) > 0
        assert np.array_equal(node.tokens, segment.info.tokens[node.start : stop])
        siblings = parent.children[node.first_token]
        assert node in siblings and len({own.quality for own in siblings}) == len(siblings)
        if parent.segment is segment:
            assert parent.start + len(parent.tokens) == node.start
        else:
            assert node.start == 0
            parents[segment.segment_id] = parent.segment
        covered[segment.segment_id] = covered.get(segment.segment_id, 0) + len(node.tokens)
        if stop == segment.info.num_tokens:
            assert self._tails[segment.segment_id] is node

    def _attach(self, segment: StoredSegment, parent: _Node) -> bool:
        info = segment.info
        node = _Node(info.tokens, segment, 0, parent)
        if segment.segment_id in self._segments or not parent.add(node):
            return False
        self._segments[segment.segment_id] = segment
        self._tails[segment.segment_id] = node
        segment.parent = parent.segment
        segment.last_access = segment.last_access or next(self._clock)
        if parent.segment is not None:
            parent.segment.dependents += 1
        return True

    def _walk(self, namespace: str, tokens: Tokens, least: Quality) -> Iterator[tuple[_Node, int]]:
        """Nodes along `tokens`, each with the number of its tokens that match."""
        node = self._roots.get(namespace)
        position = 0
        while node is not None and position < len(tokens):
            child = node.child(int(tokens[position]), least)
            if child is None:
                return
            length = common_prefix_len(child.tokens, tokens[position:])
            yield child, length
            if length < len(child.tokens):
                return
            node, position = child, position + length

    def _node_at(self, namespace: str, prefix: Tokens, least: Quality) -> _Node | None:
        """The node that ends exactly after `prefix`, splitting one if need be."""
        node = self._roots.setdefault(namespace, _Node(np.empty(0, np.int32), None, 0, None))
        found = 0
        # A list, for splitting a node while walking would change where the walk goes on.
        for child, length in list(self._walk(namespace, prefix, least)):
            node = self._split(child, length) if length < len(child.tokens) else child
            found += length
        return node if found == len(prefix) else None

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut a node after `length` tokens; returns the upper half."""
        assert node.parent is not None
        upper = _Node(node.tokens[:length], node.segment, node.start, node.parent)
        node.parent.remove(node)
        node.parent.add(upper)
        node.tokens, node.start, node.parent = node.tokens[length:], node.start + length, upper
        upper.add(node)
        return upper


def common_prefix_len(left: Tokens, right: Tokens) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    return int(different.argmax()) if different.any() else length


def prefix_digest(namespace: str, tokens: Tokens) -> str:
    """Digest of a namespace and a prefix: names a place in the tree across restarts."""
    state = hashlib.blake2b(namespace.encode(), digest_size=16)
    state.update(b"\0")
    state.update(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return state.hexdigest()


def restore_segments(tree: StoredTree, segments: Iterable[StoredSegment]) -> list[StoredSegment]:
    """Put the segments of an earlier process back into an empty tree.

    A segment knows only the digest of the tokens before it; their text is that of the segments it
    hangs below. Returns the segments whose place was not found: a segment above them is gone.
    """
    # Of two files of the same tokens, after a crash while one replaced the other, take the newer.
    ordered = sorted(segments, key=lambda s: (s.info.prefix_len, -s.info.generation))
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


def _descendants(root: _Node) -> Iterator[_Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        if node is not root:
            yield node
        for siblings in node.children.values():
            stack.extend(siblings)
