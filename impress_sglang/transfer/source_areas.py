"""What a source reads into: an area for each layer and number, given back layer by layer.

Stage: load. An area may be taken away for the layer of another source; who wants it again reads it
again. So nothing that is taken from an area may be used when another source has read.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable

from impress_sglang.storage.reader import ChunkReader, PendingRead
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.area import LayerArea, Tenant
from impress_sglang.transfer.planner import ReadStats

# The track of reads on a timeline.
SSD_TRACK = "SSD"


class SourceAreas:
    """Areas that are open, and reads into closed ones that have not ended."""

    def __init__(self, reader: ChunkReader) -> None:
        self._reader = reader
        self._areas: dict[int, dict[int, LayerArea]] = {}
        # With their layers; counted when the source gives back what it has.
        self._evicted: list[tuple[int, LayerArea]] = []
        self._ending: list[PendingRead] = []

    def find(self, layer: int, number: int) -> LayerArea | None:
        """An area that is open."""
        return self._areas.get(layer, {}).get(number)

    def take(self, layer: int, number: int, make: Callable[[Tenant], LayerArea]) -> LayerArea:
        """An area, which is made if it is not open; those of a layer are open together."""
        areas = self._areas.setdefault(layer, {})
        if number not in areas:
            evict = functools.partial(self._evict, layer, number)
            areas[number] = make(Tenant((self, layer), evict))
        return areas[number]

    def _evict(self, layer: int, number: int) -> None:
        area = self._areas[layer].pop(number)
        self._close(area)
        self._evicted.append((layer, area))

    @property
    def is_reading(self) -> bool:
        """Whether reads that were asked for have not ended."""
        areas = (area for own in self._areas.values() for area in own.values())
        reads = itertools.chain(self._ending, *(area.reads for area in areas))
        return any(not read.done for read in reads)

    def close(self, stats: ReadStats, timeline: Timeline, below: int | None = None) -> None:
        """Give back the areas of the layers below one, or all; counts what was read ahead."""
        closed, self._evicted = self._evicted, []
        for layer in [own for own in self._areas if below is None or own < below]:
            for area in self._areas.pop(layer).values():
                self._close(area)
                closed.append((layer, area))
        for layer, area in closed:
            stats.ssd_bytes += area.ahead_bytes
            stats.ahead_bytes += area.ahead_bytes
            stats.ahead_used_bytes += area.ahead_used_bytes
            if timeline.enabled:
                _note_reads(area, layer, timeline)

    def _close(self, area: LayerArea) -> None:
        area.close(self._reader)
        self._ending = [read for read in (*self._ending, *area.reads) if not read.done]


def _note_reads(area: LayerArea, layer: int, timeline: Timeline) -> None:
    for read in area.reads:
        if read.began:
            name = "ahead" if read.ahead else "demand"
            timeline.add(SSD_TRACK, name, read.began, read.ended or time.perf_counter(), layer)
