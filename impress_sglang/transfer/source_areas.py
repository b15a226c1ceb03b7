"""What all sources of stored prefixes share: their place in the layers, and areas to read into.

Stage: load. An area may be taken away for the layer of another source; who wants it again reads it
again. So nothing that is taken from an area may be used when another source has read.
"""

from __future__ import annotations

import abc
import functools
import itertools
import time
from collections.abc import Callable, Sequence

from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.pending_read import PendingRead
from impress_sglang.storage.reader import ChunkReader
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.area import LayerArea, Tenant
from impress_sglang.transfer.planner import ReadStats

# The track of reads on a timeline.
SSD_TRACK = "SSD"


class StoredSource(abc.ABC):
    """Spans of segments whose layers are asked for in ascending order; areas are by span."""

    def __init__(
        self,
        segments: Sequence[OpenSegment],
        layer_bytes: int,
        reader: ChunkReader,
        stats: ReadStats,
        timeline: Timeline,
    ) -> None:
        """`layer_bytes` of the pool are what the areas of a layer take."""
        self.segment_ids = [segment.segment_id for segment in segments]
        self._shape = segments[0].layout.shape
        self.num_layers = self._shape.num_layers
        self.layer_bytes = layer_bytes
        self.stats = stats
        self.timeline = timeline
        self.layer = -1
        """The layer that was asked for last."""
        self.next_ahead = 0
        """The first layer of which nothing was read ahead."""
        self._reader = reader
        self._areas: dict[int, dict[int, LayerArea]] = {}
        # With their layers; counted when areas are given back.
        self._evicted: list[tuple[int, LayerArea]] = []
        self._ending: list[PendingRead] = []

    @abc.abstractmethod
    def read_ahead(self, waste: float) -> None:
        """Begin to read what the layer `next_ahead` will probably want.

        `waste` bounds what is expected to be read in vain, as a share of what is wanted.
        """

    @property
    def is_reading(self) -> bool:
        """Whether reads that were asked for have not ended."""
        areas = (area for own in self._areas.values() for area in own.values())
        reads = itertools.chain(self._ending, *(area.reads for area in areas))
        return any(not read.done for read in reads)

    def end_layer(self, layer: int) -> None:
        """Nobody wants anything more of the layers up to this one."""
        self._begin(layer)
        self._give_back(layer + 1)

    def close(self) -> None:
        """Begin no more reads; nothing reads from the segments when `is_reading` is over."""
        self._give_back()

    def _begin(self, layer: int) -> None:
        """Another layer is asked for: what earlier ones were read into is not needed any more."""
        if layer == self.layer:
            return
        assert layer > self.layer, "layers are read in ascending order"
        self.layer = layer
        self.next_ahead = max(self.next_ahead, layer + 1)
        self._give_back(layer)

    def _open_area(self, layer: int, number: int, make: Callable[[Tenant], LayerArea]) -> LayerArea:
        """An area, which is made if it is not open; those of a layer are open together."""
        areas = self._areas.setdefault(layer, {})
        if number not in areas:
            evict = functools.partial(self._evict, layer, number)
            areas[number] = make(Tenant((self, layer), evict))
        return areas[number]

    def _evict(self, layer: int, number: int) -> None:
        area = self._areas[layer].pop(number)
        self._close_area(area)
        self._evicted.append((layer, area))

    def _give_back(self, below: int | None = None) -> None:
        """Give back the areas of the layers below one, or all; counts what was read ahead."""
        closed, self._evicted = self._evicted, []
        for layer in [own for own in self._areas if below is None or own < below]:
            for area in self._areas.pop(layer).values():
                self._close_area(area)
                closed.append((layer, area))
        for layer, area in closed:
            self.stats.ssd_bytes += area.ahead_bytes
            self.stats.ahead_bytes += area.ahead_bytes
            self.stats.ahead_used_bytes += area.ahead_used_bytes
            if self.timeline.enabled:
                _note_reads(area, layer, self.timeline)

    def _close_area(self, area: LayerArea) -> None:
        area.close(self._reader)
        self._ending = [read for read in (*self._ending, *area.reads) if not read.done]


def _note_reads(area: LayerArea, layer: int, timeline: Timeline) -> None:
    for read in area.reads:
        if read.began:
            name = "ahead" if read.ahead else "demand"
            timeline.add(SSD_TRACK, name, read.began, read.ended or time.perf_counter(), layer)
