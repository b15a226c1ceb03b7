"""How long parts of a forward pass take on the device that computes them.

An accelerator computes after the host has launched, so that the host's clock shows neither what the
device is at nor when; where the host waits for it, the clock shows what was launched long before.
Times are therefore those between the device's own events, and they are known later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch


class Event(Protocol):
    """A point in the work of a device, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Stand after all that was launched by now."""

    def query(self) -> bool:
        """Whether the device has come so far; it is not waited for."""

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds to a later event; the device has passed both."""


class HostEvent:
    """See `Event`: of a device that computes while the host waits."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        """See `Event.record`."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """See `Event.query`."""
        return True

    def elapsed_time(self, later: HostEvent, /) -> float:
        """See `Event.elapsed_time`."""
        return (later._at - self._at) * 1e3


class Stopwatch:
    """Adds up the times between its beginnings and ends; also a context manager.

    One that never ran shows 0. A beginning and its end are launched on the same stream.
    """

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._began: Event | None = None
        self._spans: list[tuple[Event, Event]] = []

    @property
    def running(self) -> bool:
        """Whether it has begun and not ended."""
        return self._began is not None

    def begin(self) -> None:
        """Run from here on."""
        assert self._began is None, "it runs"
        self._began = self._recorded()

    def end(self) -> None:
        """Run no longer."""
        assert self._began is not None, "it does not run"
        self._spans.append((self._began, self._recorded()))
        self._began = None

    def seconds(self) -> float | None:
        """What it shows; None while the device has not come to all its ends."""
        assert self._began is None, "it runs"
        if not all(ended.query() for _, ended in self._spans):
            return None
        return sum(began.elapsed_time(ended) for began, ended in self._spans) / 1e3

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _recorded(self) -> Event:
        event = self._new_event()
        event.record()
        return event


class Clock:
    """Hands out stopwatches, and tells what they show once it is known; one thread.

    It never waits for the device. A stopwatch that is dropped leaves nothing behind.
    """

    def __init__(self, new_event: Callable[[], Event]) -> None:
        """`new_event` makes events that measure time."""
        self._new_event = new_event
        self._unknown: deque[tuple[tuple[Stopwatch, ...], Callable[[list[float]], None]]] = deque()

    def stopwatch(self) -> Stopwatch:
        """A new one, which shows 0."""
        return Stopwatch(self._new_event)

    def when_known(
        self, stopwatches: Sequence[Stopwatch], note: Callable[[list[float]], None]
    ) -> None:
        """Call `note` with the seconds of stopwatches that have ended, of any clock of the device.

        That is now, or in a later `when_known` or `poll`, in the order of these calls.
        """
        assert not any(stopwatch.running for stopwatch in stopwatches)
        self._unknown.append((tuple(stopwatches), note))
        self.poll()

    def poll(self) -> None:
        """Call what has become known."""
        while self._unknown:
            stopwatches, note = self._unknown[0]
            seconds = [own for each in stopwatches if (own := each.seconds()) is not None]
            if len(seconds) < len(stopwatches):
                return
            self._unknown.popleft()
            note(seconds)


def clock_for(device: torch.device) -> Clock:
    """The clock of what a device computes."""
    if device.type == "cpu":
        return Clock(HostEvent)
    module = torch.get_device_module(device)
    return Clock(lambda: module.Event(enable_timing=True))
