"""Nodes of the tree of stored prefixes: runs of tokens, each inside one segment."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.stored import SegmentState, StoredSegment


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """Tokens [start, start + len(tokens)) of a segment, below `parent`.

    `children` are by first token, those with the same one in order of quality, best first.
    """

    tokens: Tokens
    segment: StoredSegment | None
    start: int
    parent: Node | None
    children: dict[int, list[Node]] = dataclasses.field(default_factory=dict)

    @property
    def quality(self) -> Quality:
        """The quality of its KVs."""
        return EXACT if self.segment is None else self.segment.info.quality

    @property
    def lost(self) -> bool:
        """Whether it is a hole."""
        return self.segment is not None and self.segment.state is SegmentState.LOST

    @property
    def stop(self) -> int:
        """The end of its tokens in its segment, exclusive."""
        return self.start + len(self.tokens)

    @property
    def first_token(self) -> int:
        """The token by which its parent finds it."""
        return int(self.tokens[0])

    def choices(self, token: int, least: Quality) -> Iterator[Node]:
        """Children that begin with a token and suffice, best first.

        A hole of better quality is left out: it cannot be read, and worse KVs cannot fill it.
        """
        for child in self.children.get(token, ()):
            quality = child.quality
            # The usual case, in which both are exact, is decided first.
            same = quality is least or quality == least
            if same or (not child.lost and quality.suffices(least)):
                yield child

    def hole(self, token: int, quality: Quality) -> Node | None:
        """The child that begins with a token and has this quality, if it is lost."""
        for child in self.children.get(token, ()):
            if child.quality == quality and child.lost:
                return child
        return None

    def add(self, child: Node) -> bool:
        """Add a child; False if there is one with its first token and quality."""
        siblings = self.children.setdefault(child.first_token, [child])
        if siblings == [child]:
            return True
        if any(own.quality == child.quality for own in siblings):
            return False
        siblings.append(child)
        siblings.sort(key=lambda own: own.quality.rank)
        return True

    def remove(self, child: Node) -> None:
        """Remove a child."""
        siblings = self.children[child.first_token]
        siblings.remove(child)
        if not siblings:
            del self.children[child.first_token]


def deepest_first(top: Node) -> Iterator[Node]:
    """A node and all below it, each after those below it; the tree must not change meanwhile."""
    # Each node on the way down, with those of its children that are still to come.
    stack = [(top, itertools.chain.from_iterable(top.children.values()))]
    while stack:
        node, children = stack[-1]
        if (child := next(children, None)) is None:
            stack.pop()
            yield node
        else:
            stack.append((child, itertools.chain.from_iterable(child.children.values())))
