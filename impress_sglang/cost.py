"""What something costs, learnt from measured times: time = a * x + b * y.

The two unknowns follow from a least squares fit of relative errors over recent observations, so
that short times count as much as long ones.
"""

from __future__ import annotations

import math

# Observations that the fit remembers, as the time constant of an exponential.
MEMORY = 200
GUESS_WEIGHT = 1e-4
# How strongly the unknowns keep the ratio of the first guess, where observations do not show it.
RIDGE = 1e-9
# If all recent times were longer or shorter than expected by this factor, the device has changed:
# what was learnt is scaled, and becomes a faint guess.
CHANGED_FACTOR = 1.5
CHANGED_MEMORY = 8
SCALED_WEIGHT = 0.05
# How alike errors must be for that: their mean divided by their mean deviation from it.
ALIKE = 2.0
# For fewer observations, the fit is still learning the ratio of the terms.
CHANGED_AFTER = 16
# Lower bound of the unknowns, in units of the first guess.
LEAST = 1e-6


class TwoTermCost:
    """Running fit; one thread observes at a time.

    With relative rows (x, y) / T the unknowns z solve A z = w, where A sums the rows' outer
    products and w the rows. They are kept in units of the first guess, so that numbers are near
    one.
    """

    def __init__(self, first_x: float, first_y: float) -> None:
        """The first guess of a and of b, in seconds per unit of x and of y."""
        self.observations = 0
        self._first_x, self._first_y = first_x, first_y
        # The first guess is a faint observation of each unknown, and fades like any other.
        self._xx = self._yy = self._x = self._y = GUESS_WEIGHT
        self._xy = 0.0
        # Logarithm of how much longer things took than expected: mean, and mean deviation from it.
        self._drift = self._deviation = 0.0
        self._solution: tuple[float, float] | None = None

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Learn from something of the size (x, y), y > 0, that took this many seconds."""
        if y <= 0 or seconds <= 0.0:
            return
        self._follow(math.log(seconds / self.seconds(x, y)))
        self.observations += 1
        keep = 1.0 - 1.0 / MEMORY
        own_x, own_y = x * self._first_x / seconds, y * self._first_y / seconds
        self._xx = keep * self._xx + own_x * own_x
        self._yy = keep * self._yy + own_y * own_y
        self._xy = keep * self._xy + own_x * own_y
        self._x = keep * self._x + own_x
        self._y = keep * self._y + own_y
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
            self._solution = solution = self._fit()
        return solution[0] * self._first_x, solution[1] * self._first_y

    def _follow(self, error: float) -> None:
        """Scale what was learnt, if everything takes longer or shorter now.

        Relative rows of slow observations are small, so a fit alone would follow a device that
        becomes slower only after the fast times are forgotten.
        """
        if self.observations == 0:
            # The first guess may be off by orders of magnitude; only its ratio is of use.
            self._scale(math.exp(error), 1.0)
        if self.observations < CHANGED_AFTER:
            return
        self._deviation += (abs(error - self._drift) - self._deviation) / CHANGED_MEMORY
        self._drift += (error - self._drift) / CHANGED_MEMORY
        changed = abs(self._drift) >= math.log(CHANGED_FACTOR)
        if changed and abs(self._drift) >= ALIKE * self._deviation:
            self._scale(math.exp(self._drift), SCALED_WEIGHT)
            self._drift = self._deviation = 0.0

    def _scale(self, factor: float, weight: float) -> None:
        """Treat all observations as if they had taken `factor` times as long, with this weight."""
        self._xx, self._yy, self._xy = (
            weight * own / factor**2 for own in (self._xx, self._yy, self._xy)
        )
        self._x, self._y = weight * self._x / factor, weight * self._y / factor
        self._solution = None

    def _fit(self) -> tuple[float, float]:
        # With one scale for both unknowns the fit is always defined. From there, each is fitted as
        # far as observations determine it, and otherwise keeps the ratio of the first guess.
        scale = (self._x + self._y) / (self._xx + 2 * self._xy + self._yy)
        ridge = RIDGE * (self._xx + self._yy)
        xx, yy = self._xx + ridge, self._yy + ridge
        x, y = self._x + ridge * scale, self._y + ridge * scale
        determinant = xx * yy - self._xy * self._xy
        per_x = (x * yy - y * self._xy) / determinant
        per_y = (y * xx - x * self._xy) / determinant
        # An unknown below its bound is set to it, and the other to the best value with that.
        if per_x < LEAST:
            return LEAST, max((y - self._xy * LEAST) / yy, LEAST)
        if per_y < LEAST:
            return max((x - self._xy * LEAST) / xx, LEAST), LEAST
        return per_x, per_y
