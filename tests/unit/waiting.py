"""Waiting for other threads, time that only a test lets pass, and calls that it looks at."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

# A loaded machine may take long.
TIMEOUT = 60.0


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


class Call(NamedTuple):
    """What a function was given by place, and what it gave."""

    args: tuple[Any, ...]
    result: Any


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Call]:
    """All calls of a function from now on; it does what it did."""
    calls: list[Call] = []
    original = getattr(owner, name)

    def noted(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        calls.append(Call(args, result))
        return result

    monkeypatch.setattr(owner, name, noted)
    return calls
