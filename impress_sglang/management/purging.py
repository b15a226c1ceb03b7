"""What an operator wants to be forgotten: finds these segments and removes them."""

from __future__ import annotations

import dataclasses

from impress_sglang.management.losses import Cause
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import StoredSegment
from impress_sglang.management.tree import StoredTree
from impress_sglang.storage.segment import Tokens

# Limits of one step: segments that are removed, and segments that are looked at.
MOST_SEGMENTS = 64
MOST_LOOKS = 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Purged:
    """What one step has removed; `bytes` are on SSD, `writes` were abandoned."""

    segment_ids: tuple[str, ...] = ()
    tokens: int = 0
    bytes: int = 0
    writes: int = 0
    unpinned: int = 0


class Purge:
    """Removes, in steps, what is stored of a prefix and of all that begins with it.

    Between two steps requests are served; what they store of the prefix is removed as well.
    """

    def __init__(
        self,
        namespace: str | None = None,
        tokens: Tokens | None = None,
        among: list[str] | None = None,
    ) -> None:
        """Begin with nothing removed.

        Args:
            namespace: as the store names it; None: all namespaces.
            tokens: the prefix, int32 [n], n > 0, in a namespace; None: all of the namespace.
            among: remove only these segments, and no pins; None: all. The list is emptied.
        """
        assert tokens is None or (namespace is not None and len(tokens))
        self._namespace = namespace
        self._tokens = tokens
        self._among = among
        self._begun = False
        self.left = True
        """Whether another step is needed."""

    def step(self, store: PrefixStore, most: int = MOST_SEGMENTS) -> Purged:
        """Remove some segments, in a time that does not grow with how many there are.

        Files are unlinked in the background, in order with writes. Running writes are abandoned, or
        their files removed where it is too late for that. Pins of what is removed go as well, and
        so does everything in quarantine, whatever it is of.
        """
        if not self.left:
            return Purged()
        # Segments published since the last poll have other names, or are not known to be there.
        store.poll()
        first, self._begun = not self._begun, True
        writes, unpinned = list[StoredSegment](), 0
        if self._among is not None:
            going = self._next_named(store.tree, self._among, most)
        else:
            going = self._next_stored(store.tree, most)
            if first:
                unpinned = store.pins.unpin(self._namespace, self._tokens)
            if first or not self.left:
                # All in the first step, as they read what is to be freed; newer ones in the last.
                place = _Place(store.tree, self._namespace, self._tokens)
                writes = [own for own, _ in store.writes if place.has(own)]
        # Dependents first.
        going.sort(key=lambda own: -own.info.prefix_len)
        given_up = store.writes.discard([*writes, *going], Cause.PURGED)
        return Purged(
            segment_ids=tuple(own.segment_id for own in going),
            tokens=sum(own.info.num_tokens for own in going),
            bytes=sum(own.file_bytes for own in going),
            writes=given_up,
            unpinned=unpinned,
        )

    def _next_stored(self, tree: StoredTree, most: int) -> list[StoredSegment]:
        """The first segments; those of the step before are not there any more."""
        going = list[StoredSegment]()
        for segment in tree.below(self._namespace, self._tokens):
            if segment.on_disk:
                if len(going) == most:
                    return going
                going.append(segment)
        self.left = False
        return going

    def _next_named(self, tree: StoredTree, names: list[str], most: int) -> list[StoredSegment]:
        """Some of the named segments; each name is looked at once, and not again in later steps."""
        going, place = list[StoredSegment](), _Place(tree, self._namespace, self._tokens)
        for _ in range(min(len(names), MOST_LOOKS)):
            segment = tree.get(names.pop())
            if segment is not None and segment.on_disk and place.has(segment):
                going.append(segment)
            if len(going) == most or place.looks >= MOST_LOOKS:
                break
        self.left = bool(names)
        return going


class _Place:
    """A prefix or a namespace, as the tree is now."""

    def __init__(self, tree: StoredTree, namespace: str | None, tokens: Tokens | None) -> None:
        self._namespace = namespace
        self._length, self._ends = 0, set[StoredSegment]()
        if namespace is not None and tokens is not None:
            self._length, self._ends = len(tokens), tree.ends(namespace, tokens)
        self.looks = 0
        """Number of looks at segments so far."""

    def has(self, segment: StoredSegment) -> bool:
        """Whether a segment of the tree has the end of the prefix or tokens behind it."""
        self.looks += 1
        if self._namespace not in (None, segment.info.namespace):
            return False
        # Go up to the segment with the prefix's last token; no tokens are compared on the way.
        while segment.parent is not None and segment.info.prefix_len >= self._length > 0:
            segment = segment.parent
            self.looks += 1
        return not self._length or segment in self._ends
