"""Prefixes that an operator has pinned: the quota never evicts what is stored of them.

A pin is a prefix and not a file, so it outlasts reordering, damage and restarts: KVs of a pinned
prefix that are stored again are pinned again. The best stored KVs of its tokens are what is pinned.
"""

from __future__ import annotations

import json
import logging
import math
import time

import numpy as np

from impress_sglang.storage.directory import PINS, StoreDirectory
from impress_sglang.storage.quality import ANYTHING
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.disk_worker import DiskWorker
from impress_sglang.store.journal import decoded, encoded
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

logger = logging.getLogger(__name__)

MOST_PINS = 256
# Seconds between two looks for what is stored of pinned prefixes.
_LOOK_SECONDS = 1.0


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
        # When prefixes were pinned, by namespace and the bytes of their tokens.
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
        if refusal is None and (namespace, tokens.tobytes()) not in self._pins:
            self._pins[namespace, tokens.tobytes()] = time.time()
            self._held |= self._resolve(namespace, tokens)[1]
            self._write()
        return refusal

    def refusal(self, namespace: str, tokens: Tokens) -> str | None:
        """Why a prefix cannot be pinned, or None."""
        if (namespace, tokens.tobytes()) in self._pins:
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
        begin = b"" if tokens is None else tokens.tobytes()
        going = [
            (name, own)
            for (name, own), at in self._pins.items()
            if namespace in (None, name) and own.startswith(begin) and at <= before
        ]
        for pin in going:
            del self._pins[pin]
        if going:
            self._look()
            self._write()
        return len(going)

    def longest(self, namespace: str, tokens: Tokens) -> int:
        """How many of these tokens the longest pin has that they begin with."""
        prompt = tokens.tobytes()
        own = [pin for name, pin in self._pins if name == namespace and prompt.startswith(pin)]
        return max(map(len, own), default=0) // tokens.itemsize

    def summary(self) -> dict[str, int]:
        """Number of pinned prefixes, and their bytes on SSD."""
        return {"prefixes": len(self._pins), "bytes": self.num_bytes}

    def _look(self) -> None:
        """Look up which segments have the pinned prefixes now."""
        self._looked_at, self._held = time.monotonic(), set[StoredSegment]()
        for namespace, tokens in self._pins:
            self._held |= self._resolve(namespace, np.frombuffer(tokens, np.int32))[1]

    def _resolve(self, namespace: str, tokens: Tokens) -> tuple[int, set[StoredSegment]]:
        """How many of these tokens are stored, and the segments that have them and their state."""
        known = self._tree.match(namespace, tokens, least=ANYTHING)
        spans = (*known.spans, *self._tree.state_behind(known))
        return known.num_tokens, {span.segment for span in spans}

    def _read(self) -> dict[tuple[str, bytes], float]:
        if (content := self._directory.get(PINS)) is None:
            return {}
        try:
            return {
                (str(own["namespace"]), decoded(own["tokens"]).tobytes()): float(own["at"])
                for own in json.loads(content)
            }
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            path = self._directory.path / PINS
            logger.warning("%s is damaged (%s): nothing is pinned", path, error)
            return {}

    def _write(self) -> None:
        fields = [
            {"namespace": name, "tokens": encoded(np.frombuffer(own, np.int32)), "at": at}
            for (name, own), at in self._pins.items()
        ]
        self._worker.submit(self._worker.keep, PINS, json.dumps(fields).encode())
