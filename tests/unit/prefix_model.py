"""A plain model of stored prefixes: which segment holds each position of each stored sequence.

There is no tree in it: a position is a namespace and, for each token up to it, the quality of its
KVs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from impress_sglang.management.tree import SegmentState
from impress_sglang.storage.quality import EXACT, Quality

# Best first. Of the last two neither takes the place of the other.
QUALITIES = (EXACT, Quality(1, 0.5), Quality(1, 0.25), Quality(2, 0.5))
# (token, quality) of every token up to a position
Path = tuple[tuple[int, Quality], ...]
Position = tuple[str, Path]


@dataclasses.dataclass
class Known:
    """A segment: it holds the tokens of `own`, after those of `above`."""

    name: str
    namespace: str
    above: Path
    own: Path
    state: SegmentState = SegmentState.READY

    @property
    def ready(self) -> bool:
        return self.state is SegmentState.READY

    @property
    def quality(self) -> Quality:
        return self.own[0][1]

    @property
    def path(self) -> Path:
        return self.above + self.own

    def positions(self) -> Iterator[Position]:
        for count in range(len(self.above) + 1, len(self.path) + 1):
            yield self.namespace, self.path[:count]


class PrefixModel:
    """Segments, and the owner of every stored position."""

    def __init__(self) -> None:
        self.segments: dict[str, Known] = {}
        self.owner: dict[Position, Known] = {}

    def follow(self, namespace: str, tokens: Sequence[int], least: Quality) -> Path:
        """The longest stored path along `tokens`; the best KVs are preferred at every step."""
        path: Path = ()
        taken = [quality for quality in QUALITIES if quality.suffices(least)]
        for token in tokens:
            steps = [(token, quality) for quality in taken]
            known = [s for s in steps if (namespace, (*path, s)) in self.owner]
            if not known:
                break
            path = (*path, known[0])
        return path

    def ready_part(self, namespace: str, path: Path) -> Path:
        """A stored path up to the first position that is not ready."""
        for count in range(1, len(path) + 1):
            if not self.owner[namespace, path[:count]].ready:
                return path[: count - 1]
        return path

    def spans(self, namespace: str, path: Path) -> list[tuple[str, int, int]]:
        """The segments along a stored path, as (name, start, stop)."""
        spans: list[tuple[str, int, int]] = []
        for count in range(1, len(path) + 1):
            name = self.owner[namespace, path[:count]].name
            if spans and spans[-1][0] == name:
                spans[-1] = (name, spans[-1][1], spans[-1][2] + 1)
            else:
                spans.append((name, 0, 1))
        return spans

    def place_for(
        self, namespace: str, prefix: Sequence[int], first: int, quality: Quality
    ) -> Path | None:
        """Where a segment that begins with `first` may hang; None if it must be refused."""
        path = self.follow(namespace, prefix, quality)
        taken = (namespace, (*path, (first, quality))) in self.owner
        return None if len(path) < len(prefix) or taken else path

    def add(self, known: Known) -> None:
        self.segments[known.name] = known
        self.owner.update(dict.fromkeys(known.positions(), known))

    def remove(self, name: str) -> None:
        for position in self.segments.pop(name).positions():
            del self.owner[position]

    def lose(self, name: str) -> None:
        """A segment has no file any more; it stays as long as others build on it."""
        known: Known | None = self.segments[name]
        known.state = SegmentState.LOST
        while known is not None and known.state is SegmentState.LOST and not self.children(known):
            above = self.owner.get((known.namespace, known.above))
            self.remove(known.name)
            known = above

    def hole(self, namespace: str, path: Path) -> Known | None:
        """The first lost segment along a stored path."""
        for count in range(1, len(path) + 1):
            if self.owner[namespace, path[:count]].state is SegmentState.LOST:
                return self.owner[namespace, path[:count]]
        return None

    def rename(self, old: str, new: str) -> None:
        known = self.segments.pop(old)
        known.name = new
        self.segments[new] = known

    def node_starts(self, name: str) -> list[int]:
        """Positions of a segment, from its start, where others were hung into its middle."""
        known = self.segments[name]
        lengths = {len(k.above) - len(known.above) for k in self.children(known)}
        return [0, *sorted(n for n in lengths if 0 < n < len(known.own))]

    def children(self, known: Known) -> list[Known]:
        own = set(known.positions())
        return [k for k in self.segments.values() if (k.namespace, k.above) in own]

    def below(self, known: Known) -> list[Known]:
        """All that build on a segment, directly or not."""
        return [k for c in self.children(known) for k in (c, *self.below(c))]

    def below_name(self, name: str) -> list[Known]:
        return self.below(self.segments[name])
