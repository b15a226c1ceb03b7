"""Asynchronous work of a device: when it is done, and in which order streams run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Fence:
    """All work submitted to the device's current stream until now, which may still be running.

    Host memory that a kernel or a copy reads must not change before that is done. On a CPU all work
    is done already.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.current_stream(device).record_event()

    @property
    def done(self) -> bool:
        """Whether the device has done this work."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the device has done this work."""
        if self._event is not None:
            self._event.synchronize()

    def order(self, stream: torch.cuda.Stream) -> None:
        """Let what is launched on a stream from now on run after this work."""
        if self._event is not None and not self._event.query():
            stream.wait_event(self._event)


class CopyStream:
    """A stream on which KVs are copied while the model computes on the current one.

    On a CPU there is none, and work is done in the order in which it is submitted.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last_read: Fence | None = None
        self._last_copy: Fence | None = None

    @contextmanager
    def after_reading(self) -> Iterator[None]:
        """Launch the block's work after earlier copies and all noted reads of cached chunks.

        It waits for nothing else.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            # Reads are on the stream of the model, which may not be the caller's current one.
            if self._last_read is not None:
                self._last_read.order(self._stream)
            try:
                yield
            finally:
                self._last_copy = Fence(self._stream.device)

    def note_reading(self, fence: Fence) -> None:
        """Note that work launched before a fence of the current stream reads cached chunks."""
        self._last_read = fence

    def join(self) -> None:
        """Let work launched on the current stream from now on run after all copies."""
        if self._stream is not None and self._last_copy is not None:
            self._last_copy.order(torch.cuda.current_stream(self._stream.device))
