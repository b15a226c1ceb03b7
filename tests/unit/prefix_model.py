"""A plain model of stored prefixes: which segment holds each position of each stored sequence.

There is no tree in it: a position is a namespace and, for each token up to it, the quality of its
KVs. A position that no segment holds, though one builds on it, is a hole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.store.stored import SegmentState

# Best first. Of the last three none takes the place of another.
QUALITIES = (EXACT, Quality(1, 8.0), Quality(1, 4.0), Quality(2, 8.0), Quality(1, 6.0, 0.15))
# (token, quality) of every token up to a position
Path = tuple[tuple[int, Quality], ...]
Position = tuple[str, Path]


@dataclasses.dataclass
class Known:
    """A segment: it holds the tokens of `tail`, after those of `above`."""

    name: str
    namespace: str
    above: Path
    tail: Path
    state: SegmentState = SegmentState.READY

    @property
    def ready(self) -> bool:
        return self.state is SegmentState.READY

    @property
    def quality(self) -> Quality:
        return self.tail[0][1]

    @property
    def path(self) -> Path:
        return self.above + self.tail

    def places(self) -> Iterator[Position]:
        """All positions up to its last, whoever holds them."""
        return ((self.namespace, self.path[: end + 1]) for end in range(len(self.path)))

    def positions(self) -> Iterator[Position]:
        for count in range(len(self.above) + 1, len(self.path) + 1):
            yield self.namespace, self.path[:count]


class PrefixModel:
    """Segments, the owner of every stored position, and the places: these and the holes."""

    def __init__(self) -> None:
        self.segments: dict[str, Known] = {}
        self.owner: dict[Position, Known] = {}
        self.places: set[Position] = set()

    def follow(self, namespace: str, tokens: Sequence[int], worst: Quality) -> Path:
        """The longest stored path along `tokens`; the best KVs are preferred at every step.

        A hole is only a step for who could fill it: with KVs of its quality.
        """
        path: Path = ()
        taken = [quality for quality in QUALITIES if quality.is_at_least(worst)]
        for token in tokens:
            steps = [(token, quality) for quality in taken]
            known = [s for s in steps if (namespace, (*path, s)) in self.places]
            known = [s for s in known if s[1] == worst or (namespace, (*path, s)) in self.owner]
            if not known:
                break
            path = (*path, known[0])
        return path

    def holders(self, namespace: str, path: Path) -> list[str]:
        """Which segment has each position of a stored path; a hole has no name."""
        owners = (self.owner.get((namespace, path[: end + 1])) for end in range(len(path)))
        return ["" if known is None else known.name for known in owners]

    def place_for(
        self,
        namespace: str,
        prefix: Sequence[int],
        tokens: Sequence[int],
        quality: Quality,
        known_place: Path = (),
    ) -> Path | None:
        """Where a segment may hang: `known_place`, or the best path whose tokens are `prefix`; None
        if it must be refused, because there is none, or all have other KVs of its quality."""
        paths: list[Path] = [()]
        for token in prefix:
            steps = [(token, better) for better in QUALITIES if better.is_at_least(quality)]
            paths = [(*p, s) for p in paths for s in steps if (namespace, (*p, s)) in self.places]
            paths = [p for p in paths if p[-1][1] == quality or (namespace, p) in self.owner]
        tail = tuple((token, quality) for token in tokens)
        for path in sorted(paths, key=lambda path: path != known_place):
            new = Known("", namespace, path, tail)
            if not any(position in self.owner for position in new.positions()):
                return path
        return None

    def missing(self, namespace: str, tokens: Sequence[int], quality: Quality) -> tuple[int, int]:
        """What a file for an offer would hold: its first hole, if that has its quality, and others
        next to it; or what follows the match. Empty where nothing may be stored."""
        path = self.follow(namespace, tokens, quality)
        stop = len(self.held_part(namespace, path))
        start = stop
        while stop < len(path) and path[stop][1] == quality:
            if (namespace, path[: stop + 1]) in self.owner:
                break
            stop += 1
        return start, stop if stop < len(path) else len(tokens)

    def held_part(self, namespace: str, path: Path, *, ready: bool = False) -> Path:
        """A stored path up to its first hole, or position that is not `ready`."""
        for count in range(1, len(path) + 1):
            known = self.owner.get((namespace, path[:count]))
            if known is None or (ready and not known.ready):
                return path[: count - 1]
        return path

    def add(self, known: Known) -> None:
        self.segments[known.name] = known
        self.owner.update(dict.fromkeys(known.positions(), known))
        self.places.update(known.places())

    def lose(self, name: str) -> None:
        """A segment has no file any more; what others build on is a hole."""
        known = self.segments.pop(name)
        for position in known.positions():
            # What was stored in its place begins alike.
            if self.owner[position] is known:
                del self.owner[position]
        self.places = {place for known in self.segments.values() for place in known.places()}

    @property
    def num_holes(self) -> int:
        return len(self.places) - len(self.owner)

    def above_holes(self) -> list[Known]:
        return [
            known
            for known in self.segments.values()
            if len(self.held_part(known.namespace, known.above)) < len(known.above)
        ]

    def below(self, known: Known) -> list[Known]:
        first = len(known.above) + 1
        return [
            k
            for k in self.segments.values()
            if k is not known
            and k.namespace == known.namespace
            and k.path[:first] == known.path[:first]
        ]
