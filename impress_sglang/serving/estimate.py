"""Estimates what loading and computing a stored prefix would take, to choose between them.

Stage: admit. Computing is estimated from the forward passes of this server: the longer of a
constant and a * new tokens + b * pairs of a new token and one that it attends to; and for a few
tokens behind many cached ones, no less than a time for each of these. Loading is estimated from the
bytes that must come from SSD, the speed of recent reads, and what identification and copying took,
likewise by a constant, tokens of the prefix, and pairs. Reading and computing overlap, so a hit
takes as long as the longer of them: AttentionStore (3.2.1) hides the one behind the other,
CacheBlend chooses how much to compute so that nothing waits.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence

from impress_sglang.cost import FlooredCost, TwoTermCost
from impress_sglang.options import EXACT_BITS

# First guess: 1 ms per token; a model with hidden size d spends as much on a token's weights as on
# 6 d attended tokens (24 L d^2 against 4 L d operations).
START_SECONDS_PER_TOKEN = 1e-3
ATTENDED_PER_HIDDEN = 6
# First guess for identification and copying, per token of the prefix and per pair.
START_SECONDS_PER_LOADED = 1e-5
START_SECONDS_PER_SCORED = 1e-8
# Short passes, such as those of questions, only bound what longer ones take. Until it is known, a
# prefix is computed if that takes at most so many times as long as reading it.
MOST_TO_LEARN = 2.0
# What few tokens behind many take is known from so many requests.
LATELY = 9
# Retentions that auto chooses from, besides its floor.
RETENTIONS = (1.0, 0.75, 0.5, 0.35)
# More bits may take so many times as long as fewer.
MORE_BITS = 1.1


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of a request, in tokens: `new` are computed in any case, `stored` may be loaded."""

    resident: int
    stored: int
    new: int


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that a request would take.

    `io` and `compute` are the parts of loading, which run at the same time if `overlapped`. Before
    it is known what passes as long take, `compute` is None, and `recompute` what computing takes at
    most, None before any pass. `least`: what loading takes besides reading, as far as known.
    """

    retention: float
    io: float
    compute: float | None
    recompute: float | None
    overlapped: bool = True
    bits: float = EXACT_BITS
    least: float = 0.0

    @property
    def load(self) -> float | None:
        """Seconds with the stored prefix."""
        return None if self.compute is None else self.seconds(1.0)

    def loads_faster(self, unread: float) -> bool:
        """Whether loading is at least as fast as computing; True while nothing is known yet.

        `unread`: the share of the reads that is left to do.
        """
        if self.recompute is None:
            return True
        most = MOST_TO_LEARN if self.compute is None else 1.0
        return max(most * self.seconds(unread), self.least) <= self.recompute

    @property
    def hidden(self) -> bool:
        """Whether reading takes no longer than computing."""
        return self.overlapped and self.compute is not None and self.io <= self.compute

    @property
    def lead(self) -> float:
        """The share of a request's reads that must end before it begins, so that it never waits.

        AttentionStore 3.2.1: S_buf = B (T_load L_hist - T_pref L_new), here over B T_load L_hist.
        """
        return self.unhidden(1.0) / self.io if self.io else 0.0

    def seconds(self, unread: float) -> float:
        """Seconds with the stored prefix, if the share `unread` of its reads is left to do."""
        return (self.compute or 0.0) + self.unhidden(unread)

    def unhidden(self, unread: float) -> float:
        """The part of `seconds` that reading it before would save."""
        io = self.io * unread
        return max(io - (self.compute or 0.0), 0.0) if self.overlapped else io


class Estimator:
    """Learns what computing and loading take; one thread."""

    def __init__(self, hidden_size: int, *, overlapped: bool = True) -> None:
        """`hidden_size` of the model sets the initial ratio of the two terms of computing.

        `overlapped`: layers are read while other layers are computed.
        """
        self._overlapped = overlapped
        per_pair = START_SECONDS_PER_TOKEN / (ATTENDED_PER_HIDDEN * hidden_size)
        self.computing = FlooredCost(START_SECONDS_PER_TOKEN, per_pair)
        # Where tokens are scored; for a whole prefix in codes; for a whole exact prefix. What was
        # not seen costs nothing, nor what was seen once, when it may have been disturbed: what
        # seems too slow is never tried again.
        per_token = START_SECONDS_PER_LOADED
        self.loading = FlooredCost(per_token, START_SECONDS_PER_SCORED, trusts_once=False)
        self.restoring = FlooredCost(per_token, per_token, trusts_once=False)
        self.copying = FlooredCost(per_token, per_token, trusts_once=False)
        # What few tokens behind many that are cached took lately, for each of these.
        self._behind: collections.deque[float] = collections.deque(maxlen=LATELY)
        # For a blend: per token that is loaded, and by what factor computing takes longer there
        # than in a pass of SGLang's.
        self.blending = TwoTermCost(START_SECONDS_PER_LOADED, 1.0)

    def note_forward(self, new: int, pairs: float, seconds: float) -> None:
        """Learn that a pass of the model over `new` tokens took `seconds`, loading excluded."""
        self.computing.observe(new, pairs, seconds)

    def note_request(self, before: int, new: int, seconds: float) -> None:
        """Learn that computing `new` tokens of a prompt behind `before` took `seconds`."""
        self.note_forward(new, pairs_of(before, new), seconds)
        if before > new:
            self._behind.append(seconds / before)

    def note_load(
        self,
        work: RequestLengths,
        seconds: float,
        *,
        whole: bool,
        bits: float = EXACT_BITS,
    ) -> None:
        """Learn that identification and copying took `seconds`, reading excluded.

        `whole`: all tokens were loaded.
        """
        cost, pairs = self._cost_of(work, bits, whole=whole)
        cost.observe(work.stored, pairs, seconds)

    def note_blend(self, work: RequestLengths, computed: float, seconds: float) -> None:
        """Learn that a blend took `seconds`, reading excluded; see `estimate_blend`."""
        self.blending.observe(work.stored, self._blended_seconds(work, computed), seconds)

    def estimate(
        self,
        work: RequestLengths,
        retention: float,
        io_seconds: float,
        bits: float = EXACT_BITS,
    ) -> Estimate:
        """Estimate a request with this retention and bits, which reads for `io_seconds`."""
        whole = work.stored + work.new, pairs_of(work.resident, work.stored + work.new)
        hit = self.pass_seconds(work.resident + retention * work.stored, work.new)
        cost, pairs = self._cost_of(work, bits, whole=retention >= 1.0)
        hit += cost.least(work.stored, pairs)
        return self._estimate(retention, io_seconds, hit, whole, bits)

    def estimate_blend(
        self, work: RequestLengths, computed: float, io_seconds: float, *, measured: bool = True
    ) -> Estimate:
        """Estimate a request that blends, of whose stored tokens `computed` are computed.

        `computed` is an average over the layers. `measured`: False ignores what earlier blends
        took, and says how fast one might be.
        """
        whole = work.stored + work.new, pairs_of(work.resident, work.stored + work.new)
        hit = self._blended_seconds(work, computed)
        if measured and self.blending.observations:
            hit = self.blending.seconds(work.stored, hit)
        else:
            hit += self.copying.least(work.stored, work.stored)
        hit += self.pass_seconds(work.resident + work.stored, work.new)
        return self._estimate(1.0, io_seconds, hit, whole, EXACT_BITS)

    def pass_seconds(self, before: float, new: float) -> float:
        """Seconds that a pass over `new` tokens behind `before` takes, as far as known."""
        seconds = self.computing.least(new, pairs_of(before, new))
        if before > new and len(self._behind) > 1:
            # The median, or less: one that waited for a compiler may be half of what is known.
            seconds = max(seconds, statistics.median_low(self._behind) * before)
        return seconds

    def most_bits(self, estimates: Sequence[Estimate]) -> Estimate:
        """The first estimate that is nearly the shortest, as far as known; most bits come first."""
        # What computing all would take does not matter here.
        known = [dataclasses.replace(own, compute=own.least) for own in estimates]
        seconds = [own.seconds(1.0) for own in known]
        most = MORE_BITS * min(seconds)
        return next(own for own, took in zip(estimates, seconds, strict=True) if took <= most)

    def largest_hidden(self, estimates: Sequence[Estimate]) -> Estimate:
        """The first estimate whose reading is hidden, else the last; largest loads come first."""
        return next((own for own in estimates if own.hidden), estimates[-1])

    def _estimate(
        self,
        retention: float,
        io: float,
        hit: float,
        whole: tuple[float, float],
        bits: float,
    ) -> Estimate:
        """`hit`: seconds besides reading; `whole`: the size of the pass that computes all."""
        miss = self.computing.seconds(*whole)
        known = miss is not None
        return Estimate(
            retention,
            io,
            hit if known else None,
            miss if known else self.computing.most(*whole),
            self._overlapped,
            bits,
            hit,
        )

    def _cost_of(
        self, work: RequestLengths, bits: float, *, whole: bool
    ) -> tuple[FlooredCost, float]:
        """What loading costs besides reading, and the pairs by which it does."""
        if whole:
            return self.copying if bits == EXACT_BITS else self.restoring, work.stored
        return self.loading, work.stored * work.new

    def _blended_seconds(self, work: RequestLengths, computed: float) -> float:
        """What SGLang would take to compute so many tokens, spread evenly over the stored ones."""
        return self.computing.share(computed, computed * (work.resident + work.stored / 2))


def pairs_of(before: float, new: float) -> float:
    """Number of pairs of a new token and one that it attends to, after `before` tokens."""
    return new * (before + (new + 1) / 2)
