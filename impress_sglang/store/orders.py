"""What an operator orders: prefixes that are pinned, and what is to be forgotten.

The quota never evicts what is stored of a pinned prefix. A pin is a prefix and not a file, so it
outlasts reordering, damage and restarts: KVs of a pinned prefix that are stored again are pinned
again. The best stored KVs of its tokens are what is pinned.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

from impress_sglang.storage.directory import PINS, StoreDirectory
from impress_sglang.storage.quality import ANYTHING
from impress_sglang.storage.segment import Tokens, common_prefix_len
from impress_sglang.store.disk_worker import DiskWorker
from impress_sglang.store.journal import decoded, encoded
from impress_sglang.store.losses import Cause
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

logger = logging.getLogger(__name__)

MOST_PINS = 256
# Seconds between two looks for what is stored of pinned prefixes.
_LOOK_SECONDS = 1.0
# The most segments that one step removes.
MOST_SEGMENTS = 64
MOST_JOBS = 8

Name = TypeVar("Name", bound=Hashable)
Job = TypeVar("Job")


@dataclasses.dataclass(frozen=True, slots=True)
class _Pin:
    """A prefix in a namespace, and when it was pinned."""

    namespace: str
    tokens: Tokens
    at: float


class Pins:
    """The pins of one store; the store's thread owns them."""

    def __init__(
        self, directory: StoreDirectory, worker: DiskWorker, tree: StoredTree, most_bytes: int
    ) -> None:
        """Read the pins that an earlier process has left; nothing else may run on the parts yet.

        `most_bytes`: limit on the bytes of all pinned prefixes on SSD.

        Raises:
            OSError: the directory cannot be read.
        """
        self._directory, self._worker, self._tree = directory, worker, tree
        self._most_bytes = most_bytes
        self._pins = self._read()
        self._look()
        if self.num_bytes > most_bytes:
            logger.warning("pinned prefixes take %.1f MB, which is much", self.num_bytes / 1e6)

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, segment_id: str) -> bool:
        """Whether a segment has tokens of a pinned prefix, and so must stay."""
        if not self._pins:
            return False
        if time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self._look()
        return self._tree.get(segment_id) in self._held

    @property
    def num_bytes(self) -> int:
        """Bytes that pinned prefixes take on SSD."""
        return sum(own.file_bytes for own in self._held if own.on_disk)

    def pin(self, namespace: str, tokens: Tokens) -> str | None:
        """Pin a prefix, int32 [n]; returns None, or the reason why it cannot be pinned.

        `namespace` is as the store names it.
        """
        for own in self._pins:
            if own.namespace == namespace and np.array_equal(own.tokens, tokens):
                return None
        found, segments = self._resolve(namespace, tokens)
        if not len(tokens) or found < len(tokens):
            return f"{found} of its {len(tokens)} tokens are stored: warm it first"
        if len(self._pins) == MOST_PINS:
            return f"{MOST_PINS} prefixes are pinned, and no more can be: unpin one first"
        new = sum(own.file_bytes for own in segments - self._held)
        if self.num_bytes + new > self._most_bytes:
            return (
                f"pinned prefixes would take {(self.num_bytes + new) / 1e9:.3f} GB, more than half "
                "of --impress-ssd-gb: unpin another one first, or give the store more room"
            )
        self._pins.append(_Pin(namespace, tokens, time.time()))
        self._held |= segments
        self._write()
        return None

    def unpin(
        self,
        namespace: str | None = None,
        tokens: Tokens | None = None,
        before: float = math.inf,
    ) -> int:
        """Unpin the prefixes that begin with these tokens; returns how many there were.

        None: those of all namespaces, or whatever they begin with. `before`: only what was pinned
        by then.
        """
        tokens = np.empty(0, np.int32) if tokens is None else tokens
        left = [
            pin
            for pin in self._pins
            if namespace not in (None, pin.namespace)
            or common_prefix_len(pin.tokens, tokens) < len(tokens)
            or pin.at > before
        ]
        count, self._pins = len(self._pins) - len(left), left
        if count:
            self._look()
            self._write()
        return count

    def longest(self, namespace: str, tokens: Tokens) -> int:
        """How many of these tokens the longest pin has that they begin with."""
        own = [pin.tokens for pin in self._pins if pin.namespace == namespace]
        lengths = (len(pin) for pin in own if common_prefix_len(pin, tokens) == len(pin))
        return max(lengths, default=0)

    def summary(self) -> dict[str, int]:
        """Number of pinned prefixes, and their bytes on SSD."""
        return {"prefixes": len(self._pins), "bytes": self.num_bytes}

    def _look(self) -> None:
        """Look up which segments have the pinned prefixes now."""
        self._looked_at, self._held = time.monotonic(), set[StoredSegment]()
        for pin in self._pins:
            self._held |= self._resolve(pin.namespace, pin.tokens)[1]

    def _resolve(self, namespace: str, tokens: Tokens) -> tuple[int, set[StoredSegment]]:
        """How many of these tokens are stored, and the segments that have them and their state."""
        known = self._tree.match(namespace, tokens, least=ANYTHING)
        spans = (*known.spans, *self._tree.state_behind(known))
        return known.num_tokens, {span.segment for span in spans}

    def _read(self) -> list[_Pin]:
        if (content := self._directory.get(PINS)) is None:
            return []
        try:
            return [
                _Pin(str(own["namespace"]), decoded(own["tokens"]), float(own["at"]))
                for own in json.loads(content)
            ]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            path = self._directory.path / PINS
            logger.warning("%s is damaged (%s): nothing is pinned", path, error)
            return []

    def _write(self) -> None:
        fields = [
            {"namespace": own.namespace, "tokens": encoded(own.tokens), "at": own.at}
            for own in self._pins
        ]
        self._worker.submit(self._worker.keep, PINS, json.dumps(fields).encode())


class MultiStepJobs(dict[Name, Job]):
    """Jobs by the names of orders: whoever has given an order continues it until it is done.

    Callers do not say that they give up. So the oldest job is forgotten when there are too many,
    and a caller who continues it after all begins again.
    """

    def go_on(self, name: Name, begin: Callable[[], Job]) -> Job:
        """The job of this name, which begins if there is none."""
        if name not in self:
            if len(self) == MOST_JOBS:
                del self[next(iter(self))]
            self[name] = begin()
        return self[name]


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

    Between two steps requests are served; what they store of the prefix is removed as well. Other
    servers of the model are told, and remove what they had stored of it by then.
    """

    def __init__(
        self,
        namespace: str | None = None,
        tokens: Tokens | None = None,
        older_than: float | None = None,
    ) -> None:
        """Begin with nothing removed.

        Args:
            namespace: as the store names it; None: all namespaces.
            tokens: the prefix, int32 [n], n > 0, in a namespace; None: all of the namespace.
            older_than: remove only what was written so many seconds ago or earlier, and no pins.
        """
        assert tokens is None or (namespace is not None and len(tokens))
        self._namespace, self._tokens = namespace, tokens
        self._before = None if older_than is None else time.time() - older_than
        # Segments of the time before that are still to be removed.
        self._old: collections.deque[StoredSegment] | None = None
        self._begun, self._unpins = False, older_than is None
        self.left = True
        """Whether another step is needed."""

    @classmethod
    def told(cls, order: Mapping[str, Any]) -> Purge:
        """The order of another server, which named the time."""
        text = order["tokens"]
        purge = cls(order["namespace"], None if text is None else decoded(text))
        purge._before, purge._unpins = float(order["before"]), order["unpins"]
        return purge

    def step(self, store: Any, most: int = MOST_SEGMENTS) -> Purged:
        """Remove some segments of a `PrefixStore`.

        Only the first step for old ones looks at all that are stored.

        Files are unlinked in the background, in order with writes. Running writes are abandoned, or
        their files removed where it is too late for that. Pins of what is removed go as well, and
        so does everything in quarantine, whatever it is of.
        """
        if not self.left:
            return Purged()
        # Segments published since the last poll have other names, or are not known to be there.
        store.poll()
        if not self._begun:
            now, tokens = time.time(), self._tokens
            order = {
                "at": now,
                "before": now if self._before is None else self._before,
                "unpins": self._unpins,
                "namespace": self._namespace,
                "tokens": None if tokens is None else encoded(tokens),
            }
            store.tell(order)
        return self.obey(store, most)

    def obey(self, store: Any, most: int = MOST_SEGMENTS) -> Purged:
        """Take a step that other servers are not told of, within a poll."""
        first, self._begun = not self._begun, True
        tree, place = store.tree, (self._namespace, self._tokens)
        before = time.time() if self._before is None else self._before
        writes, unpinned = list[StoredSegment](), 0
        if first:
            if self._unpins:
                unpinned = store.pins.unpin(*place, before)
            store.places.refuse_unplaced(*place, before)
            if self._before is not None:
                below = tree.below(*place)
                self._old = collections.deque(own for own in below if own.written <= before)
        # Those of the step before are not there any more.
        old = self._old
        found = tree.below(*place) if old is None else (old.popleft() for _ in range(len(old)))
        there = (own for own in found if own.on_disk and tree.get(own.segment_id) is own)
        going, more = list(itertools.islice(there, most)), next(there, None)
        self.left = more is not None
        if old is not None and more is not None:
            old.appendleft(more)
        if self._unpins and (first or not self.left):
            # All in the first step, as they read what is to be freed; newer ones in the last. An
            # order may be heard again: what is newer than it stays.
            told = self._before is not None
            now = [own for own in store.writes if not told or own.written <= before]
            writes = [own for own in now if is_in(own, tree, *place)]
        # Dependents first.
        going.sort(key=lambda own: -own.info.prefix_len)
        given_up = store.writes.discard([*writes, *going], Cause.PURGED)
        return Purged(
            segment_ids=tuple(own.segment_id for own in going),
            tokens=sum(len(own.info.prompt_tokens) for own in going),
            bytes=sum(own.file_bytes for own in going),
            writes=given_up,
            unpinned=unpinned,
        )


def is_in(
    segment: StoredSegment, tree: StoredTree, namespace: str | None, tokens: Tokens | None
) -> bool:
    """Whether a segment of the tree has the end of a prefix or tokens behind it; see `Purge`."""
    if namespace not in (None, segment.info.namespace):
        return False
    if namespace is None or tokens is None or not len(tokens):
        return True
    # Go up to the segment with the prefix's last token; no tokens are compared on the way.
    while segment.parent is not None and segment.info.prefix_len >= len(tokens):
        segment = segment.parent
    return segment in tree.ends(namespace, tokens)
