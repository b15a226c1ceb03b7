"""How often prefixes were asked for lately: what is asked for once is not worth a write.

Most prompts of many servers are never sent again, and a drive would be written to for nothing all
day. So a request is not stored but for its first tokens that others had as well. A counting sketch
remembers that in fixed memory (a count-min sketch with conservative updates, whose counts are
halved now and then, as in TinyLFU: Einziger, Friedman, Manes, ACM ToS 2017). It never counts too
little between two halvings; it seldom counts too much, and then something is stored too early.
"""

from __future__ import annotations

import secrets
import zlib

import numpy as np
import numpy.typing as npt

from impress_sglang.storage.segment import Tokens

# Prefixes are counted at multiples of so many tokens.
SIGHT_TOKENS = 64
_ROWS = 4
_COLUMNS = 1 << 22
_Hashes = npt.NDArray[np.uint64]


class Sights:
    """Counts prefixes by their tokens, in 16 MiB; one thread."""

    def __init__(self, least: int, *, columns: int = _COLUMNS) -> None:
        """`least` sights, from 2 to 255, make a prefix worth storing.

        `columns`, a power of two: a quarter of so many prefixes are remembered.
        """
        assert 2 <= least <= 255 and columns & (columns - 1) == 0
        self._least = least
        self._counts = np.zeros((_ROWS, columns), np.uint8)
        self._new = 0
        # So that nobody can tell which prompts are counted together.
        self._seed = np.uint64(secrets.randbits(64))
        powers = [pow(_ODD, SIGHT_TOKENS - place, 2**64) for place in range(SIGHT_TOKENS)]
        self._powers = np.array(powers, np.uint64)

    def note(self, namespace: str, tokens: Tokens) -> int:
        """A request has these tokens, int32 [n].

        Returns:
            How many of the first ones were seen often enough, this time included.
        """
        columns = self._columns(namespace, tokens)
        if not columns.size:
            return 0
        found = self._counts[_EACH_ROW, columns]
        seen = found.min(0)
        self._new += int(np.count_nonzero(seen == 0))
        counted = np.minimum(seen, 254) + np.uint8(1)
        # Blocks of a request may share a counter.
        np.maximum.at(self._counts, (_EACH_ROW, columns), counted)
        # So full that few are counted with others.
        if self._new >= self._counts.shape[1] // 4:
            self._counts >>= 1
            self._new //= 2
        rare = np.flatnonzero(counted < self._least)
        blocks = int(rare[0]) if len(rare) else len(counted)
        return blocks * SIGHT_TOKENS

    def _columns(self, namespace: str, tokens: Tokens) -> npt.NDArray[np.int64]:
        """Where prefixes of whole blocks are counted, int64 [rows, blocks]."""
        blocks = len(tokens) // SIGHT_TOKENS
        own = tokens[: blocks * SIGHT_TOKENS].reshape(-1, SIGHT_TOKENS).astype(np.uint64)
        # Each block's hash depends on its place, and a prefix has the sum of those of its blocks.
        places = np.arange(1, blocks + 1, dtype=np.uint64) * np.uint64(_ODD)
        start = self._seed + np.uint64(zlib.crc32(namespace.encode()))
        hashes = _mixed(np.cumsum(_mixed(own @ self._powers + places)) + start)
        rows = np.arange(_ROWS, dtype=np.uint64)[:, None] * np.uint64(_ODD)
        mask = np.uint64(self._counts.shape[1] - 1)
        return (_mixed(hashes + rows) & mask).astype(np.int64)


_ODD = 0x9E3779B97F4A7C15
_EACH_ROW = np.arange(_ROWS)[:, None]


def _mixed(values: _Hashes) -> _Hashes:
    """Each value to another one, all bits of which depend on all of its (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
