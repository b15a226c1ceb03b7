"""Replacement rules: what makes one cached chunk worth more than another.

A rule turns accesses into priorities; it knows no tier and moves nothing. Where chunks stand
follows from their priorities alone (`placement`), so that two policies differ by their rule and
nothing else.

Why no cache library: those keep one tier of items and evict by themselves. Here two exclusive tiers
are filled by comparing a newcomer with the lowest of both, in batches of a layer, with priorities
that also move while an item is outside.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from impress_sglang import loops
from impress_sglang.tiers.tables import grown

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Weight of the newest share in the moving average; the first observations count alike.
AVERAGE_WEIGHT = 0.1
# Counting accesses stops long after the last of them that would change a weight.
MOST_ACCESSES = 1000
# Weights of a forward decay double at every half-life; this keeps them finite.
MAX_EXPONENT = 500.0
# Of a chunk for which no request waits. Turns are from 0 to LAST_TURN, which are integers that
# floats have, and above all priorities of rules when scaled.
NOBODY = -1
LAST_TURN = 2**52
_AWAITED_EXPONENT = 600
# Of a chunk that is expected to hold nothing of importance.
LEAST_SHARE = 1e-6


class ReplacementRule(Protocol):
    """The contract; tests/unit/test_rules.py runs it on every implementation.

    `priorities` is float64, one per chunk id; a chunk that was never accessed has 0.0, any other
    more. An access never lowers the priority of a chunk that is not accessed, except that `advance`
    may scale all priorities by one factor, which it returns.
    """

    priorities: Floats

    def resize(self, num_chunks: int) -> None:
        """Make room for the ids [0, num_chunks)."""
        ...

    def advance(self) -> float:
        """A new request begins; returns the factor by which all priorities were scaled."""
        ...

    def record(self, ids: Ids, shares: Floats) -> None:
        """Count an access to distinct chunks, of which `shares` (0, 1] of the rows are wanted."""
        ...

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """New chunks replace old ones: `ids` get the history of `sources`, and new shares."""
        ...

    def forget(self, ids: Ids) -> None:
        """The ids may be given to other chunks."""
        ...


class LeastRecentlyUsed:
    """LRU: priority is the request that last used the chunk."""

    def __init__(self) -> None:
        self.priorities: Floats = np.zeros(0)
        self._now = 0

    def resize(self, num_chunks: int) -> None:
        """See `ReplacementRule`."""
        self.priorities = grown(self.priorities, num_chunks)

    def advance(self) -> float:
        """See `ReplacementRule`."""
        self._now += 1
        return 1.0

    def record(self, ids: Ids, shares: Floats) -> None:
        """See `ReplacementRule`."""
        self.priorities[ids] = max(self._now, 1)

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """See `ReplacementRule`."""
        self.priorities[ids] = self.priorities[sources]

    def forget(self, ids: Ids) -> None:
        """See `ReplacementRule`."""
        self.priorities[ids] = 0.0


class LeastFrequentlyUsed:
    """LFU: priority is the number of accesses, kept while a chunk is outside the caches."""

    def __init__(self) -> None:
        self.priorities: Floats = np.zeros(0)

    def resize(self, num_chunks: int) -> None:
        """See `ReplacementRule`."""
        self.priorities = grown(self.priorities, num_chunks)

    def advance(self) -> float:
        """See `ReplacementRule`."""
        return 1.0

    def record(self, ids: Ids, shares: Floats) -> None:
        """See `ReplacementRule`."""
        self.priorities[ids] += 1.0

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """See `ReplacementRule`."""
        self.priorities[ids] = self.priorities[sources]

    def forget(self, ids: Ids) -> None:
        """See `ReplacementRule`."""
        self.priorities[ids] = 0.0


class ImportanceScore:
    """IMPRESS 4.4.2: access frequency x moving average of the share of important rows.

    The paper does not say how a frequency forgets. Here all counts are halved every `half_life`
    requests (0: never, the paper's plain count). It is done by a forward decay (Cormode et al.,
    ICDE 2009): instead of halving old counts, new ones weigh twice as much, so the order of chunks
    needs no upkeep. Weights grow in steps and not with every request: chunks of equally popular
    prefixes would else differ by recency alone, and displace each other in turn.
    """

    def __init__(self, half_life: float) -> None:
        """`half_life` is in requests; 0 keeps every access for ever."""
        self.priorities: Floats = np.zeros(0)
        self.shares: Floats = np.zeros(0)
        self.frequencies: Floats = np.zeros(0)
        self._accesses = np.zeros(0, np.uint16)
        self._half_life = half_life
        self._requests = 0
        self._exponent = 0.0

    def resize(self, num_chunks: int) -> None:
        """See `ReplacementRule`."""
        self.priorities = grown(self.priorities, num_chunks)
        self.shares = grown(self.shares, num_chunks)
        self.frequencies = grown(self.frequencies, num_chunks)
        self._accesses = grown(self._accesses, num_chunks)

    def advance(self) -> float:
        """See `ReplacementRule`."""
        self._requests += 1
        if not self._half_life or self._requests < self._half_life:
            return 1.0
        self._requests = 0
        self._exponent += 1.0
        if self._exponent < MAX_EXPONENT:
            return 1.0
        factor = 2.0**-self._exponent
        self._exponent = 0.0
        # What was accessed at all stays above what never was, and that is not written.
        known = self.priorities > 0
        np.multiply(self.frequencies, factor, out=self.frequencies, where=known)
        np.multiply(self.priorities, factor, out=self.priorities, where=known)
        least = np.finfo(np.float64).tiny
        np.maximum(self.priorities, least, out=self.priorities, where=known)
        return factor

    def record(self, ids: Ids, shares: Floats) -> None:
        """See `ReplacementRule`."""
        loops.record_scores(
            ids,
            shares,
            self._accesses,
            self.shares,
            self.frequencies,
            self.priorities,
            2.0**self._exponent,
            AVERAGE_WEIGHT,
            MOST_ACCESSES,
        )

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """See `ReplacementRule`."""
        self.frequencies[ids] = self.frequencies[sources]
        self._accesses[ids] = self._accesses[sources]
        self.shares[ids] = np.maximum(shares, LEAST_SHARE)
        self.priorities[ids] = self.frequencies[ids] * self.shares[ids]

    def forget(self, ids: Ids) -> None:
        """See `ReplacementRule`."""
        for values in (self.priorities, self.shares, self.frequencies, self._accesses):
            values[ids] = 0


class AwaitedLast:
    """Another rule, but for chunks that requests wait for: these are worth more than all others.

    Of two of them the one with the earlier turn is worth more: to be needed sooner is what the best
    of all rules goes by (Belady), and all that is known of the future is the queue.
    """

    def __init__(self, rule: ReplacementRule) -> None:
        """`rule` decides between chunks that nobody waits for."""
        self.priorities: Floats = np.zeros(0)
        self._rule = rule
        self._awaited: Floats = np.zeros(0)

    def resize(self, num_chunks: int) -> None:
        """See `ReplacementRule`."""
        self._rule.resize(num_chunks)
        self.priorities = grown(self.priorities, num_chunks)
        self._awaited = grown(self._awaited, num_chunks)

    def advance(self) -> float:
        """See `ReplacementRule`; what is awaited keeps its priority."""
        factor = self._rule.advance()
        if factor != 1.0:
            known = self.priorities > 0
            np.maximum(self._rule.priorities, self._awaited, out=self.priorities, where=known)
        return factor

    def record(self, ids: Ids, shares: Floats) -> None:
        """See `ReplacementRule`."""
        self._rule.record(ids, shares)
        self._weigh(ids)

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """See `ReplacementRule`."""
        self._rule.inherit(ids, sources, shares)
        self._weigh(ids)

    def forget(self, ids: Ids) -> None:
        """See `ReplacementRule`."""
        self._rule.forget(ids)
        # Of most nobody has written anything.
        self._awaited[ids[self._awaited[ids] > 0]] = 0.0
        self._weigh(ids)

    def expect(self, ids: Ids, turns: Ids) -> None:
        """Requests wait for chunks, distinct `ids`, in these turns, int64; NOBODY does any more."""
        worth = np.ldexp((LAST_TURN + 1 - turns).astype(np.float64), _AWAITED_EXPONENT)
        self._awaited[ids] = np.where(turns == NOBODY, 0.0, worth)
        self._weigh(ids)

    @property
    def num_bytes(self) -> int:
        """Memory of its tables, in bytes, and of those of the other rule."""
        values = (*vars(self).values(), *vars(self._rule).values())
        return sum(array.nbytes for array in values if isinstance(array, np.ndarray))

    def _weigh(self, ids: Ids) -> None:
        self.priorities[ids] = np.maximum(self._rule.priorities[ids], self._awaited[ids])
