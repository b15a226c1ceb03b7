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
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

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
        self._computing: torch.cuda.Stream | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched in the block waits for earlier copies, and for nothing else."""
        if self._stream is None or self._computing is not None:
            yield
            return
        self._computing = torch.cuda.current_stream(self._stream.device)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._computing = None

    @contextmanager
    def after_computing(self) -> Iterator[None]:
        """What is launched in the block comes after all that was launched before it."""
        with self.beside():
            if self._stream is not None and self._computing is not None:
                self._stream.wait_stream(self._computing)
            yield

    def join(self) -> None:
        """What is launched on the current stream from now on comes after all copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def lend(self, tensor: torch.Tensor) -> None:
        """A tensor that was made beside is used on the current stream until it is let go."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._stream.device))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device, by a copy that nothing waits for."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
