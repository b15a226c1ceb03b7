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
from impress_sglang.store.journal import text_to_tokens, tokens_to_text
from impress_sglang.store.miss_log import MissCause
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

logger = logging.getLogger(__name__)

MAX_PINS = 256
# Seconds between two lookups of the segments of pinned prefixes.
_REFRESH_SECONDS = 1.0
# Maximum number of segments that one step removes, and of those at whose age it looks.
MAX_SEGMENTS = 64
_MAX_CANDIDATES = 4096
MAX_JOBS = 8

Name = TypeVar("Name", bound=Hashable)
Job = TypeVar("Job")


class Pins:
    """Prefixes of one store that the quota never evicts. Thread: the store's.

    A pin is a prefix and not a file, so it outlasts reordering, damage and restarts: KVs of a
    pinned prefix that are stored again are pinned again. Of several qualities, the best stored KVs
    are pinned.
    """

    def __init__(
        self, directory: StoreDirectory, worker: DiskWorker, tree: StoredTree, max_bytes: int
    ) -> None:
        """Read the pins of an earlier process; nothing else may use the arguments yet.

        `max_bytes`: limit on the bytes of all pinned prefixes on SSD.

        Raises:
            OSError: the directory cannot be read.
        """
        self._directory, self._worker, self._tree = directory, worker, tree
        self._max_bytes = max_bytes
        # Times of pinning, by namespace and the bytes of a prefix's tokens.
        self._pins = self._read_pins()
        self._refresh()
        if self.num_bytes > max_bytes:
            logger.warning("pinned prefixes take %.1f MB, which is much", self.num_bytes / 1e6)

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, segment_id: str) -> bool:
        """Whether a segment has tokens of a pinned prefix."""
        if not self._pins:
            return False
        if time.monotonic() - self._refreshed_at > _REFRESH_SECONDS:
            self._refresh()
        return self._tree.get(segment_id) in self._pinned

    @property
    def num_bytes(self) -> int:
        return sum(segment.file_bytes for segment in self._pinned if segment.on_disk)

    def pin(self, namespace: str, tokens: Tokens) -> str | None:
        """Pin a prefix, int32 [n]; returns None, or the reason why it cannot be pinned.

        `namespace`: result of `PrefixStore.namespace`.
        """
        refusal = self.refusal(namespace, tokens)
        if refusal is None and (namespace, tokens.tobytes()) not in self._pins:
            self._pins[namespace, tokens.tobytes()] = time.time()
            self._pinned |= self._resolve(namespace, tokens)[1]
            self._write_pins()
        return refusal

    def refusal(self, namespace: str, tokens: Tokens) -> str | None:
        if (namespace, tokens.tobytes()) in self._pins:
            return None
        num_stored, segments = self._resolve(namespace, tokens)
        if not len(tokens) or num_stored < len(tokens):
            return f"{num_stored} of its {len(tokens)} tokens are stored: warm it first"
        if len(self._pins) == MAX_PINS:
            return f"{MAX_PINS} prefixes are pinned, and no more can be: unpin one first"
        new_bytes = sum(segment.file_bytes for segment in segments - self._pinned)
        if self.num_bytes + new_bytes > self._max_bytes:
            return (
                f"pinned prefixes would take {(self.num_bytes + new_bytes) / 1e9:.3f} GB, more "
                "than half of --impress-ssd-gb: unpin another one first, or give the store more "
                "room"
            )
        return None

    def unpin(
        self, namespace: str | None = None, tokens: Tokens | None = None, before: float = math.inf
    ) -> int:
        """Unpin the prefixes that begin with these tokens; returns their number.

        `namespace`, `tokens`: None for all. `before`: unpin only prefixes pinned by this time.
        """
        begin = b"" if tokens is None else tokens.tobytes()
        pins = [
            (name, tokens_bytes)
            for (name, tokens_bytes), pinned_at in self._pins.items()
            if namespace in (None, name) and tokens_bytes.startswith(begin) and pinned_at <= before
        ]
        for pin in pins:
            del self._pins[pin]
        if pins:
            self._refresh()
            self._write_pins()
        return len(pins)

    def longest(self, namespace: str, tokens: Tokens) -> int:
        """Return the length of the longest pinned prefix of these tokens."""
        prompt = tokens.tobytes()
        pins = [pin for name, pin in self._pins if name == namespace and prompt.startswith(pin)]
        return max(map(len, pins), default=0) // tokens.itemsize

    def summary(self) -> dict[str, int]:
        return {"prefixes": len(self._pins), "bytes": self.num_bytes}

    def _refresh(self) -> None:
        self._refreshed_at, self._pinned = time.monotonic(), set[StoredSegment]()
        for namespace, tokens in self._pins:
            # What builds on a segment that a second look may clear stays as well.
            prefix = np.frombuffer(tokens, np.int32)
            self._pinned |= self._resolve(namespace, prefix, only_ready=False)[1]

    def _resolve(
        self, namespace: str, tokens: Tokens, *, only_ready: bool = True
    ) -> tuple[int, set[StoredSegment]]:
        """Return the number of stored tokens, and the segments of these and of their state."""
        match = self._tree.match(namespace, tokens, min_quality=ANYTHING, only_ready=only_ready)
        spans = (*match.spans, *self._tree.end_state_of(match))
        return match.num_tokens, {span.segment for span in spans}

    def _read_pins(self) -> dict[tuple[str, bytes], float]:
        if (content := self._directory.get(PINS)) is None:
            return {}
        try:
            return {
                (str(pin["namespace"]), text_to_tokens(pin["tokens"]).tobytes()): float(pin["at"])
                for pin in json.loads(content)
            }
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            path = self._directory.path / PINS
            logger.warning("%s is damaged (%s): nothing is pinned", path, error)
            return {}

    def _write_pins(self) -> None:
        fields = [
            {
                "namespace": name,
                "tokens": tokens_to_text(np.frombuffer(tokens_bytes, np.int32)),
                "at": at,
            }
            for (name, tokens_bytes), at in self._pins.items()
        ]
        self._worker.submit(self._worker.put_small_file, PINS, json.dumps(fields).encode())


class MultiStepJobs(dict[Name, Job]):
    """Jobs by the name of an order, each continued by its caller until it is done.

    A caller may stop without notice. So the oldest job is dropped when there are too many, and
    begins again if its caller continues after all.
    """

    def get_or_begin(self, name: Name, begin: Callable[[], Job]) -> Job:
        if name not in self:
            if len(self) == MAX_JOBS:
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
        self._prefix, self._unpins = (namespace, tokens), older_than is None
        self._before = math.inf if older_than is None else time.time() - older_than
        # With `older_than`: segments whose age is still to be looked at.
        self._old_segments = collections.deque[StoredSegment]()
        self._begun = False
        self.unfinished = True
        """Whether another step is needed."""

    @classmethod
    def from_peer(cls, order: Mapping[str, Any]) -> Purge:
        """Return the purge that another server has ordered, with the time of that order.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: it is wrong, or of another version.
        """
        namespace, text = order["namespace"], order["tokens"]
        tokens, before = None if text is None else text_to_tokens(text), float(order["before"])
        has_prefix = tokens is None or (namespace is not None and len(tokens) > 0)
        if not (isinstance(namespace, str | None) and has_prefix and before < math.inf):
            raise ValueError(f"{order!r:.100}")
        purge = cls(namespace, tokens)
        purge._before, purge._unpins = before, order["unpins"]
        return purge

    def step(self, store: Any, max_segments: int = MAX_SEGMENTS) -> Counter[str]:
        """Remove some segments of a `PrefixStore`; the first step sends the order to other servers.

        With `older_than` and a prefix, the first step visits all segments behind it. Files are
        unlinked in the background, in order with writes. Running writes are abandoned, or their
        files removed if it is too late for that. Pins of the prefix and all files in quarantine are
        removed, too.

        Returns:
            Numbers of removed `segments`, `tokens` and `bytes` on SSD, of abandoned `writes`, and
            of `unpinned` prefixes.
        """
        if not self.unfinished:
            return Counter()
        # Since the last poll, segments may have been published, or replaced under another id.
        store.poll()
        if not self._begun:
            now, (namespace, tokens) = time.time(), self._prefix
            order = {
                "at": now,
                "before": min(self._before, now),
                "unpins": self._unpins,
                "namespace": namespace,
                "tokens": None if tokens is None else tokens_to_text(tokens),
            }
            store.send_order(order)
        return self.apply_locally(store, max_segments)

    def apply_locally(self, store: Any, max_segments: int = MAX_SEGMENTS) -> Counter[str]:
        """Take a step without sending the order, within a poll."""
        first, self._begun = not self._begun, True
        tree, prefix, before = store.tree, self._prefix, self._before
        writes, unpinned = list[StoredSegment](), 0
        if first:
            if self._unpins:
                unpinned = store.pins.unpin(*prefix, before)
            store.unattached.ban_unattached(*prefix, min(before, time.time()))
            if before < math.inf:
                # The order has all of a namespace at hand.
                namespace, tokens = prefix
                self._old_segments += (
                    tree.order.of(namespace) if tokens is None else tree.subtree(*prefix)
                )
        # Segments of the step before are no longer in the tree.
        num_candidates = min(len(self._old_segments), _MAX_CANDIDATES)
        candidates = (self._old_segments.popleft() for _ in range(num_candidates))
        if before == math.inf:
            candidates = tree.subtree(*prefix)
        remaining = (
            segment
            for segment in candidates
            if segment.on_disk
            and segment.written <= before
            and tree.get(segment.segment_id) is segment
        )
        removed = list(itertools.islice(remaining, max_segments))
        next_segment = next(remaining, None)
        if next_segment is not None and before < math.inf:
            self._old_segments.appendleft(next_segment)
        self.unfinished = next_segment is not None or bool(self._old_segments)
        if self._unpins and (first or not self.unfinished):
            # The first step abandons all writes, as they read slots that are to be freed; the last
            # one those begun since. An order may arrive again: newer writes stay.
            earlier = (write for write in store.writes if write.written <= before)
            writes = [write for write in earlier if is_in(write, tree, *prefix)]
        # Dependents first.
        removed.sort(key=lambda segment: -segment.info.prefix_len)
        num_abandoned = store.writes.discard([*writes, *removed], MissCause.PURGED)
        return Counter(
            segments=len(removed),
            tokens=sum(len(segment.info.prompt_tokens) for segment in removed),
            bytes=sum(segment.file_bytes for segment in removed),
            writes=num_abandoned,
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
