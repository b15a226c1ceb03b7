"""How long forward passes take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch


class PassClock(Protocol):
    """Times one pass at a time."""

    def start(self) -> None:
        """A pass begins."""

    def stop(self, note: Callable[[float], None]) -> None:
        """The pass ends; `note` gets its seconds, now or at the start of a later pass."""


class HostClock:
    """For a device that computes while the host waits."""

    def __init__(self) -> None:
        self._began = 0.0

    def start(self) -> None:
        """See `PassClock.start`."""
        self._began = time.perf_counter()

    def stop(self, note: Callable[[float], None]) -> None:
        """See `PassClock.stop`."""
        note(time.perf_counter() - self._began)


class DeviceClock:
    """For an accelerator, which computes after the host has launched: by the device's own events.

    `new_event` makes an event with `record()`, `query()` and `elapsed_time(later)` in milliseconds.
    """

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._began: Any = None
        self._under_way: deque[tuple[Any, Any, Callable[[float], None]]] = deque()

    def start(self) -> None:
        """See `PassClock.start`."""
        while self._under_way and self._under_way[0][1].query():
            began, ended, note = self._under_way.popleft()
            note(began.elapsed_time(ended) / 1e3)
        self._began = self._new_event()
        self._began.record()

    def stop(self, note: Callable[[float], None]) -> None:
        """See `PassClock.stop`."""
        ended = self._new_event()
        ended.record()
        self._under_way.append((self._began, ended, note))


def clock_for(device: torch.device) -> PassClock:
    """The clock for passes on a device."""
    if device.type == "cpu":
        return HostClock()
    module = torch.get_device_module(device)
    return DeviceClock(lambda: module.Event(enable_timing=True))
