"""A token bucket that makes an SSD slower than it is, for benchmarks."""

from __future__ import annotations

import math
import threading
import time


class TokenBucket:
    """Lets `bytes_per_second` pass, over all threads.

    An idle bucket holds `burst_bytes`, but no more than pass in `burst_seconds`: what it holds
    makes up for a late start of a thread, and must not make short reads free.
    """

    def __init__(
        self,
        bytes_per_second: float,
        burst_bytes: int = 64 << 10,
        burst_seconds: float = math.inf,
    ) -> None:
        """A rate of 0 lets everything pass."""
        self._burst_bytes = burst_bytes
        self._most_burst_seconds = burst_seconds
        self._lock = threading.Lock()
        self._paid_until = 0.0
        self.set_rate(bytes_per_second)

    def set_rate(self, bytes_per_second: float) -> None:
        """Change the rate; 0 lets everything pass."""
        assert bytes_per_second >= 0
        self._seconds_per_byte = 1.0 / bytes_per_second if bytes_per_second else 0.0
        self._burst_seconds = min(
            self._burst_bytes * self._seconds_per_byte, self._most_burst_seconds
        )

    @property
    def limited(self) -> bool:
        """Whether there is a rate at all."""
        return bool(self._seconds_per_byte)

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may pass."""
        if not self._seconds_per_byte:
            return
        with self._lock:
            start = max(self._paid_until, time.monotonic() - self._burst_seconds)
            self._paid_until = start + num_bytes * self._seconds_per_byte
            ready = self._paid_until
        if (wait := ready - time.monotonic()) > 0:
            time.sleep(wait)
