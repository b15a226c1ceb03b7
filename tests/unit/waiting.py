"""Waiting for what other threads do, and time that only a test lets pass."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT = 20.0


def wait_until(condition: Callable[[], object], seconds: float = TIMEOUT) -> None:
    """Ask again and again; a test fails if the answer stays no."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Clock:
    """Seconds that pass when a test says so."""

    now = 10_000.0

    def __call__(self) -> float:
        return self.now
