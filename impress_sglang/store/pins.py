"""Prefixes that an operator has pinned: the quota never evicts what is stored of them.

A pin is a prefix and not a file, so it outlasts reordering, damage and restarts: KVs of a pinned
prefix that are stored again are pinned again. The best stored KVs of its tokens are what is pinned.
"""

from __future__ import annotations

import base64
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
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree

logger = logging.getLogger(__name__)

MOST_PINS = 256
# Seconds between two looks for what is stored of pinned prefixes.
_LOOK_SECONDS = 1.0


@dataclasses.dataclass(slots=True)
class _Pin:
    """A prefix in a namespace, and the segments that have its tokens."""

    namespace: str
    tokens: Tokens
    segments: tuple[StoredSegment, ...] = ()
    at: float = dataclasses.field(default_factory=time.time)
    """When it was pinned."""


class Pins:
    """The pins of one store; the store's thread owns them."""

    def __init__(
        self,
        directory: StoreDirectory,
        worker: DiskWorker,
        tree: StoredTree,
        most_bytes: int,
    ) -> None:
        """Read the pins that an earlier process has left; nothing else may run on the parts yet.

        `most_bytes`: limit on the bytes of all pinned prefixes on SSD.

        Raises:
            OSError: the directory cannot be read.
        """
        self._directory = directory
        self._worker = worker
        self._tree = tree
        self._most_bytes = most_bytes
        self._looked_at = 0.0
        self._pins = self._read()
        self._held: set[StoredSegment] = set()
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
        pin = _Pin(namespace, tokens)
        found = self._resolve(pin)
        if not len(tokens) or found < len(tokens):
            return f"{found} of its {len(tokens)} tokens are stored: warm it first"
        if len(self._pins) == MOST_PINS:
            return f"{MOST_PINS} prefixes are pinned, and no more can be: unpin one first"
        new = sum(own.file_bytes for own in pin.segments if own not in self._held)
        if self.num_bytes + new > self._most_bytes:
            return (
                f"pinned prefixes would take {(self.num_bytes + new) / 1e9:.3f} GB, more than half "
                "of --impress-ssd-gb: unpin another one first, or give the store more room"
            )
        self._pins.append(pin)
        self._held.update(pin.segments)
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
        self._looked_at = time.monotonic()
        for pin in self._pins:
            self._resolve(pin)
        self._held = {own for pin in self._pins for own in pin.segments}

    def _resolve(self, pin: _Pin) -> int:
        """Look up the segments of a pin, and its state; returns how many tokens are stored."""
        known = self._tree.match(pin.namespace, pin.tokens, least=ANYTHING)
        spans = (*known.spans, *self._tree.state_behind(known))
        pin.segments = tuple(dict.fromkeys(span.segment for span in spans))
        return known.num_tokens

    def _read(self) -> list[_Pin]:
        found, content = list[_Pin](), self._directory.get(PINS)
        if content is None:
            return found
        try:
            for fields in json.loads(content):
                tokens = np.frombuffer(base64.b64decode(fields["tokens"], validate=True), "<i4")
                pin = _Pin(
                    str(fields["namespace"]), tokens.astype(np.int32), at=float(fields["at"])
                )
                found.append(pin)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            path = self._directory.path / PINS
            logger.warning("%s is damaged (%s): nothing is pinned", path, error)
            return []
        return found

    def _write(self) -> None:
        fields = []
        for pin in self._pins:
            tokens = base64.b64encode(pin.tokens.astype("<i4", copy=False).tobytes()).decode()
            fields.append({"namespace": pin.namespace, "tokens": tokens, "at": pin.at})
        self._worker.submit(self._worker.keep, PINS, json.dumps(fields).encode())
