"""Measures how long parts of a forward pass take on the device that computes them.

An accelerator computes after the host has launched, so the host's clock does not show what the
device is doing when; and where the host waits, its clock shows work that was launched long before.
Times are therefore measured between the device's own events, and are known only later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch


class Event(Protocol):
    """A point in the work of a device, like `torch.cuda.Event`."""

    def record(self) -> None:
        """Place the event after everything that has been launched so far."""

    def query(self) -> bool:
        """Whether the device has reached the event; does not wait for it."""

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds to a later event; the device must have passed both."""


class HostEvent:
    """The `Event` of a device that computes while the host waits."""

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
    """Adds up the times between calls of `begin` and `end`; also a context manager.

    One that never ran shows 0. A beginning and its end must be launched on the same stream.
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
        """Start running."""
        assert self._began is None, "it runs"
        self._began = self._recorded()

    def end(self) -> None:
        """Stop running."""
        assert self._began is not None, "it does not run"
        self._spans.append((self._began, self._recorded()))
        self._began = None

    def seconds(self) -> float | None:
        """The seconds it shows; None until the device has reached all its ends."""
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
    """Hands out stopwatches, and reports what they show once that is known; one thread.

    Never waits for the device. A stopwatch that is dropped leaves nothing behind.
    """

    def __init__(self, new_event: Callable[[], Event]) -> None:
        """`new_event` makes events that measure time."""
        self._new_event = new_event
        self._unknown: deque[tuple[tuple[Stopwatch, ...], Callable[[list[float]], None]]] = deque()

    def stopwatch(self) -> Stopwatch:
        """A new stopwatch, which shows 0."""
        return Stopwatch(self._new_event)

    def when_known(
        self, stopwatches: Sequence[Stopwatch], note: Callable[[list[float]], None]
    ) -> None:
        """Call `note` with the seconds of ended stopwatches, of any clock of the same device.

        The call happens now, or in a later `when_known` or `poll`, in the order of these calls.
        """
        assert not any(stopwatch.running for stopwatch in stopwatches)
        self._unknown.append((tuple(stopwatches), note))
        self.poll()

    def poll(self) -> None:
        """Call every `note` whose seconds have become known."""
        while self._unknown:
            stopwatches, note = self._unknown[0]
            seconds = [own for each in stopwatches if (own := each.seconds()) is not None]
            if len(seconds) < len(stopwatches):
                return
            self._unknown.popleft()
            note(seconds)


def clock_for(device: torch.device) -> Clock:
    """A clock for what a device computes."""
    if device.type == "cpu":
        return Clock(HostEvent)
    module = torch.get_device_module(device)
    return Clock(lambda: module.Event(enable_timing=True))
