"""Remembers why prefixes are no longer stored, so that a miss can be explained.

A table of fixed size, indexed by the hash of each removed prefix of whole blocks; later entries may
overwrite earlier ones. It contains no prompt, and a lookup needs the same tokens in the same
namespace.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable

import numpy as np

from impress_sglang.loops.types import Indices
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS, Hashes, PrefixHashes
from impress_sglang.store.stored import StoredSegment

# Number of prefixes that are remembered, a power of two: those of four million tokens, in 1.1 MB.
_PLACES = 1 << 16


class MissCause(enum.Enum):
    """Reason why tokens are no longer stored, or were not accepted."""

    EVICTED = 0
    DAMAGED = 1
    NO_ROOM = 2
    PURGED = 3
    EXPIRED = 4
    WRITE_BUDGET = 5
    NOT_CODABLE = 6


@dataclasses.dataclass(frozen=True, slots=True)
class MissRecord:
    """Tokens of a prompt that are not stored; the first of them for `seconds`."""

    cause: MissCause
    num_tokens: int
    seconds: float


class MissLog:
    """Reasons why tokens of one store are missing; owned by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._hashes = PrefixHashes()
        self._clock = clock
        self._names = np.zeros(_PLACES, np.uint64)
        self._times = np.zeros(_PLACES)
        self._causes = np.zeros(_PLACES, np.uint8)

    def record(self, segment: StoredSegment, cause: MissCause) -> None:
        """Record a segment that is about to be removed from the tree."""
        if len((info := segment.info).prompt_tokens):
            self.record_tokens(info.namespace, segment.prompt(), cause, info.prefix_len)

    def record_tokens(
        self, namespace: str, tokens: Tokens, cause: MissCause, start: int = 0
    ) -> None:
        """Record that tokens [start, n) of a prompt, int32 [n], were removed or not stored."""
        names, slots = self._places(namespace, tokens, start)
        self._names[slots] = names
        self._times[slots] = self._clock()
        self._causes[slots] = cause.value

    def find(self, namespace: str, tokens: Tokens, start: int) -> MissRecord | None:
        """Return why a prompt is not stored from token `start` on; None if that is not known."""
        names, slots = self._places(namespace, tokens, start)
        matches = np.flatnonzero(self._names[slots] == names)
        if not len(matches):
            return None
        first = slots[matches[0]]
        stop = (start // BLOCK_TOKENS + int(matches[-1]) + 1) * BLOCK_TOKENS
        seconds = self._clock() - float(self._times[first])
        return MissRecord(MissCause(int(self._causes[first])), stop - start, seconds)

    def _places(self, namespace: str, tokens: Tokens, start: int) -> tuple[Hashes, Indices]:
        names = self._hashes.of(namespace, tokens)[start // BLOCK_TOKENS :]
        return names, (names & np.uint64(len(self._names) - 1)).astype(np.int64)
