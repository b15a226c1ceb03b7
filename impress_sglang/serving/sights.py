"""Counts how often prefixes were asked for lately: one asked for once is not worth a write.

On many servers most prompts are never sent again, and storing them would wear the drive for
nothing. So of a request only those first tokens are stored that other requests had as well. A
counting sketch remembers them in fixed memory (a count-min sketch with conservative updates, whose
counts are halved now and then, as in TinyLFU: Einziger, Friedman, Manes, ACM ToS 2017). It never
counts too little between two halvings; if it counts too much, something is stored too early.

Where text that is not a prefix is reused, windows of it are counted in the same way.

Replicas of one server count together, in memory that their parent has made: nothing has a name or
has to be removed. They do not lock it. Of what two count at the same moment, one may be lost.
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
"""Where memory is that several processes count in: a process, its file descriptor, a size."""


def new_memory(columns: int = _COLUMNS) -> Memory:
    """Memory in which nothing was counted; `columns`, a power of two, are those of a sketch."""
    assert columns & (columns - 1) == 0
    memory = np.zeros(_HEAD + _ROWS * columns, np.uint8)
    memory[:_SEED] = np.frombuffer(secrets.token_bytes(_SEED), np.uint8)
    return memory


def shared_memory(ranks: int, columns: int = _COLUMNS) -> Place:
    """Make memory for several processes of this user, as long as this one lives, of `ranks`."""
    size = _HEAD + _ROWS * columns
    file = os.memfd_create(_NAME)
    os.truncate(file, ranks * size)
    for rank in range(ranks):
        os.pwrite(file, secrets.token_bytes(_SEED), rank * size)
    return os.getpid(), file, size


def memory_at(place: Place, rank: int) -> Memory:
    """The memory of one rank, in the process of any of its replicas.

    Raises:
        OSError: this process may not look into the one that made it, or sees another one.
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


class Sights:
    """Counts prefixes by their tokens, in 16 MiB; one thread."""

    def __init__(self, min_sightings: int, memory: Memory | None = None) -> None:
        """`min_sightings` sights, from 2 to 255, make a prefix worth storing.

        In `memory`, others may count as well. Counts are halved when a quarter as many new prefixes
        have come as it has columns.
        """
        assert 2 <= min_sightings <= 255
        memory = new_memory() if memory is None else memory
        self._min_sightings = min_sightings
        self._counts = memory[_HEAD:].reshape(_ROWS, -1)
        self._new = memory[_SEED:_HEAD].view(np.int64)
        # Keyed, so that nobody can tell which prompts are counted together.
        self._hashes = PrefixHashes(memory[:_SEED].tobytes())

    def note(self, namespace: str, tokens: Tokens, first: int = 0, *, count: bool = True) -> int:
        """Note a request with these tokens, int32 [n], from its start.

        The `first` of them were noted for this request before. `count`: whether this is a request
        to be counted; False only looks.

        Returns how many of the first tokens were seen often enough, this time included if counted.
        """
        seen = self._see(self._hashes.of(namespace, tokens), first // BLOCK_TOKENS, count=count)
        rare = np.flatnonzero(seen < self._min_sightings)
        return int(rare[0] if len(rare) else len(seen)) * BLOCK_TOKENS

    def note_text(
        self, namespace: str, tokens: Tokens, *, count: bool = True
    ) -> tuple[Indices, Flags]:
        """Note the text of a request, int32 [n], wherever it stands; `count` as in `note`.

        Returns:
            Where windows of `BLOCK_TOKENS` tokens begin, ascending, int64 [w], and whether each
            was seen often enough, this time included if counted, bool [w].
        """
        starts, hashes = self._hashes.windows(namespace, tokens)
        # Each distinct window counts once per request.
        hashes, places = np.unique(hashes, return_inverse=True)
        return starts, (self._see(hashes, 0, count=count) >= self._min_sightings)[places]

    def _see(self, hashes: Hashes, first: int, *, count: bool) -> npt.NDArray[np.uint8]:
        """How often hashes were seen, uint8 [n]; if `count`, those from `first` on count now."""
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
