"""Learns how long reading, loading and computing take here, and makes decisions that depend on it.

Decisions depend on values (tokens, bytes, measured seconds) and on no clock. Reading and computing
overlap, so a hit takes as long as the longer of them (AttentionStore 3.2.1, CacheBlend).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from impress_sglang.config import EXACT_BITS

# Observations of an octave that are remembered, as the time constant of an exponential: with times
# that vary by 5%, rates are right within 3%.
TIME_CONSTANT = 16
DECAY = 1.0 - 1.0 / TIME_CONSTANT
# Strength with which rates keep the ratio of the first guess, where observations do not determine
# it: more with a floor, where few sizes may be seen, and estimates needed for longer ones (if most
# passes on an H100 are questions, estimates are up to 2 times too long, and with 1e-5 up to 5).
# `MIN_RATE` is the lower bound of rates.
RIDGE, FLOORED_RIDGE = 1e-9, 1e-3
MIN_RATE = 1e-6
# If this many recent times were all longer, or all shorter, than expected, by `DRIFT_FACTOR` in the
# median, the device has changed, and earlier observations count as `DRIFT_WEIGHT` at most. Times of
# passes of one octave differ by less: as many tokens may attend to few tokens or to many.
DRIFT_OBSERVATIONS = 8
DRIFT_FACTOR = 1.8
DRIFT_WEIGHT = 2.0
# Octaves that take at least this many times as long as the shortest determine the rates. On an H100
# a pass of Llama-3-8B takes 9 ms for any number of tokens up to 300; on a CPU the constant part of
# a pass is added to its tokens, and is a quarter of such a pass at most.
SIZE_BOUND_FACTOR = 4.0
# There is a floor if the smallest sizes take at least this many times as long as the rates predict.
FLOOR_FACTOR = 1.2

# First guesses; only their ratios matter. A fast NVMe drive with many reads in flight.
START_SECONDS_PER_PIECE = 4e-6
START_SECONDS_PER_BYTE = 1 / 2e9
# With many reads in flight, a start never costs more than reading this many bytes. Without a bound,
# gaps that are read through would never be skipped, so the gain would never be observed.
MAX_GAP_BYTES = 64 << 10
# A model with hidden size d spends as much on a token's weights as on 6 d attended tokens (24 L d^2
# against 4 L d operations).
START_SECONDS_PER_TOKEN = 1e-3
ATTENDED_PER_HIDDEN = 6
# Loading, per token.
START_SECONDS_PER_LOADED = 1e-5

# Short passes, such as those of questions, only bound the time of longer ones. Until that is known,
# a prefix is computed if that takes at most this many times as long as reading it.
MAX_TO_LEARN = 2.0
# Number of recent requests that determine the time of few tokens after many.
RECENT_REQUESTS = 9
# More bits, or more recomputation, may take this many times as long as the fastest choice.
TOLERANCE = 1.1
# A pass waits for layers at most this many times as long as it was expected to take.
MAX_WAIT_FACTOR = 4.0


Floats: TypeAlias = npt.NDArray[np.float64]


class _Solution(NamedTuple):
    """A fit to observations.

    The rates, None if not determined; ascending sizes and their times, between which times of
    other sizes are interpolated as a lower bound; the largest octave seen, and the lowest seconds
    per size.
    """

    rates: tuple[float, float] | None
    sizes: Sequence[float] = (0.0,)
    times: Sequence[float] = (0.0,)
    largest: int = -(1 << 30)
    lowest: float = 0.0


class Cost:
    """Time of work of size (x, y): a * x + b * y seconds; one thread observes.

    The rates follow from a least squares fit of relative errors over octaves of sizes, all with
    equal weight. Unknowns are in seconds of the first guess, so that numbers are near one.

    With a floor, small work takes as long as slightly larger work, like a pass of a model on a GPU,
    which always reads all weights. Times never decrease with size: an octave that took longer than
    larger ones, for example because of a compiler, gets their time. Octaves that take
    `SIZE_BOUND_FACTOR` times as long as the shortest determine the rates; without any, times are
    interpolated between octaves.
    """

    def __init__(
        self, first_x: float, first_y: float, *, floored: bool = False, once: bool = True
    ) -> None:
        """`first_x`, `first_y`: first guess of a and b, in seconds per unit of x and y.

        `once`: whether a single observation of an octave counts.
        """
        self.observations = 0
        self._first_x, self._first_y = first_x, first_y
        self._floored = floored
        self._least_weight = 1.0 if once else 1.5
        # The latest observations: log(measured / expected), octave, and `_row`. Sums of earlier
        # ones, by octave.
        self._recent = collections.deque[tuple[float, int, Floats]]()
        self._octaves: dict[int, Floats] = {}
        # Fits without the latest observations, and of all; replaced as a whole for other threads.
        self._before = self._now = self._solve()

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Learn from work of size (x, y), both > 0, that took `seconds`."""
        if x <= 0 or y <= 0 or seconds <= 0.0:
            return
        self.observations += 1
        place, error = math.frexp(x * self._first_x + y * self._first_y)[1], 0.0
        if place in self._octaves and self._octaves[place][0] >= self._least_weight:
            error = math.log(seconds / self._seconds(self._before, x, y))
        row = _row(x * self._first_x, y * self._first_y, seconds)
        self._recent.append((error, place, row))
        if len(self._recent) == DRIFT_OBSERVATIONS:
            self._age()
        self._now = self._solve(self._recent)

    def seconds(self, x: float, y: float) -> float:
        """Seconds that work of size (x, y) takes; a lower bound unless that is known.

        0.0 before any observation.
        """
        return self._seconds(self._now, x, y)

    def _seconds(self, solution: _Solution, x: float, y: float) -> float:
        x, y = x * self._first_x, y * self._first_y
        floor = float(np.interp(x + y, solution.sizes, solution.times)) if self._floored else 0.0
        rates = solution.rates
        return floor if rates is None else max(floor, x * rates[0] + y * rates[1])

    def bound(self, x: float, y: float) -> tuple[float | None, bool]:
        """Seconds that work of size (x, y) takes, and whether that is known.

        If neither the rates are known nor work as large was seen, the seconds are an upper bound,
        and None before any observation.
        """
        solution, size = self._now, x * self._first_x + y * self._first_y
        if solution.rates is not None or math.frexp(size)[1] <= solution.largest:
            return self.seconds(x, y), True
        return solution.lowest * size if solution.lowest else None, False

    def rates(self) -> tuple[float, float]:
        """a and b, in seconds per unit, where there is no floor."""
        rates = self._now.rates
        assert rates is not None
        return rates[0] * self._first_x, rates[1] * self._first_y

    def _age(self) -> None:
        """Add the oldest of the latest times to earlier ones, or all if the device has changed.

        Rates alone would follow only after earlier times are forgotten; so those are scaled, unless
        one of the latest times contradicts that.
        """
        errors, min_drift = [error for error, *_ in self._recent], math.log(DRIFT_FACTOR)
        middle, count = statistics.median(errors), 1
        agreed = min(math.copysign(1.0, middle) * error for error in errors)
        if abs(middle) >= min_drift and agreed >= min_drift / 2:
            count = len(errors)
            for place, sums in self._octaves.items():
                weight = min(DRIFT_WEIGHT / sums[0], 1.0)
                self._octaves[place] = sums * weight * math.exp(middle) ** _POWERS
        for _ in range(count):
            _, place, row = self._recent.popleft()
            self._octaves[place] = DECAY * self._octaves.get(place, 0.0) + row
        self._before = self._solve()

    def _solve(self, recent: Iterable[tuple[float, int, Floats]] = ()) -> _Solution:
        octaves = dict(self._octaves)
        for _, place, row in recent:
            octaves[place] = DECAY * octaves.get(place, 0.0) + row
        seen = sorted(octave for octave, sums in octaves.items() if sums[0] >= self._least_weight)
        if not seen:
            return _Solution(None if self._floored else (1.0, 1.0))
        means = np.array([octaves[octave] / octaves[octave][0] for octave in seen])
        if not self._floored:
            return _Solution(_rates_of(means, RIDGE))
        times = np.minimum.accumulate(1.0 / means[::-1, -1])[::-1]
        largest, lowest = seen[-1], float((1.0 / (means[:, 1] + means[:, 2])).min())
        shown = means[times >= SIZE_BOUND_FACTOR * times[0]]
        if not len(shown):
            sizes = [0.0, *means[:, -2].tolist()]
            return _Solution(None, sizes, [0.0, *times.tolist()], largest, lowest)
        rates = _rates_of(shown, FLOORED_RIDGE)
        # If even the smallest sizes take as long as the rates predict, there is no floor.
        share = means[0][1] * rates[0] + means[0][2] * rates[1]
        floor = float(times[0]) if FLOOR_FACTOR * share < 1.0 else 0.0
        return _Solution(rates, times=[floor], largest=largest, lowest=lowest)


def _row(x: float, y: float, seconds: float) -> Floats:
    """Summands of an observation.

    Its weight, the terms of a fit of relative errors, its size, and the inverse of its time, whose
    mean is about right even if half of the times were disturbed: those are longer, never shorter.
    """
    own_x, own_y = x / seconds, y / seconds
    fit = own_x, own_y, own_x * own_x, own_x * own_y, own_y * own_y
    return np.array([1.0, *fit, x + y, 1.0 / seconds])


# The power of time in each part of a row.
_POWERS = np.array([0, -1, -1, -2, -2, -2, 0, -1])


def _rates_of(octaves: Floats, ridge: float) -> tuple[float, float]:
    """Return the rates that fit octaves best, each at least `MIN_RATE`; see `_row`."""
    _, x, y, xx, xy, yy, *_ = octaves.sum(0).tolist()
    # One scale for both is always determined. From there, each rate is fitted as far as it is
    # determined, and otherwise keeps the ratio of the first guess.
    scale, ridge = (x + y) / (xx + 2 * xy + yy), ridge * (xx + yy)
    x, y, xx, yy = x + ridge * scale, y + ridge * scale, xx + ridge, yy + ridge
    per_x = (x * yy - y * xy) / (xx * yy - xy * xy)
    per_y = (y * xx - x * xy) / (xx * yy - xy * xy)
    # A rate below its bound is set to it, and the other to the best value given that.
    if per_x < MIN_RATE:
        return MIN_RATE, max((y - xy * MIN_RATE) / yy, MIN_RATE)
    if per_y < MIN_RATE:
        return max((x - xy * MIN_RATE) / xx, MIN_RATE), MIN_RATE
    return per_x, per_y


class ReadCost(Cost):
    """Time of reads: x is pieces, y is bytes; the reader's thread observes, any thread queries.

    a / b is the gap, in bytes, below which it is cheaper to read through than to start a new piece.
    """

    def __init__(self) -> None:
        super().__init__(START_SECONDS_PER_PIECE, START_SECONDS_PER_BYTE)
        self._pieces = self._bytes = 0.0

    def observe(self, pieces: float, num_bytes: float, seconds: float) -> None:
        """Learn from one read of `num_bytes` in `pieces` pieces."""
        super().observe(pieces, num_bytes, seconds)
        self._pieces = DECAY * self._pieces + pieces
        self._bytes = DECAY * self._bytes + num_bytes

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth once a piece is started."""
        return 1.0 / self.rates()[1]

    @property
    def gap_bytes(self) -> int:
        """Gap between two wanted runs that is as cheap to read as to skip."""
        per_piece, per_byte = self.rates()
        return int(min(per_piece / per_byte, MAX_GAP_BYTES))

    def seconds_for(self, num_bytes: float) -> float:
        """Seconds that reading `num_bytes` takes, in pieces as long as recent ones."""
        pieces = num_bytes * self._pieces / self._bytes if self._bytes else 0.0
        return self.seconds(pieces, num_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of a request, in tokens: `new` are always computed, `stored` may be loaded."""

    resident: int
    stored: int
    new: int


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds that a request would take with this retention and these bits.

    `io` and `compute` are the parts of loading, which run at the same time if `overlapped`;
    `compute` as far as known. `recompute` is the time of computing all tokens, None before any
    pass, and an upper bound unless passes as long were seen (`known`).
    """

    retention: float
    io: float
    compute: float
    recompute: float | None
    known: bool = True
    overlapped: bool = True
    bits: float = EXACT_BITS

    @property
    def load(self) -> float | None:
        """Seconds with the stored prefix; None before passes as long as computing it were seen."""
        return self.seconds() if self.known else None

    def loads_faster(self) -> bool:
        """Whether loading is at least as fast as computing; True before any pass."""
        factor = 1.0 if self.known else MAX_TO_LEARN
        return self.recompute is None or factor * self.seconds() <= self.recompute

    def seconds(self, unread: float = 1.0) -> float:
        """Seconds with the stored prefix, if the share `unread` of its reads is not done."""
        return self.compute + self.unhidden(unread)

    def unhidden(self, unread: float = 1.0) -> float:
        """Part of `seconds` that reading it earlier would save."""
        io = self.io * unread
        return max(io - self.compute, 0.0) if self.overlapped else io


def best_within_tolerance(estimates: Sequence[Estimate]) -> int:
    """Index of the first estimate that takes hardly longer than the fastest; best quality first."""
    limit = TOLERANCE * min(estimate.seconds() for estimate in estimates)
    return next(number for number, estimate in enumerate(estimates) if estimate.seconds() <= limit)


class Estimator:
    """Learns the times of computing and loading; one thread."""

    def __init__(self, hidden_size: int, *, overlapped: bool = True) -> None:
        """`hidden_size` of the model sets the initial ratio of the two terms of computing.

        `overlapped`: whether layers are read while other layers are computed.
        """
        self._overlapped = overlapped
        per_pair = START_SECONDS_PER_TOKEN / (ATTENDED_PER_HIDDEN * hidden_size)
        # Passes of the model, without loading: x is new tokens, y is pairs that attend.
        self.computing = Cost(START_SECONDS_PER_TOKEN, per_pair, floored=True)
        # Recent passes of few tokens after many cached ones: the number of these, and the seconds.
        self._after_loaded = collections.deque[tuple[int, float]](maxlen=RECENT_REQUESTS)
        # For a blend: seconds per loaded token, and the factor by which computing takes longer
        # than in a pass of SGLang's.
        self.blending = Cost(START_SECONDS_PER_LOADED, 1.0)

    def observe_request(self, before: int, new: int, seconds: float) -> None:
        """Learn that computing `new` tokens of a prompt after `before` took `seconds`."""
        self.computing.observe(new, attention_pairs(before, new), seconds)
        if before > new:
            self._after_loaded.append((before, seconds))

    def observe_blend(self, work: RequestLengths, computed: float, seconds: float) -> None:
        """Learn that a blend took `seconds`, reading excluded; see `estimate_blend`."""
        self.blending.observe(work.stored, self._blended_seconds(work, computed), seconds)

    def estimate(
        self, work: RequestLengths, io_seconds: float, bits: float = EXACT_BITS
    ) -> Estimate:
        """Estimate a request that loads its stored tokens in `bits`, reading for `io_seconds`."""
        hit = self.pass_seconds(work.resident + work.stored, work.new)
        computed = self._computing(work.resident, work.stored + work.new)
        return Estimate(1.0, io_seconds, hit, *computed, self._overlapped, bits)

    def estimate_blend(
        self, work: RequestLengths, computed: float, io_seconds: float, *, measured: bool = True
    ) -> Estimate:
        """Estimate a request that blends, and recomputes `computed` of its stored tokens.

        `computed` is an average over the layers; all reads are done before. `measured`: False
        ignores earlier blends, for the time that one might take at best.
        """
        hit = self._blended_seconds(work, computed)
        if measured and self.blending.observations:
            hit = self.blending.seconds(work.stored, hit)
        hit += self.pass_seconds(work.resident + work.stored, work.new)
        recompute = self._computing(work.resident, work.stored + work.new)
        return Estimate(1.0, io_seconds, hit, *recompute, overlapped=False)

    def pass_seconds(self, before: float, new: float) -> float:
        """Seconds that a pass over `new` tokens after `before` takes, as far as known."""
        seconds = self.computing.seconds(new, attention_pairs(before, new))
        # After far fewer tokens, a pass takes as long as any, which is no time per token.
        per_token = [took / own for own, took in self._after_loaded if 2 * own >= before]
        if before > new and len(per_token) > 1:
            # The lower median: one of two observations may have waited for a compiler.
            seconds = max(seconds, statistics.median_low(per_token) * before)
        return seconds

    def computing_seconds(self, before: int, new: int) -> float | None:
        """Seconds, or an upper bound, of computing `new` tokens after `before`; None if unknown."""
        return self._computing(before, new)[0]

    def faster_computing_seconds(self, left: float, before: int, new: int) -> float | None:
        """Seconds of computing, if less than the `left` seconds of a load; otherwise None."""
        computing = self.computing_seconds(before, new)
        return computing if computing is not None and left > computing else None

    def max_layer_wait(self, left: float, before: int, new: int) -> float | None:
        """Seconds that a pass may wait for the rest of its prefix, which takes `left` seconds.

        None if the rest takes longer than the pass, which could then not hide it.
        """
        pass_seconds = self.pass_seconds(before, new)
        return MAX_WAIT_FACTOR * pass_seconds if left <= pass_seconds else None

    def _computing(self, before: int, new: int) -> tuple[float | None, bool]:
        return self.computing.bound(new, attention_pairs(before, new))

    def _blended_seconds(self, work: RequestLengths, computed: float) -> float:
        """Seconds for SGLang to compute `computed` tokens, spread evenly over the stored ones."""
        return self.computing.seconds(computed, computed * (work.resident + work.stored / 2))


def attention_pairs(before: float, new: float) -> float:
    """Number of pairs of a new token and a token that it attends to, after `before` tokens."""
    return new * (before + (new + 1) / 2)
