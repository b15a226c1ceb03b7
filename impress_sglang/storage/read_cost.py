"""What reading costs on this device, learnt from the reads themselves.

The time of a read is modelled as a * pieces + b * bytes. The two unknowns follow from a least
squares fit over recent reads in relative errors, so that short reads count as much as long ones.
Their quotient a / b is the gap, in bytes, below which it is cheaper to read through than to start a
new piece.
"""

from __future__ import annotations

# A fast NVMe drive behind a pool of Python threads; a fit without observations says just this.
START_SECONDS_PER_PIECE = 30e-6
START_SECONDS_PER_BYTE = 1 / 2e9
# Reads that the fit remembers, as the time constant of an exponential.
MEMORY_READS = 200
GUESS_WEIGHT = 1e-4
RIDGE = 1e-7
# Bound of the unknowns, in units of the first guess.
LEAST = 1e-3
MAX_GAP_BYTES = 1 << 20


class ReadCost:
    """Running fit of the time of reads; one thread at a time.

    With relative rows (n, B) / T the unknowns x solve A x = y, where A sums the rows' outer
    products and y the rows. They are kept in units of the first guess, so that numbers are near
    one.
    """

    def __init__(self) -> None:
        # The first guess is a faint observation of each unknown, and fades like any other.
        self._pp = self._bb = self._p = self._b = GUESS_WEIGHT
        self._pb = 0.0
        self._solution: tuple[float, float] | None = None

    def observe(self, pieces: int, num_bytes: int, seconds: float) -> None:
        """Learn from one read of `num_bytes` in `pieces` pieces."""
        if not num_bytes or seconds <= 0.0:
            return
        keep = 1.0 - 1.0 / MEMORY_READS
        p = pieces * START_SECONDS_PER_PIECE / seconds
        b = num_bytes * START_SECONDS_PER_BYTE / seconds
        self._pp = keep * self._pp + p * p
        self._bb = keep * self._bb + b * b
        self._pb = keep * self._pb + p * b
        self._p = keep * self._p + p
        self._b = keep * self._b + b
        self._solution = None

    @property
    def seconds_per_piece(self) -> float:
        """Time that one more piece takes, whatever its size."""
        return self._solve()[0] * START_SECONDS_PER_PIECE

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth once a piece is started."""
        return 1.0 / (self._solve()[1] * START_SECONDS_PER_BYTE)

    @property
    def gap_bytes(self) -> int:
        """Gap between two wanted runs that is as cheap to read as to skip."""
        return int(min(self.seconds_per_piece * self.bytes_per_second, MAX_GAP_BYTES))

    def _solve(self) -> tuple[float, float]:
        if self._solution is None:
            self._solution = self._fit()
        return self._solution

    def _fit(self) -> tuple[float, float]:
        # The ridge keeps a series of like reads, which cannot tell the unknowns apart, defined.
        pp, bb = self._pp + RIDGE, self._bb + RIDGE
        p, b = self._p + RIDGE, self._b + RIDGE
        determinant = pp * bb - self._pb * self._pb
        per_piece = (p * bb - b * self._pb) / determinant
        per_byte = (b * pp - p * self._pb) / determinant
        # Outside of its bound an unknown takes it, and the other the best value with that.
        if per_piece < LEAST:
            return LEAST, max((b - self._pb * LEAST) / bb, LEAST)
        if per_byte < LEAST:
            return max((p - self._pb * LEAST) / pp, LEAST), LEAST
        return per_piece, per_byte
