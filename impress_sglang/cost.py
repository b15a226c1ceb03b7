"""What something costs, learnt from what it took: time = a * x + b * y.

The two unknowns follow from a least squares fit over recent observations in relative errors, so
that short ones count as much as long ones.
"""

from __future__ import annotations

# Observations that the fit remembers, as the time constant of an exponential.
MEMORY = 200
GUESS_WEIGHT = 1e-4
RIDGE = 1e-7
# Bound of the unknowns, in units of the first guess.
LEAST = 1e-3


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
        self._solution: tuple[float, float] | None = None

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Learn from something of the size (x, y), y > 0, that took so long."""
        if y <= 0 or seconds <= 0.0:
            return
        self.observations += 1
        keep = 1.0 - 1.0 / MEMORY
        own_x = x * self._first_x / seconds
        own_y = y * self._first_y / seconds
        self._xx = keep * self._xx + own_x * own_x
        self._yy = keep * self._yy + own_y * own_y
        self._xy = keep * self._xy + own_x * own_y
        self._x = keep * self._x + own_x
        self._y = keep * self._y + own_y
        self._solution = None

    def seconds(self, x: float, y: float) -> float:
        """What something of the size (x, y) will take."""
        per_x, per_y = self.solve()
        return x * per_x + y * per_y

    def solve(self) -> tuple[float, float]:
        """a and b, in seconds per unit."""
        if self._solution is None:
            self._solution = self._fit()
        return self._solution[0] * self._first_x, self._solution[1] * self._first_y

    def _fit(self) -> tuple[float, float]:
        # The ridge keeps a series of like observations, which cannot tell the unknowns apart,
        # defined.
        xx, yy = self._xx + RIDGE, self._yy + RIDGE
        x, y = self._x + RIDGE, self._y + RIDGE
        determinant = xx * yy - self._xy * self._xy
        per_x = (x * yy - y * self._xy) / determinant
        per_y = (y * xx - x * self._xy) / determinant
        # Outside of its bound an unknown takes it, and the other the best value with that.
        if per_x < LEAST:
            return LEAST, max((y - self._xy * LEAST) / yy, LEAST)
        if per_y < LEAST:
            return max((x - self._xy * LEAST) / xx, LEAST), LEAST
        return per_x, per_y
