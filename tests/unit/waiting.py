"""Waiting for what other threads do."""

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
