"""Replacement rules: what makes one cached chunk worth more than another.

A rule turns accesses into priorities; it knows no tier and moves nothing. The tiers of chunks
follow from their priorities alone (`placement`), so that two policies differ by their rule and
nothing else.

Why no cache library: those keep one tier of items and evict by themselves. Here two exclusive tiers
are filled by comparing a newcomer with the lowest of both, in batches of a layer, with priorities
that also change while an item is outside.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from impress_sglang import loops
from impress_sglang.loops.types import Floats
from impress_sglang.tiers.tables import grown

Ids = npt.NDArray[np.int64]

# Accesses are counted up to this number, long after the last one that would change a weight.
MOST_ACCESSES = 1000
# Weight of the newest access in an average; the first ones count alike.
AVERAGE_WEIGHT = 0.1
# The turn of a chunk for which no request waits. Turns are from 0 to LAST_TURN, and a chunk with
# one is worth more than any priority of a rule: _AWAITED at least.
NOBODY = -1
LAST_TURN = 2**52
_AWAITED = 2**62
# The share of a chunk that is expected to have nothing important.
LEAST_SHARE = 1e-6


class ReplacementRule(Protocol):
    """The contract; tests/unit/test_rules.py runs it on every implementation.

    Priorities are int64 below 2**62; a chunk that was never accessed has 0, any other more. They
    change only when chunks are accessed: ageing gives higher priorities to later accesses.
    """

    def resize(self, num_chunks: int) -> None:
        """Make room for the ids [0, num_chunks)."""
        ...

    def advance(self) -> None:
        """Note that a new request begins."""
        ...

    def record(self, ids: Ids, shares: Floats) -> Ids:
        """Count an access to distinct chunks, of which `shares` (0, 1] of the rows are wanted.

        Returns their priorities.
        """
        ...

    def priorities(self, ids: Ids) -> Ids:
        """The priorities of chunks."""
        ...

    def score(self, chunk: int) -> float:
        """The present score of a chunk, in units of the rule; ordered like the priorities."""
        ...

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """Let new chunks replace old ones: `ids` get the history of `sources`, and new shares."""
        ...

    def forget(self, base: int, count: int) -> None:
        """Forget neighbouring chunks, whose ids may be given to others."""
        ...


class _OneNumber:
    """A rule that keeps one number per chunk, its priority."""

    def __init__(self) -> None:
        self._values: Ids = np.zeros(0, np.int64)

    def resize(self, num_chunks: int) -> None:
        """See `ReplacementRule`."""
        self._values = grown(self._values, num_chunks)

    def priorities(self, ids: Ids) -> Ids:
        """See `ReplacementRule`."""
        return self._values.take(ids)

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """See `ReplacementRule`."""
        self._values[ids] = self._values[sources]

    def forget(self, base: int, count: int) -> None:
        """See `ReplacementRule`."""
        self._values[base : base + count] = 0


class LeastRecentlyUsed(_OneNumber):
    """LRU: priority is the number of the request that last used the chunk."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0

    def advance(self) -> None:
        """See `ReplacementRule`."""
        self._now += 1

    def record(self, ids: Ids, shares: Floats) -> Ids:
        """See `ReplacementRule`."""
        self._values[ids] = max(self._now, 1)
        return self.priorities(ids)

    def score(self, chunk: int) -> float:
        """See `ReplacementRule`: requests since the last use, as a negative number."""
        return float(self._values[chunk] - max(self._now, 1))


class LeastFrequentlyUsed(_OneNumber):
    """LFU: priority is the number of accesses, kept while a chunk is outside the caches."""

    def advance(self) -> None:
        """See `ReplacementRule`."""

    def record(self, ids: Ids, shares: Floats) -> Ids:
        """See `ReplacementRule`."""
        self._values[ids] += 1
        return self.priorities(ids)

    def score(self, chunk: int) -> float:
        """See `ReplacementRule`: the number of uses."""
        return float(self._values[chunk])


class ImportanceScore:
    """IMPRESS 4.4.2: access frequency x moving average of the share of important rows.

    The paper does not say how a frequency decays. Here all counts are halved every `half_life`
    requests (0: never, the paper's plain count). This is done by forward decay (Cormode et al.,
    ICDE 2009): instead of halving old counts, new ones weigh twice as much, so the order of chunks
    needs no upkeep. Weights grow in steps and not with every request: otherwise chunks of equally
    popular prefixes would differ by recency alone, and displace each other in turn.

    A frequency is kept in units of the weight that an access had when the chunk was last accessed,
    and a priority has the number of doublings in its exponent (`loops.score_of`). So neither leaves
    its range, however long a server runs.
    """

    def __init__(self, half_life: float) -> None:
        """`half_life` is in requests; 0 keeps every access for ever."""
        self.shares: Floats = np.zeros(0)
        self.frequencies: Floats = np.zeros(0)
        self._doublings = np.zeros(0, np.int32)
        self._accesses = np.zeros(0, np.uint16)
        self._half_life = half_life
        self._requests = 0
        self._now = 0

    def resize(self, num_chunks: int) -> None:
        """See `ReplacementRule`."""
        self.shares = grown(self.shares, num_chunks)
        self.frequencies = grown(self.frequencies, num_chunks)
        self._doublings = grown(self._doublings, num_chunks)
        self._accesses = grown(self._accesses, num_chunks)

    def advance(self) -> None:
        """See `ReplacementRule`."""
        self._requests += 1
        if self._half_life and self._requests >= self._half_life:
            self._requests = 0
            self._now += 1

    def record(self, ids: Ids, shares: Floats) -> Ids:
        """See `ReplacementRule`."""
        return loops.record_scores(
            ids,
            shares,
            self._accesses,
            self.shares,
            self.frequencies,
            self._doublings,
            self._now,
            AVERAGE_WEIGHT,
            MOST_ACCESSES,
        )

    def priorities(self, ids: Ids) -> Ids:
        """See `ReplacementRule`."""
        return loops.scores_of(ids, self.shares, self.frequencies, self._doublings)

    def score(self, chunk: int) -> float:
        """See `ReplacementRule`: uses of the whole chunk, halved for every half-life since."""
        age = int(self._doublings[chunk]) - self._now
        return float(self.frequencies[chunk] * self.shares[chunk]) * 2.0**age

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """See `ReplacementRule`."""
        for values in (self.frequencies, self._doublings, self._accesses):
            values[ids] = values[sources]
        self.shares[ids] = np.maximum(shares, LEAST_SHARE)

    def forget(self, base: int, count: int) -> None:
        """See `ReplacementRule`."""
        for values in (self.shares, self.frequencies, self._doublings, self._accesses):
            values[base : base + count] = 0


class AwaitedLast:
    """The priorities of another rule, but chunks that requests wait for are worth more than others.

    Of two such chunks, the one with the earlier turn is worth more: the optimal rule (Belady) keeps
    what is needed soonest, and the queue is all that is known of the future.
    """

    def __init__(self, rule: ReplacementRule) -> None:
        """`rule` decides between chunks that nobody waits for."""
        self.priorities: Ids = np.zeros(0, np.int64)
        """By id; 0 for chunks that were never accessed and for which no request waits."""
        self._rule = rule

    def resize(self, num_chunks: int) -> None:
        """Make room for the ids [0, num_chunks)."""
        self._rule.resize(num_chunks)
        self.priorities = grown(self.priorities, num_chunks)

    def advance(self) -> None:
        """Note that a new request begins."""
        self._rule.advance()

    def record(self, ids: Ids, shares: Floats) -> None:
        """Count an access; see `ReplacementRule.record`."""
        loops.update_scores(ids, self._rule.record(ids, shares), self.priorities, _AWAITED)

    def score(self, chunk: int) -> float:
        """The score of a chunk by the other rule."""
        return self._rule.score(chunk)

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """Let new chunks replace old ones; see `ReplacementRule.inherit`."""
        self._rule.inherit(ids, sources, shares)
        loops.update_scores(ids, self._rule.priorities(ids), self.priorities, _AWAITED)

    def forget(self, base: int, count: int) -> None:
        """Forget neighbouring chunks, whose ids may be given to others."""
        self._rule.forget(base, count)
        self.priorities[base : base + count] = 0

    def expect(self, ids: Ids, turns: Ids) -> None:
        """Note the int64 turns of requests that wait for distinct chunks; NOBODY: none does now."""
        worth = _AWAITED + LAST_TURN - turns
        self.priorities[ids] = np.where(turns == NOBODY, self._rule.priorities(ids), worth)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tables, and of those of the other rule."""
        values = (*vars(self).values(), *vars(self._rule).values())
        return sum(array.nbytes for array in values if isinstance(array, np.ndarray))
