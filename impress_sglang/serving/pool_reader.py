"""Reads KVs out of SGLang's device pool for writing them to SSD."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from impress_sglang.storage.writer import WriteAbandoned


class PoolLayerReader:
    """Reads the KVs of some slots layer by layer, on the writing thread.

    On an accelerator the copies run on a stream of their own, after all forward passes launched
    before the reader was made, and after the work on the current stream that makes `slots`.
    """

    def __init__(
        self,
        read: Callable[[int, Tensor], tuple[Tensor, Tensor]],
        slots: Tensor,
        forward_stream: Any,
        abandoned: threading.Event,
        reading: threading.Lock,
    ) -> None:
        """`read` gathers keys and values of a layer from slots.

        `abandoned` is set before the slots are freed. `reading` is locked while the pool is read:
        a thread that locks it afterwards knows that no read of the pool is in progress.
        """
        self._abandoned, self._reading = abandoned, reading
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
        """Read keys and values [t, G, D] of a layer, on the CPU.

        Raises:
            WriteAbandoned: the slots may hold other KVs.
        """
        with self._reading:
            kvs = None if self._abandoned.is_set() else self._read(layer)
        # If it has not been abandoned by now, the KVs that were read are right.
        if kvs is None or self._abandoned.is_set():
            raise WriteAbandoned("its slots are given away")
        return kvs

    def _read(self, layer: int) -> tuple[Tensor, Tensor]:
        # A device of None keeps the current device, and a stream of None the current stream.
        with torch.cuda.device_of(self._slots), torch.cuda.stream(self._stream):
            while self._stream is not None and self._after:
                self._stream.wait_event(self._after.pop())
            keys, values = self._read_layer(layer, self._slots)
            return keys.cpu(), values.cpu()


@functools.lru_cache(maxsize=8)
def reading_stream(device: torch.device, *others: Any) -> Any:
    """Return the stream of a device on which pools are read, different from the given streams.

    Streams come from a small pool of the process, so a new one may be one that is in use.
    """
    taken = {other.cuda_stream for other in others}
    streams = (torch.cuda.Stream(device) for _ in range(len(taken) + 64))
    return next(stream for stream in streams if stream.cuda_stream not in taken)
