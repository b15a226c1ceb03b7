"""What a request is expected to read of a stored prefix from SSD, and how long that takes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.reader import BlockReader
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.open_segments import OpenSegments
from impress_sglang.store.stored import StoredSegment, StoredSpan
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.wanted import chunk_pages

logger = logging.getLogger(__name__)

# Over so many bytes SSD and bucket are compared.
_SOME_BYTES = 1e7


class ReadForecast:
    """Estimates reads before any are made; owned by one thread."""

    def __init__(self, reader: BlockReader, segments: OpenSegments, memory: StoreMemory) -> None:
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
        pool = self._memory.pool
        # Spans of a segment share one buffer.
        needed = sum(
            pool.size_of(segment.info.geometry.most_bytes(codes=in_codes))
            for segment in {span.segment for span in spans}
        )
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

    def bytes_to_read(self, spans: Sequence[StoredSpan], *, codes: bool) -> float:
        """Bytes of whole spans that would have to come from SSD; of those in a bucket, so many as
        SSD gives in the time that they take."""
        found, far = 0.0, self._segments.far_reader
        cached = self._memory.cache.placement.enabled
        # There may be many spans of one segment.
        lengths = Counter[StoredSegment]()
        for span in spans:
            lengths[span.segment] += len(span)
        for segment, length in lengths.items():
            # Looked up once: there are many layers, and a queue of requests is planned.
            info, geometry = segment.info, segment.info.geometry
            if cached:
                on_ssd = self._segments.tiers(info, codes=codes) == Tier.SSD
                pages = chunk_pages(geometry, codes=codes)[on_ssd]
                num_bytes = int(pages.sum(dtype=np.int64)) * BLOCK_BYTES
            else:
                num_bytes = geometry.num_bytes(slice(None), codes=codes)
            slower = 1.0
            if far is not None and self._segments.is_far(segment):
                slower = far.cost.seconds_for(_SOME_BYTES) / self.seconds_to_read(_SOME_BYTES)
            found += slower * length / info.num_tokens * num_bytes
        return found
