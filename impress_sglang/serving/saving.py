"""Saving KVs from slots of the pool, which may be wanted back at any time.

A prompt is offered when the pass begins that completes it (AttentionStore, 3.2.2). The writing
thread waits at a gate for each layer, so that its copies and writes run behind the layers after it,
and goes on behind decoding. Nothing is buffered: what cannot be written yet stays in its slots,
which are held for it.

A slot that is given away before it was read would make a file with wrong KVs and right checksums.
So a save is abandoned before its slots can be given away, and what is written is only published if
it was not abandoned until its last layer was read.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from impress_sglang.precision.floors import MEASURED_QUERIES, LayerQueries
from impress_sglang.serving.pool_reader import PoolLayerReader
from impress_sglang.storage.writer import WriteAbandoned


class Save:
    """The write of what is in some slots, or is being computed into them.

    `slots` int64 [tokens]. The scheduler's thread opens the gate and abandons; the writing thread
    waits.
    """

    def __init__(self, slots: Tensor, layers: int = 0) -> None:
        """`layers` of them are computed already."""
        self.slots = slots
        self.finished = False
        """Whether the slots are not needed any more."""
        self.node: Any = None
        """The locked node of SGLang's tree that owns slots, after the prompt is computed."""
        self.held = slots[:0]
        """Those of the slots that belong to the save alone."""
        self._layers = layers
        self._abandoned = False
        self._events: list[Any] = []
        self._queries: dict[int, LayerQueries] = {}
        self._changed = threading.Condition()

    def note_queries(self, layer: int, queries: Tensor, scaling: float) -> None:
        """Keep the last of the queries [n, Hq, D] of a layer, before `open` says it is computed."""
        rows = queries[-MEASURED_QUERIES:].clone()
        with self._changed:
            if not self._abandoned:
                self._queries[layer] = LayerQueries(rows, scaling)

    def queries(self, layer: int) -> LayerQueries | None:
        """What was noted of a layer that `wait` has waited for, once, on the CPU."""
        with self._changed:
            noted = self._queries.pop(layer, None)
        return None if noted is None else LayerQueries(noted.rows.cpu(), noted.scaling)

    def open(self, layers: int) -> None:
        """The first `layers` layers are computed."""
        with self._changed:
            if self.slots.is_cuda:
                self._events.append(torch.cuda.current_stream().record_event())
            self._layers = layers
            self._changed.notify_all()

    def abandon(self) -> None:
        """The slots will be given away: what was not read by now is not what it was."""
        with self._changed:
            self._abandoned = True
            self._queries.clear()
            self._changed.notify_all()

    def wait(self, layer: int) -> Any:
        """Wait until a layer is computed; returns the event of that on an accelerator.

        Raises:
            WriteAbandoned: it never will be, or its slots are given away.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._layers > layer)
            self.check()
            return self._events[layer] if layer < len(self._events) else None

    def check(self) -> None:
        """See that the slots still are what they were.

        Raises:
            WriteAbandoned: they may not be.
        """
        if self._abandoned:
            raise WriteAbandoned("its slots are given away")


class GatedLayerReader:
    """Gives the KVs of a save layer by layer as they are computed, on the writing thread."""

    def __init__(self, save: Save, reader: PoolLayerReader) -> None:
        self._save = save
        self._reader = reader

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [t, G, D] of a layer, on the CPU."""
        event = self._save.wait(layer)
        if event is not None:
            self._reader.wait_for(event)
        kvs = self._reader(layer)
        # They were read before this, so they are right if nothing has changed until now.
        self._save.check()
        return kvs
