"""Whether the disk can be used now, so that its failures do not reach the scheduler.

Any thread reports failures; the scheduler's thread asks, and leaves the store alone while it is
degraded. A probe, after a pause that doubles with each failure, finds when the disk answers again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0


class Health:
    """`ok`, `read-only` (nothing is stored) or `degraded` (nothing is read or stored)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds; it never goes back."""
        self._clock = clock
        self._lock = threading.Lock()
        self._readable = self._writable = True
        self._since, self._probe_at = -math.inf, 0.0
        self._pause = FIRST_PAUSE_S
        self._failures = self._recoveries = 0
        self._last_failure = ""

    @property
    def readable(self) -> bool:
        """Whether stored prefixes may be looked for."""
        return self._readable

    @property
    def writable(self) -> bool:
        """Whether prefixes may be stored."""
        return self._writable

    @property
    def state(self) -> str:
        """One word for the statistics page."""
        return "degraded" if not self._readable else "ok" if self._writable else "read-only"

    def failed(self, what: str, error: BaseException, *, reading: bool) -> None:
        """Report a failure; `reading`: because of it, stored prefixes cannot be used either."""
        with self._lock:
            self._failures += 1
            self._last_failure = f"{what}: {error}"
            worse = self._writable or (self._readable and reading)
            if self._writable:
                # A disk that fails again soon after its recovery is probed less and less often.
                rested = self._clock() - self._since > 2 * self._pause
                self._pause = FIRST_PAUSE_S if rested else min(2 * self._pause, LONGEST_PAUSE_S)
                self._since = self._clock()
                self._probe_at = self._since + self._pause
            self._readable, self._writable = self._readable and not reading, False
        if worse:
            consequence = "nothing is read or stored" if reading else "nothing is stored"
            logger.warning(
                "the SSD store is %s: %s (%s); %s until it answers again",
                self.state,
                what,
                error,
                consequence,
            )

    @property
    def probe_is_due(self) -> bool:
        """Whether it is time to probe a disk that failed."""
        return not self._writable and self._clock() >= self._probe_at

    def probed(self, error: BaseException | None, *, readable: bool) -> None:
        """Report the result of a probe; `error` is None if all is well."""
        with self._lock:
            self._readable = self._readable or readable
            if error is not None:
                self._last_failure = f"a probe: {error}"
                self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
                self._probe_at = self._clock() + self._pause
                return
            self._writable = True
            self._recoveries += 1
            seconds, self._since = self._clock() - self._since, self._clock()
        logger.warning("the SSD store answers again after %.1f s", seconds)

    def summary(self) -> dict[str, Any]:
        """State and counters for the statistics page."""
        with self._lock:
            return {
                "state": self.state,
                "failures": self._failures,
                "recoveries": self._recoveries,
                "last_failure": self._last_failure,
            }
