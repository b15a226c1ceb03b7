"""When a device is done with host memory that it reads by itself."""

from __future__ import annotations

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
