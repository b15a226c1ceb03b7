"""What a request is expected to read of a stored prefix from SSD, and how long that takes."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from impress_sglang.codes.planes.codec import NUM_PLANES
from impress_sglang.codes.planes.floors import CodingMeter
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape
from impress_sglang.storage.reader import BlockReader
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.open_segments import OpenSegments
from impress_sglang.store.stored import StoredSegment, StoredSpan
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.coded_span import cached_pages
from impress_sglang.transfer.columns import chunks_of_columns

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class CodedBytes:
    """Bytes of a prefix in codes that would have to come from SSD: of its base and each plane."""

    base: float
    planes: tuple[float, ...]

    def expected(self, planes: int) -> float:
        """Bytes that a request for so many planes is expected to read."""
        return self.base + sum(self.planes[:planes])


class ReadForecast:
    """Estimates reads before any are made; owned by one thread."""

    def __init__(
        self,
        shape: KVShape,
        reader: BlockReader,
        segments: OpenSegments,
        memory: StoreMemory,
        meter: CodingMeter,
    ) -> None:
        """`meter` knows how many planes belong to a base."""
        self._shape = shape
        self._reader = reader
        self._segments = segments
        self._memory = memory
        self._meter = meter
        self._said_too_small = False

    def seconds_to_read(self, num_bytes: float) -> float:
        """Seconds that reading so many bytes from SSD takes, judging by recent reads."""
        return self._reader.cost.seconds_for(num_bytes)

    def can_read(self, spans: Sequence[StoredSpan], *, in_codes: bool) -> bool:
        """Whether a layer of these spans fits into the buffer pool; the first that does not is
        logged."""
        pool, needed = self._memory.pool, 0
        # Spans of a segment share one buffer.
        for segment in {span.segment for span in spans}:
            layout = self._segments.of(segment).layout
            most = max(own.layer_bytes for own in layout.codes) if in_codes else 0
            needed += pool.size_of(most or layout.columns_bytes)
        if needed <= pool.limit_bytes:
            return True
        if not self._said_too_small:
            self._said_too_small = True
            logger.warning(
                "a stored prefix is computed, for a layer of it takes %.2f GB: "
                "raise --impress-buffer-gb",
                needed / 1e9,
            )
        return False

    def coded_bytes(self, spans: Sequence[StoredSpan]) -> CodedBytes:
        """Bytes of spans in codes that would have to come from SSD."""
        base_bytes, plane_bytes = 0.0, np.zeros(NUM_PLANES)
        # The share of planes that belongs to bases, because of the floors of heads.
        certain = self._meter.mean_planes / NUM_PLANES
        # There may be many spans of one segment.
        lengths = Counter[StoredSegment]()
        for span in spans:
            lengths[span.segment] += len(span)
        for segment, length in lengths.items():
            own = self._segments.of(segment)
            layout = own.layout.codes[0]
            tiers = self._segments.tiers(own, codes=True)
            on_ssd = np.where(tiers == Tier.SSD, cached_pages(own.layout.codes), 0)
            on_ssd = on_ssd.reshape(self._shape.num_layers, -1).sum(0)
            units = on_ssd[layout.num_pages :].reshape(NUM_PLANES, layout.total_units // NUM_PLANES)
            units = units.sum(1)
            share = length / own.layout.num_tokens * BLOCK_BYTES
            base_bytes += share * float(on_ssd[: layout.num_pages].sum() + certain * units.sum())
            plane_bytes += share * (1.0 - certain) * units
        return CodedBytes(base_bytes, tuple(plane_bytes.tolist()))

    def exact_bytes(self, spans: Sequence[StoredSpan]) -> float:
        """Bytes of whole spans of exact KVs that would have to come from SSD."""
        found = 0.0
        for span in spans:
            own = self._segments.of(span.segment)
            layout = own.layout
            blocks = float(self._shape.num_layers * layout.columns_bytes // BLOCK_BYTES)
            if self._memory.cache.placement.enabled:
                sizes = chunks_of_columns(layout).count
                tiers = self._segments.tiers(own, codes=False).reshape(-1, len(sizes))
                blocks = float((tiers == Tier.SSD).sum(0) @ sizes)
            found += len(span) / layout.num_tokens * blocks * BLOCK_BYTES
        return found
