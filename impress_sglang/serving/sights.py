"""Counts how often prefixes were asked for lately: one asked for once is not worth a write.

On many servers most prompts are never sent again, and storing them would wear the drive for
nothing. So of a request only those first tokens are stored that other requests had as well. A
counting sketch remembers them in fixed memory (a count-min sketch with conservative updates, whose
counts are halved now and then, as in TinyLFU: Einziger, Friedman, Manes, ACM ToS 2017). It never
counts too little between two halvings; if it counts too much, something is stored too early.

Where text that is not a prefix is reused, windows of it are counted in the same way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from impress_sglang.loops.types import Flags, Indices
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS, Hashes, PrefixHashes

_ROWS = 4
_COLUMNS = 1 << 22
_EACH_ROW = np.arange(_ROWS)[:, None]


class Sights:
    """Counts prefixes by their tokens, in 16 MiB; one thread."""

    def __init__(self, least: int, *, columns: int = _COLUMNS) -> None:
        """`least` sights, from 2 to 255, make a prefix worth storing.

        `columns`, a power of two: counts are halved when a quarter as many new prefixes have come.
        """
        assert 2 <= least <= 255 and columns & (columns - 1) == 0
        self._least = least
        self._counts = np.zeros((_ROWS, columns), np.uint8)
        self._new = 0
        # Keyed, so that nobody can tell which prompts are counted together.
        self._hashes = PrefixHashes()

    def note(self, namespace: str, tokens: Tokens, first: int = 0, *, count: bool = True) -> int:
        """Note a request with these tokens, int32 [n].

        Args:
            namespace: keeps the prefixes of other namespaces apart.
            tokens: the prompt from its start.
            first: so many of them were noted for this request before.
            count: whether this is a request to be counted; False only looks.

        Returns:
            How many of the first tokens were seen often enough, this time included if counted.
        """
        seen = self._see(self._hashes.of(namespace, tokens), first // BLOCK_TOKENS, count=count)
        rare = np.flatnonzero(seen < self._least)
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
        return starts, (self._see(hashes, 0, count=count) >= self._least)[places]

    def _see(self, hashes: Hashes, first: int, *, count: bool) -> npt.NDArray[np.uint8]:
        """How often hashes were seen, uint8 [n]; if `count`, those from `first` on count now."""
        rows = self._hashes.rows(hashes, _ROWS)
        columns = (rows & np.uint64(self._counts.shape[1] - 1)).astype(np.int64)
        if self._new >= self._counts.shape[1] // 4:
            self._counts >>= 1
            self._new = 0
        seen = self._counts[_EACH_ROW, columns].min(0, initial=255)
        if count:
            again = slice(first, None)
            self._new += int(np.count_nonzero(seen[again] == 0))
            seen[again] = np.minimum(seen[again], 254) + 1
            # Hashes of one request may share a counter.
            np.maximum.at(self._counts, (_EACH_ROW, columns[:, again]), seen[again])
        return seen
