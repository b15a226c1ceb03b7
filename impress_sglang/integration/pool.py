"""Reads KVs out of SGLang's device pool for writing them to SSD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class PoolLayerReader:
    """Gives the KVs of some slots layer by layer, on the writing thread.

    The slots must not be given away before the last layer is read. On an accelerator the copies run
    on a stream of their own, after all forward passes that were launched when the reader was made.
    """

    def __init__(self, pool: Any, slots: Tensor, forward_stream: Any) -> None:
        self._pool = pool
        self._slots = slots
        self._stream = None
        if slots.is_cuda:
            self._stream = torch.cuda.Stream(slots.device)
            self._stream.wait_stream(forward_stream)

    def wait_for(self, event: Any) -> None:
        """Let the copies that follow wait for an event of an accelerator."""
        if self._stream is not None:
            self._stream.wait_event(event)

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [t, G, D] of a layer, on the CPU."""
        layer_id = layer + self._pool.start_layer
        # A stream of None leaves the current one, which is all there is on a CPU.
        with torch.cuda.stream(self._stream):
            keys = self._pool.get_key_buffer(layer_id)[self._slots]
            values = self._pool.get_value_buffer(layer_id)[self._slots]
            return keys.cpu(), values.cpu()
