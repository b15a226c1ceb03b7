"""What a request is expected to read of a stored prefix from SSD, and how long that takes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from impress_sglang.storage.layout import BLOCK_BYTES, KVShape
from impress_sglang.storage.reader import BlockReader
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.open_segments import OpenSegments
from impress_sglang.store.stored import StoredSegment, StoredSpan
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.coded_span import cached_pages
from impress_sglang.transfer.columns import chunks_of_columns

logger = logging.getLogger(__name__)


class ReadForecast:
    """Estimates reads before any are made; owned by one thread."""

    def __init__(
        self,
        shape: KVShape,
        reader: BlockReader,
        segments: OpenSegments,
        memory: StoreMemory,
    ) -> None:
        self._shape = shape
        self._reader = reader
        self._segments = segments
        self._memory = memory
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

    def coded_bytes(self, spans: Sequence[StoredSpan]) -> float:
        """Bytes of spans in codes that would have to come from SSD."""
        found = 0.0
        # There may be many spans of one segment.
        lengths = Counter[StoredSegment]()
        for span in spans:
            lengths[span.segment] += len(span)
        for segment, length in lengths.items():
            version = self._segments.of(segment)
            tiers = self._segments.tiers(version, codes=True)
            on_ssd = np.where(tiers == Tier.SSD, cached_pages(version.layout.codes), 0)
            found += length / version.layout.num_tokens * float(on_ssd.sum()) * BLOCK_BYTES
        return found

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
