"""What reading costs on this device, learnt from the reads themselves.

The time of a read is modelled as a * pieces + b * bytes. The quotient a / b is the gap, in bytes,
below which it is cheaper to read through than to start a new piece.
"""

from __future__ import annotations

from impress_sglang.cost import MEMORY, TwoTermCost

# A fast NVMe drive with many reads in flight.
START_SECONDS_PER_PIECE = 4e-6
START_SECONDS_PER_BYTE = 1 / 2e9
# With many reads in flight, a start never costs more than reading this much. Without a bound, gaps
# that are read through would never be skipped, and it would never be seen that this pays.
MAX_GAP_BYTES = 64 << 10


class ReadCost(TwoTermCost):
    """Running fit of the time of reads; one thread observes at a time."""

    def __init__(self) -> None:
        super().__init__(START_SECONDS_PER_PIECE, START_SECONDS_PER_BYTE)
        self._pieces = 0.0
        self._bytes = 0.0

    def observe(self, pieces: float, num_bytes: float, seconds: float) -> None:
        """Learn from one read of `num_bytes` in `pieces` pieces."""
        if num_bytes <= 0 or seconds <= 0.0:
            return
        super().observe(pieces, num_bytes, seconds)
        keep = 1.0 - 1.0 / MEMORY
        self._pieces = keep * self._pieces + pieces
        self._bytes = keep * self._bytes + num_bytes

    @property
    def seconds_per_piece(self) -> float:
        """Time that one more piece takes, whatever its size."""
        return self.solve()[0]

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth once a piece is started."""
        return 1.0 / self.solve()[1]

    @property
    def gap_bytes(self) -> int:
        """Gap between two wanted runs that is as cheap to read as to skip."""
        return int(min(self.seconds_per_piece * self.bytes_per_second, MAX_GAP_BYTES))

    def seconds_for(self, num_bytes: float) -> float:
        """Seconds that reading so many bytes takes, in pieces as long as recent ones."""
        pieces = num_bytes * self._pieces / self._bytes if self._bytes else 0.0
        return self.seconds(pieces, num_bytes)
