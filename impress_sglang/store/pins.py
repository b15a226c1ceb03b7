"""Prefixes that an operator has pinned: the quota never evicts what is stored of them.

A pin is a prefix and not a file, so it outlasts reordering, damage and restarts: KVs of a pinned
prefix that are stored again are pinned again. The best stored KVs of its tokens are what is pinned.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time

import numpy as np

from impress_sglang.storage.directory import PINS, StoreDirectory
from impress_sglang.storage.quality import ANYTHING
from impress_sglang.storage.segment import Tokens, common_prefix_len
from impress_sglang.store.disk_worker import DiskWorker
from impress_sglang.store.journal import decoded, encoded
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

logger = logging.getLogger(__name__)

MOST_PINS = 256
# Seconds between two looks for what is stored of pinned prefixes.
_LOOK_SECONDS = 1.0


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
        refusal = self.refusal(namespace, tokens)
        if refusal is None and not self._is_pinned(namespace, tokens):
            self._pins.append(_Pin(namespace, tokens, time.time()))
            self._held |= self._resolve(namespace, tokens)[1]
            self._write()
        return refusal

    def refusal(self, namespace: str, tokens: Tokens) -> str | None:
        """Why a prefix cannot be pinned, or None."""
        if self._is_pinned(namespace, tokens):
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
        return None

    def _is_pinned(self, namespace: str, tokens: Tokens) -> bool:
        return any(
            own.namespace == namespace and np.array_equal(own.tokens, tokens) for own in self._pins
        )

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
