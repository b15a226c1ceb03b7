"""Counts how often prefixes were requested lately: one requested once is not worth a write.

On many servers most prompts are never sent again, and storing them would wear the drive for
nothing. So only the leading tokens that a request shares with others are stored. A sketch counts
them in fixed memory (a count-min sketch with conservative updates, whose counts are halved
periodically, as in TinyLFU: Einziger, Friedman, Manes, ACM ToS 2017). It never counts too little
between two halvings; if it counts too much, a prefix is stored too early.

Where text that is not a prefix is reused, windows of it are counted in the same way.

Replicas of one server count together, in memory made by their parent, which has no name and need
not be removed. They do not lock it. If two count at the same moment, one count may be lost.
"""

from __future__ import annotations

import mmap
import os
import secrets
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from impress_sglang.loops.types import Flags, Indices
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS, Hashes, PrefixHashes

_ROWS = 4
_COLUMNS = 1 << 22
_EACH_ROW = np.arange(_ROWS)[:, None]
# A seed, then how many new prefixes were counted since the last halving.
_SEED, _HEAD = 16, 24
_NAME = "impress-counts"

Memory: TypeAlias = npt.NDArray[np.uint8]
"""A seed, and the counts that begin with it, [24 + 4 x columns]."""
Place: TypeAlias = tuple[int, int, int]
"""Address of memory in which several processes count: process id, file descriptor, size."""


def new_memory(columns: int = _COLUMNS) -> Memory:
    """Make memory with all counts 0; `columns`, a power of two, is the width of the sketch."""
    assert columns & (columns - 1) == 0
    memory = np.zeros(_HEAD + _ROWS * columns, np.uint8)
    memory[:_SEED] = np.frombuffer(secrets.token_bytes(_SEED), np.uint8)
    return memory


def shared_memory(ranks: int, columns: int = _COLUMNS) -> Place:
    """Make memory of `ranks` for processes of this user; it exists as long as this process."""
    size = _HEAD + _ROWS * columns
    file = os.memfd_create(_NAME)
    os.truncate(file, ranks * size)
    for rank in range(ranks):
        os.pwrite(file, secrets.token_bytes(_SEED), rank * size)
    return os.getpid(), file, size


def memory_at(place: Place, rank: int) -> Memory:
    """Map the memory of one rank, in the process of any of its replicas.

    Raises:
        OSError: this process may not access the one that made it, or sees another one.
    """
    process, number, size = place
    path = f"/proc/{process}/fd/{number}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(f"{path} is not memory for counts")
    file = os.open(path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(file, 0), np.uint8, size, rank * size)
    finally:
        os.close(file)


class PrefixFrequencySketch:
    """Counts prefixes by their tokens, in 16 MiB; one thread."""

    def __init__(self, min_sightings: int, memory: Memory | None = None) -> None:
        """A prefix counted `min_sightings` times, from 2 to 255, is worth storing.

        Other processes may count in `memory`, too. Counts are halved when the number of new
        prefixes reaches a quarter of its columns.
        """
        assert 2 <= min_sightings <= 255
        memory = new_memory() if memory is None else memory
        self._min_sightings = min_sightings
        self._counts = memory[_HEAD:].reshape(_ROWS, -1)
        self._new = memory[_SEED:_HEAD].view(np.int64)
        # Keyed, so that users cannot predict which prompts share counters.
        self._hashes = PrefixHashes(memory[:_SEED].tobytes())

    def count_prefix(
        self, namespace: str, tokens: Tokens, first: int = 0, *, count: bool = True
    ) -> int:
        """Count a request with these tokens, int32 [n], from its start.

        The `first` of them were counted for this request before. `count`: whether to count the
        request; False only looks it up.

        Returns the number of leading tokens seen often enough, including this time if counted.
        """
        hashes = self._hashes.of(namespace, tokens)
        seen = self._count_hashes(hashes, first // BLOCK_TOKENS, count=count)
        rare = np.flatnonzero(seen < self._min_sightings)
        return int(rare[0] if len(rare) else len(seen)) * BLOCK_TOKENS

    def count_text(
        self, namespace: str, tokens: Tokens, *, count: bool = True
    ) -> tuple[Indices, Flags]:
        """Count the text of a request, int32 [n], at any position; `count` as in `count_prefix`.

        Returns:
            Starts of windows of `BLOCK_TOKENS` tokens, ascending, int64 [w], and whether each was
            seen often enough, including this time if counted, bool [w].
        """
        starts, hashes = self._hashes.windows(namespace, tokens)
        # Each distinct window counts once per request.
        hashes, places = np.unique(hashes, return_inverse=True)
        return starts, (self._count_hashes(hashes, 0, count=count) >= self._min_sightings)[places]

    def _count_hashes(self, hashes: Hashes, first: int, *, count: bool) -> npt.NDArray[np.uint8]:
        """Return counts of hashes, uint8 [n]; if `count`, those from `first` on are counted now."""
        rows = self._hashes.rows(hashes, _ROWS)
        columns = (rows & np.uint64(self._counts.shape[1] - 1)).astype(np.int64)
        if self._new[0] >= self._counts.shape[1] // 4:
            self._new[0] = 0
            self._counts >>= 1
        seen = self._counts[_EACH_ROW, columns].min(0, initial=255)
        if count:
            again = slice(first, None)
            self._new[0] += np.count_nonzero(seen[again] == 0)
            seen[again] = np.minimum(seen[again], 254) + 1
            # Hashes of one request may share a counter.
            np.maximum.at(self._counts, (_EACH_ROW, columns[:, again]), seen[again])
        return seen
