"""A token bucket that makes an SSD slower than it is, for benchmarks."""

from __future__ import annotations

import threading
import time


class TokenBucket:
    """Lets `bytes_per_second` pass, over all threads; an idle bucket holds `burst_bytes`."""

    def __init__(self, bytes_per_second: float, burst_bytes: int = 64 << 10) -> None:
        assert bytes_per_second > 0
        self._seconds_per_byte = 1.0 / bytes_per_second
        self._burst_seconds = burst_bytes * self._seconds_per_byte
        self._lock = threading.Lock()
        self._paid_until = 0.0

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may pass."""
        with self._lock:
            start = max(self._paid_until, time.monotonic() - self._burst_seconds)
            self._paid_until = start + num_bytes * self._seconds_per_byte
            ready = self._paid_until
        if (wait := ready - time.monotonic()) > 0:
            time.sleep(wait)
