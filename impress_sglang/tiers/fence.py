"""What a device does beside the host and beside computing: when it is done, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Fence:
    """What the device was asked to do until now, on the current stream; it may still be reading.

    Host memory that a kernel or a copy reads must not change before that is done. On a CPU nothing
    is ever left to do.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()

    @property
    def done(self) -> bool:
        """Whether the device has done it."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until it has."""
        if self._event is not None:
            self._event.synchronize()


class CopyStream:
    """A stream on which KVs are copied while the model computes on the current one.

    On a CPU there is none, and all is done in the order in which it is asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last_read: torch.cuda.Event | None = None

    @contextmanager
    def after_reading(self) -> Iterator[None]:
        """What is launched in the block comes after earlier copies, and all reads of cached chunks.

        Nothing else is waited for.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            # Whoever calls: reads are on the stream of the model, which may not be the current one.
            if self._last_read is not None:
                self._stream.wait_event(self._last_read)
            yield

    def note_reading(self) -> None:
        """What was launched on the current stream by now reads cached chunks."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            self._last_read = current.record_event()

    def join(self) -> None:
        """What is launched on the current stream from now on comes after all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device, by a copy that nothing waits for."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
