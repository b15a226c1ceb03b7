"""What reading costs on this device, learnt from the reads themselves.

The time of a read is modelled as a * pieces + b * bytes. The two unknowns follow from a least
squares fit over recent reads in relative errors, so that short reads count as much as long ones.
Their quotient a / b is the gap, in bytes, below which it is cheaper to read through than to start a
new piece.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# A fast NVMe drive behind a pool of Python threads; a fit without observations says just this.
START_SECONDS_PER_PIECE = 30e-6
START_SECONDS_PER_BYTE = 1 / 2e9
# Reads that the fit remembers, as the time constant of an exponential.
MEMORY_READS = 200
GUESS_WEIGHT = 1e-4
RIDGE = 1e-7
MAX_GAP_BYTES = 1 << 20


class ReadCost:
    """Running fit of the time of reads; one thread at a time."""

    def __init__(self) -> None:
        self._start = np.array([START_SECONDS_PER_PIECE, START_SECONDS_PER_BYTE])
        # The first guess is a faint observation of each unknown, and fades like any other.
        self._matrix = np.diag(GUESS_WEIGHT * self._start**-2.0)
        self._target = GUESS_WEIGHT / self._start

    def observe(self, pieces: int, num_bytes: int, seconds: float) -> None:
        """Learn from one read of `num_bytes` in `pieces` pieces."""
        if not num_bytes or seconds <= 0.0:
            return
        keep = 1.0 - 1.0 / MEMORY_READS
        row = np.array([pieces, num_bytes]) / seconds
        self._matrix = keep * self._matrix + np.outer(row, row)
        self._target = keep * self._target + row

    @property
    def seconds_per_piece(self) -> float:
        """Time that one more piece takes, whatever its size."""
        return float(self._solve()[0])

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth once a piece is started."""
        return float(1.0 / self._solve()[1])

    @property
    def gap_bytes(self) -> int:
        """Gap between two wanted runs that is as cheap to read as to skip."""
        per_piece, per_byte = self._solve()
        return int(min(per_piece / per_byte, MAX_GAP_BYTES))

    def _solve(self) -> npt.NDArray[np.float64]:
        least = 1e-3 * self._start
        # The ridge keeps a series of like reads, which cannot tell the unknowns apart, defined.
        ridge = RIDGE * self._start**-2.0
        matrix, target = self._matrix + np.diag(ridge), self._target + ridge * self._start
        solution: npt.NDArray[np.float64] = np.linalg.solve(matrix, target)
        for index in (0, 1):
            if solution[index] < least[index]:
                # The best fit with this unknown at its bound.
                other = 1 - index
                rest = target[other] - matrix[other, index] * least[index]
                solution[index] = least[index]
                solution[other] = max(rest / matrix[other, other], least[other])
                break
        return solution
