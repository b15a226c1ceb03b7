"""What all sources of stored prefixes share: their current layer, and layer buffers.

Stage: load. A layer buffer may be taken away for a layer of another source; a source that wants it
again reads it again. So what was taken from a buffer may not be used after another source has read.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.reader import BlockReader, PendingRead
from impress_sglang.transfer.buffers import LayerBuffer, Tenant


@dataclasses.dataclass(slots=True)
class ReadStats:
    """What reading a prefix took: bytes, and accesses to chunks by the tier where they were found.

    `ssd_needed_bytes` are wanted rows that came from SSD; `ssd_bytes` divided by it is the read
    amplification. Of `ssd_bytes`, `ahead_bytes` were read before their layer asked, and of these
    `ahead_used_bytes` were wanted. `h2d_bytes` are rows that were not on the device, and whole
    chunks that moved there. `important_bytes` are the KVs of selected tokens, and
    `important_device_bytes` those of them that were found on the device. `selected_chunks` leaves
    out the chunks of probe columns, which every probe reads. `wait_ms` is how long the request
    waited for bytes from SSD, in milliseconds.
    """

    ssd_bytes: int = 0
    ssd_needed_bytes: int = 0
    ahead_bytes: int = 0
    ahead_used_bytes: int = 0
    h2d_bytes: int = 0
    device_chunks: int = 0
    host_chunks: int = 0
    ssd_chunks: int = 0
    selected_chunks: int = 0
    important_bytes: int = 0
    important_device_bytes: int = 0
    wait_ms: float = 0.0

    @property
    def chunks_accessed(self) -> int:
        """Accesses to chunks, wherever they were found."""
        return self.device_chunks + self.host_chunks + self.ssd_chunks

    @property
    def chunks_loaded(self) -> int:
        """Accesses to chunks that were not on the device."""
        return self.host_chunks + self.ssd_chunks

    def add(self, other: ReadStats) -> None:
        """Add the counters of another source."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, value)

    def as_dict(self) -> dict[str, float]:
        """All counters, and those that are derived from them."""
        return {
            **dataclasses.asdict(self),
            "wait_ms": round(self.wait_ms, 3),
            "chunks_accessed": self.chunks_accessed,
            "chunks_loaded": self.chunks_loaded,
        }


class StoredSource(abc.ABC):
    """Spans of segments whose layers are read in ascending order; buffers are kept by span."""

    def __init__(
        self,
        segments: Sequence[OpenSegment],
        layer_bytes: int,
        reader: BlockReader,
        stats: ReadStats,
    ) -> None:
        """`layer_bytes` is how much of the pool the buffers of a layer take."""
        self.segment_ids = [segment.segment_id for segment in segments]
        self._shape = segments[0].layout.shape
        self.num_layers = self._shape.num_layers
        self.layer_bytes = layer_bytes
        self.stats = stats
        self.layer = -1
        """The layer that was asked for last; -1 before the first."""
        self.next_ahead = 0
        """The next layer to be read ahead."""
        self.lead = 0
        """How many layers are read ahead while the request waits; one is in any case."""
        self.writing: Callable[[], AbstractContextManager[None]] = nullcontext
        """What it makes is entered while rows are put into slots; it may raise."""
        self._reader = reader
        self._buffers: dict[int, dict[int, LayerBuffer]] = {}
        # Counted when buffers are given back.
        self._evicted: list[LayerBuffer] = []
        self._ending: list[PendingRead] = []

    @abc.abstractmethod
    def read_ahead(self, waste_budget: float) -> None:
        """Begin to read what the layer `next_ahead` will probably want, and advance `next_ahead`.

        `waste_budget` bounds what is expected to be read in vain, as a share of what is wanted.
        """

    @property
    def wants_more(self) -> bool:
        """Whether more layers are to be read ahead while its request waits."""
        return self.next_ahead < min(max(self.lead, 1), self.num_layers)

    @property
    def is_reading(self) -> bool:
        """Whether any of its reads is still under way."""
        return any(not read.done for read in self._reads())

    def ended_in_time(self) -> bool:
        """Wait for its reads; False if the device has stopped."""
        return all(read.ended_in_time() for read in self._reads())

    def _reads(self) -> list[PendingRead]:
        buffers = (buffer for own in self._buffers.values() for buffer in own.values())
        return [*self._ending, *itertools.chain.from_iterable(own.reads for own in buffers)]

    def end_layer(self, layer: int) -> None:
        """Drop the layers up to this one, of which nothing is wanted any more."""
        self._begin(layer)
        self._give_back(layer + 1)

    def close(self) -> None:
        """Begin no more reads; once `is_reading` is False, nothing reads from the segments."""
        self._give_back()

    def _begin(self, layer: int) -> None:
        """Move on to a layer, and give back the buffers of earlier layers."""
        if layer == self.layer:
            return
        assert layer > self.layer, "layers are read in ascending order"
        self.layer = layer
        self.next_ahead = max(self.next_ahead, layer + 1)
        self._give_back(layer)

    def _open_buffer(
        self, layer: int, number: int, make: Callable[[Tenant], LayerBuffer]
    ) -> LayerBuffer:
        """The buffer of a layer and span, made if it is not open; a layer's are open together."""
        buffers = self._buffers.setdefault(layer, {})
        if number not in buffers:
            evict = functools.partial(self._evict, layer, number)
            buffers[number] = make(Tenant((self, layer), evict, self.layer_bytes))
        return buffers[number]

    def _evict(self, layer: int, number: int) -> None:
        buffer = self._buffers[layer].pop(number)
        self._close_buffer(buffer)
        self._evicted.append(buffer)

    def _give_back(self, below: int | None = None) -> None:
        """Give back the buffers of layers below `below`, or all; counts what was read ahead."""
        closed, self._evicted = self._evicted, []
        for layer in [own for own in self._buffers if below is None or own < below]:
            for buffer in self._buffers.pop(layer).values():
                self._close_buffer(buffer)
                closed.append(buffer)
        for buffer in closed:
            self.stats.ssd_bytes += buffer.ahead_bytes
            self.stats.ahead_bytes += buffer.ahead_bytes
            self.stats.ahead_used_bytes += buffer.ahead_used_bytes

    def _close_buffer(self, buffer: LayerBuffer) -> None:
        buffer.close(self._reader)
        self._ending = [read for read in (*self._ending, *buffer.reads) if not read.done]
