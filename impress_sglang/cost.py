"""What something costs, learnt from measured times: two forms, each with two unknown rates.

    `TwoTermCost`   time = a * x + b * y
    `FlooredCost`   time = the longer of a constant and a * x + b * y

The rates follow from a least squares fit of relative errors over recent observations, so that short
times count as much as long ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence

# Observations that the fit remembers, as the time constant of an exponential.
MEMORY = 200
_KEEP = 1.0 - 1.0 / MEMORY
GUESS_WEIGHT = 1e-4
# How strongly the unknowns keep the ratio of the first guess, where observations do not show it.
RIDGE = 1e-9
# More where few sizes may be seen, and longer ones be asked for.
FLOORED_RIDGE = 1e-3
# If so many recent times were longer or shorter than expected by this factor, the device has
# changed: what was learnt is scaled, and becomes a faint guess.
CHANGED_FACTOR = 1.5
# More where times of one octave differ with what the size does not say: as many new tokens may
# attend to few tokens or to many.
FLOORED_CHANGED_FACTOR = 1.8
CHANGED_MEMORY = 8
SCALED_WEIGHT = 0.05
# How alike errors must be for that: their median divided by their mean deviation from it.
ALIKE = 2.0
# For fewer observations, the fit is still learning the ratio of the terms.
CHANGED_AFTER = 16
# Lower bound of the unknowns, in units of the first guess.
LEAST = 1e-6
# An octave that takes so many times as long as the shortest one shows the rates: on a CPU, what a
# pass takes in any case is added, and then a quarter of that at most.
LONGER = 4.0
# What is so many times as large as all that was seen is not known by rates.
FARTHER = 10.0
# The constant is seen where the smallest sizes take so many times what the rates say.
SHOWN = 1.2
# An octave has the weight of at most so many observations: most passes may be short.
OCTAVE_WEIGHT = 8.0


class TwoTermCost:
    """Running fit of time = a * x + b * y; one thread observes at a time.

    Unknowns are in units of the first guess, so that numbers are near one.
    """

    def __init__(self, first_x: float, first_y: float) -> None:
        """The first guess of a and of b, in seconds per unit of x and of y."""
        self.observations = 0
        self._first_x, self._first_y = first_x, first_y
        # The first guess is a faint observation of each unknown, and fades like any other.
        self._rows = _Rows(GUESS_WEIGHT, 0.0, GUESS_WEIGHT, GUESS_WEIGHT, GUESS_WEIGHT)
        self._drift = _Drift(CHANGED_FACTOR)
        self._solution: tuple[float, float] | None = None

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Learn from something of the size (x, y), y > 0, that took this many seconds."""
        if y <= 0 or seconds <= 0.0:
            return
        error = math.log(seconds / self.seconds(x, y))
        if self.observations == 0:
            # The first guess may be off by orders of magnitude; only its ratio is of use.
            self._rows.scale(math.exp(error), 1.0)
        if self.observations >= CHANGED_AFTER and (factor := self._drift.follow(error)):
            self._rows.scale(factor, SCALED_WEIGHT)
        self.observations += 1
        self._rows.add(x * self._first_x / seconds, y * self._first_y / seconds)
        self._solution = None

    def seconds(self, x: float, y: float) -> float:
        """Seconds that something of the size (x, y) will take."""
        per_x, per_y = self.solve()
        return x * per_x + y * per_y

    def solve(self) -> tuple[float, float]:
        """a and b, in seconds per unit."""
        # Another thread may observe meanwhile.
        solution = self._solution
        if solution is None:
            self._solution = solution = self._rows.solve()
        return solution[0] * self._first_x, solution[1] * self._first_y


class FlooredCost:
    """Running fit of time = the longer of a constant and a * x + b * y; one thread.

    Such is a pass of a model on a GPU: it reads all weights and starts all kernels in any case, and
    computes meanwhile. Observations are gathered by octaves of their size, which is what the first
    guess says. Nothing takes longer than what is larger: where an octave did, as one that a
    compiler disturbed, the times of larger ones stand for it. Octaves that take `LONGER` times as
    long as the shortest one show the rates, the others only bound them.
    """

    def __init__(self, first_x: float, first_y: float, *, trusts_once: bool = True) -> None:
        """The first guess of a and of b, in seconds per unit; only the ratio is of use.

        `trusts_once`: whether a single observation of an octave counts.
        """
        self.observations = 0
        self._first_x, self._first_y = first_x, first_y
        self._least_count = 1 if trusts_once else 2
        self._octaves: dict[int, _Octave] = {}
        self._drift = _Drift(FLOORED_CHANGED_FACTOR)
        self._fit: _Floored | None = None

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Learn from something of the size (x, y), both > 0, that took this many seconds."""
        if x <= 0 or y <= 0 or seconds <= 0.0:
            return
        own_x, own_y = x * self._first_x, y * self._first_y
        octave = self._octaves.setdefault(math.frexp(own_x + own_y)[1], _Octave())
        if octave.count >= self._least_count and self.observations >= CHANGED_AFTER:
            fit = self._solve()
            larger = fit.seconds(own_x, own_y) / fit.seconds(octave.mean_x, octave.mean_y)
            factor = self._drift.follow(math.log(seconds / (octave.seconds * larger)))
            if factor:
                for own in self._octaves.values():
                    own.scale(factor)
        self.observations += 1
        octave.add(own_x, own_y, seconds)
        self._fit = None

    def seconds(self, x: float, y: float) -> float | None:
        """Seconds that something of the size (x, y) will take; None: larger than what was seen.

        It is not None if the rates are known, or what was seen to take the constant is as large.
        """
        fit = self._solve()
        known = fit.largest * (FARTHER if fit.known else 1.0)
        return self.least(x, y) if self._size(x, y) <= known else None

    def least(self, x: float, y: float) -> float:
        """Seconds that something of the size (x, y) takes at least; 0.0 if nothing was seen."""
        fit = self._solve()
        least = self.share(x, y) if fit.known else fit.between(self._size(x, y))
        return max(fit.constant, least)

    def share(self, x: float, y: float) -> float:
        """Seconds that (x, y) is of what takes longer than the constant; 0.0 if nothing was seen.

        As long as only the constant was seen, that is at most so much of it.
        """
        per_x, per_y = self._solve().rates
        return x * per_x * self._first_x + y * per_y * self._first_y

    def most(self, x: float, y: float) -> float | None:
        """Seconds that something of the size (x, y) takes at most; None if nothing was seen."""
        size = self._size(x, y)
        bounds = (max(own.shortest, size * own.lowest_rate) for own in self._octaves.values())
        return min(bounds, default=None)

    def _size(self, x: float, y: float) -> float:
        return x * self._first_x + y * self._first_y

    def _solve(self) -> _Floored:
        if self._fit is None:
            self._fit = self._solve_octaves()
        return self._fit

    def _solve_octaves(self) -> _Floored:
        octaves = [octave for _, octave in sorted(self._octaves.items(), reverse=True)]
        octaves = [own for own in octaves if own.count >= self._least_count]
        if not octaves:
            return _NOTHING
        times = list(itertools.accumulate((own.seconds for own in octaves), min))
        shortest, largest = times[-1], octaves[0].largest
        rows = _Rows()
        for octave, seconds in zip(octaves, times, strict=True):
            if seconds >= LONGER * shortest:
                rows.join(octave.rows, min(octave.weight, OCTAVE_WEIGHT) / octave.weight)
        known = rows.x > 0.0
        rates = rows.solve(FLOORED_RIDGE) if known else (shortest / octaves[0].size,) * 2
        # One observation does not show what less takes: if something disturbed it, its like might
        # never be tried again.
        last = max((place for place, own in enumerate(octaves) if own.count > 1), default=0)
        points = [(octaves[place].size, times[place]) for place in range(last, -1, -1)]
        # Where even the smallest sizes take what the rates say, the constant was not seen.
        smallest = octaves[last]
        is_seen = shortest > SHOWN * (smallest.mean_x * rates[0] + smallest.mean_y * rates[1])
        return _Floored(shortest if is_seen else 0.0, rates, known, points, largest)


@dataclasses.dataclass(frozen=True, slots=True)
class _Floored:
    """The constant, 0.0 if it was not seen; rates in units of the first guess, bounds unless known.

    And what was seen: sizes and times, both ascending, and the largest size.
    """

    constant: float
    rates: tuple[float, float]
    known: bool
    points: Sequence[tuple[float, float]]
    largest: float

    def between(self, size: float) -> float:
        """The time of a size between those that were seen, or of the largest one."""
        before = 0.0, 0.0
        for after in self.points:
            if size < after[0]:
                share = (size - before[0]) / (after[0] - before[0])
                return before[1] + share * (after[1] - before[1])
            before = after
        return before[1]

    def seconds(self, x: float, y: float) -> float:
        """The longer of both."""
        return max(self.constant, x * self.rates[0] + y * self.rates[1])


_NOTHING = _Floored(0.0, (0.0, 0.0), known=False, points=(), largest=0.0)


class _Rows:
    """Sums over relative rows (x, y) / T: with A their outer products' and w the rows' own, the
    unknowns z solve A z = w.
    """

    __slots__ = ("x", "xx", "xy", "y", "yy")

    def __init__(
        self, xx: float = 0.0, xy: float = 0.0, yy: float = 0.0, x: float = 0.0, y: float = 0.0
    ) -> None:
        self.xx, self.xy, self.yy, self.x, self.y = xx, xy, yy, x, y

    def add(self, x: float, y: float) -> None:
        """Add a row; older ones fade."""
        self.xx = _KEEP * self.xx + x * x
        self.xy = _KEEP * self.xy + x * y
        self.yy = _KEEP * self.yy + y * y
        self.x = _KEEP * self.x + x
        self.y = _KEEP * self.y + y

    def join(self, rows: _Rows, weight: float) -> None:
        """Add all rows of another, with this weight."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + weight * getattr(rows, name))

    def scale(self, factor: float, weight: float) -> None:
        """Treat all rows as if they had taken `factor` times as long, with this weight."""
        self.xx, self.xy, self.yy = (
            weight * own / factor**2 for own in (self.xx, self.xy, self.yy)
        )
        self.x, self.y = weight * self.x / factor, weight * self.y / factor

    def solve(self, ridge: float = RIDGE) -> tuple[float, float]:
        """The unknowns, each at least `LEAST`; `ridge`: how strongly they keep their ratio."""
        # With one scale for both unknowns the fit is always defined. From there, each is fitted as
        # far as observations determine it, and otherwise keeps the ratio of the first guess.
        scale = (self.x + self.y) / (self.xx + 2 * self.xy + self.yy)
        ridge *= self.xx + self.yy
        xx, yy = self.xx + ridge, self.yy + ridge
        x, y = self.x + ridge * scale, self.y + ridge * scale
        determinant = xx * yy - self.xy * self.xy
        per_x = (x * yy - y * self.xy) / determinant
        per_y = (y * xx - x * self.xy) / determinant
        # An unknown below its bound is set to it, and the other to the best value with that.
        if per_x < LEAST:
            return LEAST, max((y - self.xy * LEAST) / yy, LEAST)
        if per_y < LEAST:
            return max((x - self.xy * LEAST) / xx, LEAST), LEAST
        return per_x, per_y


class _Octave:
    """Recent observations whose sizes are within a factor of two."""

    def __init__(self) -> None:
        self.rows = _Rows()
        self.count = 0
        # Of observations, faded like their rows; the means belong to it.
        self.weight = 0.0
        self.mean_x = self.mean_y = self.log_seconds = 0.0
        self.largest = 0.0
        # What is disturbed takes longer, never less.
        self.shortest = self.lowest_rate = math.inf

    @property
    def seconds(self) -> float:
        """Geometric mean of the times, which one odd time does not move far."""
        return math.exp(self.log_seconds)

    @property
    def size(self) -> float:
        """Mean size, in seconds of the first guess."""
        return self.mean_x + self.mean_y

    def add(self, x: float, y: float, seconds: float) -> None:
        """Note an observation; the first one, which may have compiled something, is faint then."""
        if self.count == 1:
            self._fade(SCALED_WEIGHT)
        self.count += 1
        self.rows.add(x / seconds, y / seconds)
        self.weight = _KEEP * self.weight + 1.0
        self.mean_x += (x - self.mean_x) / self.weight
        self.mean_y += (y - self.mean_y) / self.weight
        self.log_seconds += (math.log(seconds) - self.log_seconds) / self.weight
        self.largest = max(self.largest, x + y)
        self.shortest = min(self.shortest, seconds)
        self.lowest_rate = min(self.lowest_rate, seconds / (x + y))

    def scale(self, factor: float) -> None:
        """Treat all as if it had taken `factor` times as long, and as no more than a few."""
        self.rows.scale(factor, 1.0)
        self._fade(min(1.0, OCTAVE_WEIGHT / self.weight))
        self.log_seconds += math.log(factor)
        self.shortest *= factor
        self.lowest_rate *= factor

    def _fade(self, weight: float) -> None:
        self.rows.scale(1.0, weight)
        self.weight *= weight


class _Drift:
    """How much longer things took than expected, lately: notices that a device has changed.

    Relative rows of slow observations are small, so a fit alone would follow a device that becomes
    slower only after the fast times are forgotten.
    """

    def __init__(self, least: float) -> None:
        """`least`: the factor from which on things have changed."""
        self._least = math.log(least)
        self._errors: deque[float] = deque(maxlen=CHANGED_MEMORY)

    def follow(self, error: float) -> float | None:
        """Note the logarithm of measured / expected; the factor by which all has changed, or None.

        `ALIKE` errors are one change, if none of them speaks against it; it is told once.
        """
        errors = self._errors
        errors.append(error)
        if len(errors) < CHANGED_MEMORY:
            return None
        middle = statistics.median(errors)
        deviation = statistics.fmean(abs(own - middle) for own in errors)
        against = min(math.copysign(1.0, middle) * own for own in errors)
        if abs(middle) < max(self._least, ALIKE * deviation) or against < self._least / 2:
            return None
        errors.clear()
        return math.exp(middle)
