"""Replacement rules: rank cached chunks.

A rule turns accesses into priorities, which alone determine tiers; they also change while a chunk
is in no cache.
"""

from __future__ import annotations

import abc
import math
import mmap
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from impress_sglang.loops.types import Floats

Ids = npt.NDArray[np.int64]

# Accesses are counted up to this number, far beyond the last one that changes a weight.
MAX_ACCESSES = 1000
# Weight of the newest access in an average; the first ones have equal weight.
AVERAGE_WEIGHT = 0.1
# The turn of a chunk for which no request waits. Turns are from 0 to LAST_TURN, and a chunk with
# one is worth more than any priority of a rule: _AWAITED at least.
NOT_AWAITED = -1
LAST_TURN = 2**52
_AWAITED = 2**62
# The share of a chunk that is expected to have no important rows.
MIN_SHARE = 1e-6
# Bits of a score's fraction in its priority. The bias is larger than the magnitude of
# any negative exponent of a float.
_FRACTION_BITS, _BIAS = 32, 1100
# Entries for which a table reserves address space; one with more is copied when it grows.
RESERVED_ENTRIES = 1 << 30
# Python has this constant from 3.13 on.
_MAP_NORESERVE = 0x4000
_T = TypeVar("_T", bound=np.generic)


def grown(table: npt.NDArray[_T], size: int) -> npt.NDArray[_T]:
    """Extend a table with an entry per chunk by zeros to `size` entries, in place if possible.

    Memory is used only where an entry is written. Entries are copied only if no reserved space is
    left, or the system grants none (`vm.overcommit_memory=2`).
    """
    needed = size * table.itemsize
    memory = table.base.obj if isinstance(table.base, memoryview) else None
    if memory is None or len(memory) < needed:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        wanted = max(needed, RESERVED_ENTRIES * table.itemsize)
        try:
            memory = mmap.mmap(-1, wanted, flags | _MAP_NORESERVE)
        except OSError:
            memory = mmap.mmap(-1, max(needed, 1), flags)
        np.frombuffer(memory, table.dtype)[: len(table)] = table
    return np.frombuffer(memory, table.dtype, size)


class ReplacementRule(abc.ABC):
    """Counts accesses to chunks in tables by id, where new chunks have 0, and ranks them.

    Priorities of the rule itself are int64 below 2**62; a chunk that was never accessed has 0, any
    other more. They change only when chunks are accessed. Chunks that requests wait for have higher
    priority than all others, those with earlier turns the highest: the optimal rule (Belady) keeps
    chunks that are needed soonest, and only the queue shows the future.
    """

    def __init__(self, *dtypes: type[np.generic]) -> None:
        """Start without chunks, with a table of each dtype."""
        self.priorities: Ids = np.zeros(0, np.int64)
        """By id, including awaited chunks."""
        self._tables: list[npt.NDArray[Any]] = [np.zeros(0, dtype) for dtype in dtypes]
        self._requests = 0

    def resize(self, num_chunks: int) -> None:
        """Make room for the ids [0, num_chunks)."""
        self.priorities = grown(self.priorities, num_chunks)
        self._tables = [grown(table, num_chunks) for table in self._tables]

    def advance(self) -> None:
        """Note that a new request begins."""
        self._requests += 1

    def record(self, ids: Ids, shares: Floats) -> None:
        """Count an access to distinct chunks that wants `shares` (0, 1] of their rows."""
        self._count(ids, shares)
        self._rank(ids)

    def expect(self, ids: Ids, turns: Ids) -> None:
        """Set the int64 turns of the requests that wait for chunks, or NOT_AWAITED."""
        worth = _AWAITED + LAST_TURN - turns
        self.priorities[ids] = np.where(turns == NOT_AWAITED, self._ranks(ids), worth)

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """Let new chunks replace old ones: `ids` get the history of `sources`, and new shares."""
        self._copy(ids, sources, shares)
        self._rank(ids)

    def forget(self, base: int, count: int) -> None:
        """Forget neighbouring chunks, whose ids may be reused."""
        for table in (self.priorities, *self._tables):
            table[base : base + count] = 0

    @abc.abstractmethod
    def score(self, chunk: int) -> float:
        """Return the current score of a chunk, in units of the rule; ordered like priorities."""

    @abc.abstractmethod
    def _count(self, ids: Ids, shares: Floats) -> None:
        """Count an access in the tables; see `record`."""

    def _rank(self, ids: Ids) -> None:
        """Update the priorities of chunks, except awaited ones."""
        held = self.priorities.take(ids)
        self.priorities[ids] = np.where(held < _AWAITED, self._ranks(ids), held)

    def _ranks(self, ids: Ids) -> Ids:
        """Return the priorities of chunks by the rule itself."""
        return self._tables[0].take(ids)

    def _copy(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        for table in self._tables:
            table[ids] = table[sources]


class LeastRecentlyUsed(ReplacementRule):
    """LRU: priority is the number of the request that last used the chunk."""

    def __init__(self) -> None:
        super().__init__(np.int64)

    def score(self, chunk: int) -> float:
        """Requests since the last use, as a negative number."""
        return float(self._tables[0][chunk] - max(self._requests, 1))

    def _count(self, ids: Ids, shares: Floats) -> None:
        self._tables[0][ids] = max(self._requests, 1)


class LeastFrequentlyUsed(ReplacementRule):
    """LFU: priority is the number of accesses, kept while a chunk is outside the caches."""

    def __init__(self) -> None:
        super().__init__(np.int64)

    def score(self, chunk: int) -> float:
        """The number of uses."""
        return float(self._tables[0][chunk])

    def _count(self, ids: Ids, shares: Floats) -> None:
        self._tables[0][ids] += 1


class ImportanceScore(ReplacementRule):
    """IMPRESS 4.4.2: access frequency x moving average of the share of important rows.

    All counts are halved every `half_life` requests (0: never, the paper's plain count), by forward
    decay (Cormode et al., ICDE 2009): new ones weigh twice as much instead, so the order of chunks
    needs no updates. Weights grow in steps and not with every request: otherwise chunks of equally
    popular prefixes would differ by recency alone, and evict each other in turn.

    A frequency is in units of the weight of an access when the chunk was last accessed, and a
    priority has the number of doublings in its exponent: neither leaves its range.
    """

    def __init__(self, half_life: float) -> None:
        """`half_life` is in requests; 0 keeps every access for ever."""
        # Shares, frequencies, doublings and accesses.
        super().__init__(np.float64, np.float64, np.int32, np.uint16)
        self._half_life = math.ceil(half_life)

    @property
    def _now(self) -> int:
        """Number of half-lives so far."""
        return self._requests // self._half_life if self._half_life else 0

    def score(self, chunk: int) -> float:
        """Uses of the whole chunk, halved for every half-life since."""
        shares, frequencies, doublings, _ = self._tables
        age = int(doublings[chunk]) - self._now
        return float(frequencies[chunk] * shares[chunk]) * 2.0**age

    def _count(self, ids: Ids, shares: Floats) -> None:
        averages, frequencies, doublings, accesses = self._tables
        now, average = self._now, averages.take(ids)
        accesses[ids] = counts = np.minimum(accesses.take(ids) + 1, MAX_ACCESSES)
        average += np.maximum(1.0 / counts, AVERAGE_WEIGHT) * (shares - average)
        frequency = np.ldexp(frequencies.take(ids), doublings.take(ids) - now) + 1.0
        averages[ids], frequencies[ids], doublings[ids] = average, frequency, now

    def _ranks(self, ids: Ids) -> Ids:
        averages, frequencies, doublings, _ = self._tables
        scores = frequencies.take(ids) * averages.take(ids)
        return priorities_of(scores, doublings.take(ids).astype(np.int64))

    def _copy(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        super()._copy(ids, sources, shares)
        self._tables[0][ids] = np.maximum(shares, MIN_SHARE)


def priorities_of(scores: Floats, doublings: Ids | int) -> Ids:
    """Return priorities, int64 [n], of scores x 2**doublings, which exceed any float; 0 for 0.

    A priority is the exponent, followed by as many bits of the fraction as fit: priorities have the
    order of the scores, if these differ by more than a relative 2**-32.
    """
    fractions, exponents = np.frexp(scores)
    below = ((2.0 * fractions - 1.0) * 2.0**_FRACTION_BITS).astype(np.int64)
    priorities = (exponents.astype(np.int64) + (doublings + _BIAS) << _FRACTION_BITS) + below
    return np.where(scores > 0.0, priorities, 0)
