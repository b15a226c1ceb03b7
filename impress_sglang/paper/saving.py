"""Saving KVs from slots of the pool, which may be wanted back at any time.

A prompt is offered when the pass begins that completes it (AttentionStore, 3.2.2). The writing
thread waits at a gate for each layer, so that its copies and writes overlap with later layers, and
then with decoding. Nothing is buffered: what cannot be written yet stays in its slots, which are
held for it.

A slot that was given away before it was read would make a file with wrong KVs and right checksums.
So a save is abandoned before its slots can be given away, and what is written is published only if
the save had not been abandoned when its last layer had been read.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from impress_sglang.codes.groups.energy import MEASURED_QUERIES
from impress_sglang.serving.pool_reader import PoolLayerReader
from impress_sglang.storage.writer import WriteAbandoned


class Save:
    """The write of KVs that are in some slots, or are being computed into them.

    `slots` int64 [tokens]. The scheduler's thread calls `open` and `abandon`; the writing thread
    calls `wait`.
    """

    def __init__(self, slots: Tensor, layers: int = 0) -> None:
        """The first `layers` layers are computed already."""
        self.slots = slots
        self.finished = False
        """Whether the save no longer needs the slots."""
        self.node: Any = None
        """The locked node of SGLang's tree that owns slots, after the prompt is computed."""
        self.held = slots[:0]
        """The slots that belong to the save alone."""
        self._layers = layers
        self._abandoned = False
        self._events: list[Any] = []
        self._queries: dict[int, Tensor] = {}
        self._changed = threading.Condition()

    def note_queries(self, layer: int, queries: Tensor) -> None:
        """Keep the last queries of [n, Hq, D] of a layer; called before `open` for that layer."""
        rows = queries[-MEASURED_QUERIES:].clone()
        with self._changed:
            if not self._abandoned:
                self._queries[layer] = rows

    def queries(self, layer: int) -> Tensor | None:
        """Take the queries noted of a layer, on the CPU; call after `wait`; None the next time."""
        with self._changed:
            noted = self._queries.pop(layer, None)
        return None if noted is None else noted.cpu()

    def open(self, layers: int) -> None:
        """Note that the first `layers` layers are computed."""
        with self._changed:
            if self.slots.is_cuda:
                self._events.append(torch.cuda.current_stream().record_event())
            self._layers = layers
            self._changed.notify_all()

    def abandon(self) -> None:
        """Give up the save, because its slots will be given away and then hold other KVs."""
        with self._changed:
            self._abandoned = True
            self._queries.clear()
            self._changed.notify_all()

    def wait(self, layer: int) -> Any:
        """Wait until a layer is computed; returns the accelerator's event of that, if any.

        Raises:
            WriteAbandoned: it will never be computed, or its slots are given away.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._layers > layer)
            self.check()
            return self._events[layer] if layer < len(self._events) else None

    def check(self) -> None:
        """Make sure that the slots still hold the same KVs.

        Raises:
            WriteAbandoned: they may not.
        """
        if self._abandoned:
            raise WriteAbandoned("its slots are given away")


class GatedLayerReader:
    """Reads the KVs of a save layer by layer as they are computed, on the writing thread."""

    def __init__(self, save: Save, reader: PoolLayerReader) -> None:
        self._save = save
        self._reader = reader

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [t, G, D] of a layer, on the CPU."""
        event = self._save.wait(layer)
        if event is not None:
            self._reader.wait_for(event)
        kvs = self._reader(layer)
        # If the save has not been abandoned by now, what was read before is right.
        self._save.check()
        return kvs
