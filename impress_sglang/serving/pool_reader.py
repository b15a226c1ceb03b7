"""Reads KVs out of SGLang's device pool for writing them to SSD."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from impress_sglang.storage.writer import WriteAbandoned


class PoolAccess:
    """Lets the writing thread read the pool until access is revoked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.term = 0
        """The term of the readers that may read."""

    def revoke(self) -> None:
        """Bar all existing readers from reading; waits for a layer that is being read."""
        with self._lock:
            self.term += 1

    @contextmanager
    def reading(self, term: int) -> Iterator[None]:
        """Hold access while a reader of a term reads a layer.

        Raises:
            WriteAbandoned: access was revoked.
        """
        with self._lock:
            if term != self.term:
                raise WriteAbandoned("the pool or the weights behind it may have changed")
            yield


class PoolLayerReader:
    """Reads the KVs of some slots layer by layer, on the writing thread.

    The slots must not be given away before the last layer is read or access is revoked. On an
    accelerator the copies run on a stream of their own, after all forward passes that had been
    launched when the reader was made, and after what makes `slots` on the current stream.
    """

    def __init__(
        self,
        read: Callable[[int, Tensor], tuple[Tensor, Tensor]],
        slots: Tensor,
        forward_stream: Any,
        access: PoolAccess,
    ) -> None:
        """`read` gathers keys and values of a layer from slots."""
        self._access, self._term = access, access.term
        self._read_layer = read
        self._slots = slots
        self._stream = None
        self._after: list[Any] = []
        if slots.is_cuda:
            current = torch.cuda.current_stream(slots.device)
            self._stream = reading_stream(slots.device, forward_stream, current)
            # Other readers share the stream, so it waits only when this reader begins.
            self._after = [forward_stream.record_event(), current.record_event()]

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [t, G, D] of a layer, on the CPU.

        Raises:
            WriteAbandoned: access to the pool was revoked.
        """
        with self._access.reading(self._term):
            return self._read(layer)

    def _read(self, layer: int) -> tuple[Tensor, Tensor]:
        # A device of None keeps the current device, and a stream of None the current stream.
        with torch.cuda.device_of(self._slots), torch.cuda.stream(self._stream):
            while self._stream is not None and self._after:
                self._stream.wait_event(self._after.pop())
            keys, values = self._read_layer(layer, self._slots)
            return keys.cpu(), values.cpu()


@functools.lru_cache(maxsize=8)
def reading_stream(device: torch.device, *others: Any) -> Any:
    """The stream of a device on which pools are read, different from the given streams.

    Streams come from a small pool of the process, so a new one may be one that is in use.
    """
    taken = {other.cuda_stream for other in others}
    streams = (torch.cuda.Stream(device) for _ in range(len(taken) + 64))
    return next(stream for stream in streams if stream.cuda_stream not in taken)
