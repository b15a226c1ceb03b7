"""Orders of an operator: prefixes to keep (pins), and to remove, in steps (purges)."""

from __future__ import annotations

import collections
import itertools
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

from impress_sglang.storage.directory import PINS, StoreDirectory
from impress_sglang.storage.quality import ANYTHING
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.disk_worker import DiskWorker
from impress_sglang.store.journal import decoded, encoded
from impress_sglang.store.miss_log import MissCause
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

logger = logging.getLogger(__name__)

MOST_PINS = 256
# Seconds between two lookups of the segments of pinned prefixes.
_LOOK_SECONDS = 1.0
# Maximum number of segments that one step removes.
MOST_SEGMENTS = 64
MOST_JOBS = 8

Name = TypeVar("Name", bound=Hashable)
Job = TypeVar("Job")


class Pins:
    """Prefixes of one store that the quota never evicts. Thread: the store's.

    A pin is a prefix and not a file, so it outlasts reordering, damage and restarts: KVs of a
    pinned prefix that are stored again are pinned again. Of several qualities, the best stored KVs
    are pinned.
    """

    def __init__(
        self, directory: StoreDirectory, worker: DiskWorker, tree: StoredTree, most_bytes: int
    ) -> None:
        """Read the pins of an earlier process; nothing else may use the arguments yet.

        `most_bytes`: limit on the bytes of all pinned prefixes on SSD.

        Raises:
            OSError: the directory cannot be read.
        """
        self._directory, self._worker, self._tree = directory, worker, tree
        self._most_bytes = most_bytes
        # Times of pinning, by namespace and the bytes of a prefix's tokens.
        self._pins = self._read()
        self._look()
        if self.num_bytes > most_bytes:
            logger.warning("pinned prefixes take %.1f MB, which is much", self.num_bytes / 1e6)

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, segment_id: str) -> bool:
        """Whether a segment has tokens of a pinned prefix."""
        if not self._pins:
            return False
        if time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self._look()
        return self._tree.get(segment_id) in self._held

    @property
    def num_bytes(self) -> int:
        return sum(segment.file_bytes for segment in self._held if segment.on_disk)

    def pin(self, namespace: str, tokens: Tokens) -> str | None:
        """Pin a prefix, int32 [n]; returns None, or the reason why it cannot be pinned.

        `namespace`: result of `PrefixStore.namespace`.
        """
        refusal = self.refusal(namespace, tokens)
        if refusal is None and (namespace, tokens.tobytes()) not in self._pins:
            self._pins[namespace, tokens.tobytes()] = time.time()
            self._held |= self._resolve(namespace, tokens)[1]
            self._write()
        return refusal

    def refusal(self, namespace: str, tokens: Tokens) -> str | None:
        if (namespace, tokens.tobytes()) in self._pins:
            return None
        found, segments = self._resolve(namespace, tokens)
        if not len(tokens) or found < len(tokens):
            return f"{found} of its {len(tokens)} tokens are stored: warm it first"
        if len(self._pins) == MOST_PINS:
            return f"{MOST_PINS} prefixes are pinned, and no more can be: unpin one first"
        new = sum(segment.file_bytes for segment in segments - self._held)
        if self.num_bytes + new > self._most_bytes:
            return (
                f"pinned prefixes would take {(self.num_bytes + new) / 1e9:.3f} GB, more than half "
                "of --impress-ssd-gb: unpin another one first, or give the store more room"
            )
        return None

    def unpin(
        self,
        namespace: str | None = None,
        tokens: Tokens | None = None,
        before: float = math.inf,
    ) -> int:
        """Unpin the prefixes that begin with these tokens; returns their number.

        `namespace`, `tokens`: None for all. `before`: unpin only prefixes pinned by this time.
        """
        begin = b"" if tokens is None else tokens.tobytes()
        going = [
            (name, pinned)
            for (name, pinned), at in self._pins.items()
            if namespace in (None, name) and pinned.startswith(begin) and at <= before
        ]
        for pin in going:
            del self._pins[pin]
        if going:
            self._look()
            self._write()
        return len(going)

    def longest(self, namespace: str, tokens: Tokens) -> int:
        """Return the length of the longest pinned prefix of these tokens."""
        prompt = tokens.tobytes()
        pins = [pin for name, pin in self._pins if name == namespace and prompt.startswith(pin)]
        return max(map(len, pins), default=0) // tokens.itemsize

    def summary(self) -> dict[str, int]:
        return {"prefixes": len(self._pins), "bytes": self.num_bytes}

    def _look(self) -> None:
        """Look up the segments that have the pinned prefixes now."""
        self._looked_at, self._held = time.monotonic(), set[StoredSegment]()
        for namespace, tokens in self._pins:
            self._held |= self._resolve(namespace, np.frombuffer(tokens, np.int32))[1]

    def _resolve(self, namespace: str, tokens: Tokens) -> tuple[int, set[StoredSegment]]:
        """Return the number of stored tokens, and the segments of these and of their state."""
        known = self._tree.match(namespace, tokens, least=ANYTHING)
        spans = (*known.spans, *self._tree.state_behind(known))
        return known.num_tokens, {span.segment for span in spans}

    def _read(self) -> dict[tuple[str, bytes], float]:
        if (content := self._directory.get(PINS)) is None:
            return {}
        try:
            return {
                (str(pin["namespace"]), decoded(pin["tokens"]).tobytes()): float(pin["at"])
                for pin in json.loads(content)
            }
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            path = self._directory.path / PINS
            logger.warning("%s is damaged (%s): nothing is pinned", path, error)
            return {}

    def _write(self) -> None:
        fields = [
            {"namespace": name, "tokens": encoded(np.frombuffer(pinned, np.int32)), "at": at}
            for (name, pinned), at in self._pins.items()
        ]
        self._worker.submit(self._worker.keep, PINS, json.dumps(fields).encode())


class MultiStepJobs(dict[Name, Job]):
    """Jobs by the name of an order, each continued by its caller until it is done.

    A caller may stop without notice. So the oldest job is dropped when there are too many, and
    begins again if its caller continues after all.
    """

    def go_on(self, name: Name, begin: Callable[[], Job]) -> Job:
        """Return the job of this name, after beginning it if necessary."""
        if name not in self:
            if len(self) == MOST_JOBS:
                del self[next(iter(self))]
            self[name] = begin()
        return self[name]


class Purge:
    """Removes, in steps, all stored tokens of a prefix and of prompts that begin with it.

    Between two steps requests are served; tokens of the prefix that they store are removed, too.
    Other servers of the model get the order, and remove what they had stored by its time.
    """

    def __init__(
        self,
        namespace: str | None = None,
        tokens: Tokens | None = None,
        older_than: float | None = None,
    ) -> None:
        """Prepare a purge.

        Args:
            namespace: result of `PrefixStore.namespace`; None for all namespaces.
            tokens: the prefix, int32 [n], n > 0, in a namespace; None for all of the namespace.
            older_than: remove only segments at least this many seconds old, and no pins.
        """
        assert tokens is None or (namespace is not None and len(tokens))
        self._place, self._unpins = (namespace, tokens), older_than is None
        self._before = math.inf if older_than is None else time.time() - older_than
        # With `older_than`: segments that are still to be removed.
        self._old = collections.deque[StoredSegment]()
        self._begun = False
        self.left = True
        """Whether another step is needed."""

    @classmethod
    def told(cls, order: Mapping[str, Any]) -> Purge:
        """Return the purge that another server has ordered, with the time of that order."""
        text = order["tokens"]
        purge = cls(order["namespace"], None if text is None else decoded(text))
        purge._before, purge._unpins = float(order["before"]), order["unpins"]
        return purge

    def step(self, store: Any, most: int = MOST_SEGMENTS) -> Counter[str]:
        """Remove some segments of a `PrefixStore`; the first step sends the order to other servers.

        With `older_than`, only the first step visits all segments. Files are unlinked in the
        background, in order with writes. Running writes are abandoned, or their files removed if it
        is too late for that. Pins of the prefix and all files in quarantine are removed, too.

        Returns:
            Numbers of removed `segments`, `tokens` and `bytes` on SSD, of abandoned `writes`, and
            of `unpinned` prefixes.
        """
        if not self.left:
            return Counter()
        # Since the last poll, segments may have been published, or replaced under another id.
        store.poll()
        if not self._begun:
            now, (namespace, tokens) = time.time(), self._place
            order = {
                "at": now,
                "before": min(self._before, now),
                "unpins": self._unpins,
                "namespace": namespace,
                "tokens": None if tokens is None else encoded(tokens),
            }
            store.tell(order)
        return self.obey(store, most)

    def obey(self, store: Any, most: int = MOST_SEGMENTS) -> Counter[str]:
        """Take a step without sending the order, within a poll."""
        first, self._begun = not self._begun, True
        tree, place, before, old = store.tree, self._place, self._before, self._old
        writes, unpinned = list[StoredSegment](), 0
        if first:
            if self._unpins:
                unpinned = store.pins.unpin(*place, before)
            store.places.refuse_unplaced(*place, min(before, time.time()))
            if before < math.inf:
                old += (segment for segment in tree.below(*place) if segment.written <= before)
        # Segments of the step before are no longer in the tree.
        found = (old.popleft() for _ in range(len(old)))
        if before == math.inf:
            found = tree.below(*place)
        there = (
            segment
            for segment in found
            if segment.on_disk and tree.get(segment.segment_id) is segment
        )
        going, more = list(itertools.islice(there, most)), next(there, None)
        self.left = more is not None
        if more is not None and before < math.inf:
            old.appendleft(more)
        if self._unpins and (first or not self.left):
            # The first step abandons all writes, as they read slots that are to be freed; the last
            # one those begun since. An order may arrive again: newer writes stay.
            earlier = (write for write in store.writes if write.written <= before)
            writes = [write for write in earlier if is_in(write, tree, *place)]
        # Dependents first.
        going.sort(key=lambda segment: -segment.info.prefix_len)
        given_up = store.writes.discard([*writes, *going], MissCause.PURGED)
        return Counter(
            segments=len(going),
            tokens=sum(len(segment.info.prompt_tokens) for segment in going),
            bytes=sum(segment.file_bytes for segment in going),
            writes=given_up,
            unpinned=unpinned,
        )


def is_in(
    segment: StoredSegment, tree: StoredTree, namespace: str | None, tokens: Tokens | None
) -> bool:
    """Whether a segment of the tree has the end of a prefix or tokens after it; see `Purge`."""
    if namespace not in (None, segment.info.namespace):
        return False
    if namespace is None or tokens is None or not len(tokens):
        return True
    # Go up to the segment with the prefix's last token, without comparing tokens.
    while segment.parent is not None and segment.info.prefix_len >= len(tokens):
        segment = segment.parent
    return segment in tree.ends(namespace, tokens)
