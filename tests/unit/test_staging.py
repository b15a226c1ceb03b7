"""Numbers that are left for a device last until it has read them.

Its streams wait for each other's events, and for none that has passed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impress_sglang.tiers.copying import CopyStream, Fence, Staging

CPU = torch.device("cpu")


class Reading(Fence):
    """A launch that reads numbers when somebody waits for it, no earlier."""

    def __init__(self, numbers: Tensor, expected: int) -> None:
        super().__init__(CPU)
        self._numbers, self._expected = numbers, expected
        self.read = False

    def wait(self) -> None:
        assert (self._numbers == self._expected).all()
        self.read = True


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(1, 20))
def test_numbers_stay_until_they_are_read(counts: list[int], size: int) -> None:
    staging, readings = Staging(CPU, 8 * size), []
    for number, count in enumerate(counts):
        staged, own = staging.take(count)
        assert staged.shape == own.shape == (count,)
        own[:] = number
        readings.append(Reading(staged, number))
        staging.protect(readings[-1])
    # Those that nobody had to wait for are still there.
    for reading in readings:
        if not reading.read:
            reading.wait()


CUDA = torch.device("cuda")


class FakeEvent:
    """After the work of a stream until now."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream, self.passed = stream, False

    def query(self) -> bool:
        return self.passed


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[FakeEvent] = []
        self.awaited: list[FakeEvent] = []

    def record_event(self) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]

    def wait_event(self, event: FakeEvent) -> None:
        self.awaited.append(event)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The current stream, the last one."""
    streams = [FakeStream(CUDA)]

    @contextlib.contextmanager
    def switched(stream: FakeStream) -> Any:
        streams.append(stream)
        try:
            yield
        finally:
            assert streams.pop() is stream

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", switched)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[-1])
    return streams


def test_copies_wait_for_reads_and_readers_for_copies(streams: list[FakeStream]) -> None:
    (computing,), stream = streams, CopyStream(CUDA)
    stream.join()
    assert not computing.awaited

    stream.note_reading(Fence(CUDA))
    with stream.after_reading():
        copying = streams[-1]
        assert copying is not computing
        assert copying.awaited == computing.events
    # What was copied last, even if the next reader is on another stream.
    for reader in (computing, FakeStream(CUDA)):
        streams[0] = reader
        stream.join()
        assert reader.awaited == copying.events

    with pytest.raises(ValueError, match="failed"), stream.after_reading():
        raise ValueError("failed")
    stream.join()
    assert streams[0].awaited[-1] is copying.events[-1] is not copying.events[0]


def test_nobody_waits_for_what_has_passed(streams: list[FakeStream]) -> None:
    (computing,), stream = streams, CopyStream(CUDA)
    stream.note_reading(Fence(CUDA))
    computing.events[0].passed = True
    with stream.after_reading():
        copying = streams[-1]
    assert not copying.awaited
    copying.events[0].passed = True
    stream.join()
    assert not computing.awaited
