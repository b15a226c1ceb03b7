"""What something costs, learnt from measured times: time = a * x + b * y, or with more terms.

The unknowns follow from a least squares fit of relative errors over recent observations, so that
short times count as much as long ones.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

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


class LinearCost:
    """Running fit; one thread observes at a time.

    With relative rows, sizes / T, the unknowns z solve A z = w, where A sums the rows' outer
    products and w the rows. They are kept in units of the first guess: numbers are near one.
    """

    def __init__(self, *first: float) -> None:
        """The first guess of each unknown, in seconds per unit of its size."""
        self.observations = 0
        self._first = first
        # The first guess is a faint observation of each unknown, and fades like any other.
        terms = range(len(first))
        self._products = [[GUESS_WEIGHT * (own == other) for other in terms] for own in terms]
        self._rows = [GUESS_WEIGHT] * len(first)
        # Logarithm of how much longer things took than expected: mean, and mean deviation from it.
        self._drift = self._deviation = 0.0
        self._solution: list[float] | None = None

    def observe(self, sizes: Sequence[float], seconds: float) -> None:
        """Learn from something of these sizes, the last of which is not 0, and its seconds."""
        if sizes[-1] <= 0 or seconds <= 0.0:
            return
        self._follow(math.log(seconds / self.seconds(*sizes)))
        self.observations += 1
        keep = 1.0 - 1.0 / MEMORY
        # Plain numbers: for so few of them NumPy takes three times as long.
        row = [guess * size / seconds for guess, size in zip(self._first, sizes, strict=True)]
        self._products = [
            [keep * old + own * other for old, other in zip(products, row, strict=True)]
            for own, products in zip(row, self._products, strict=True)
        ]
        self._rows = [keep * old + own for old, own in zip(self._rows, row, strict=True)]
        self._solution = None

    def seconds(self, *sizes: float) -> float:
        """Seconds that something of these sizes will take."""
        return sum(map(operator.mul, self.solve(), sizes))

    def solve(self) -> list[float]:
        """The unknowns, in seconds per unit."""
        # Another thread may observe meanwhile.
        solution = self._solution
        if solution is None:
            self._solution = solution = list(map(operator.mul, self._first, self._fit()))
        return solution

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
        square = weight / factor**2
        self._products = [[square * own for own in row] for row in self._products]
        self._rows = [weight * own / factor for own in self._rows]
        self._solution = None

    def _fit(self) -> list[float]:
        # With one scale for all unknowns the fit is always defined. From there, each is fitted as
        # far as observations determine it, and otherwise keeps the ratio of the first guess.
        products, rows = self._products, self._rows
        terms = range(len(rows))
        scale = sum(rows) / sum(map(sum, products))
        ridge = RIDGE * sum(products[own][own] for own in terms)
        free, found = list(terms), [LEAST] * len(terms)
        # One that is below its bound is set to it, and the others to the best values with that.
        while free:
            bound = [own for own in terms if own not in free]
            solved = _solve(
                [[products[own][other] + ridge * (own == other) for other in free] for own in free],
                [
                    rows[own] + ridge * scale - LEAST * sum(products[own][at] for at in bound)
                    for own in free
                ],
            )
            lowest = min(range(len(free)), key=solved.__getitem__)
            if solved[lowest] >= LEAST:
                for own, value in zip(free, solved, strict=True):
                    found[own] = value
                break
            del free[lowest]
        return found


def _solve(products: list[list[float]], rows: list[float]) -> list[float]:
    """Solve a symmetric positive definite system by elimination, in place."""
    terms = range(len(rows))
    for done in terms:
        for own in terms[done + 1 :]:
            factor = products[own][done] / products[done][done]
            for other in terms[done:]:
                products[own][other] -= factor * products[done][other]
            rows[own] -= factor * rows[done]
    for own in reversed(terms):
        rest = sum(products[own][other] * rows[other] for other in terms[own + 1 :])
        rows[own] = (rows[own] - rest) / products[own][own]
    return rows
