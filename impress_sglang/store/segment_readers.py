"""Opens segments for reading: their files while these are open, and their chunks in the caches.

A file gets a range of chunk ids when it is first read. It keeps them until its segment was removed
from the tree or got another file, *and* its last reader is done: a request continues with the file
with which it began, whatever is published meanwhile.

Files are opened on a separate thread, and no caller waits for more than `patience` seconds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable, StoreUnavailable
from impress_sglang.loops.types import Floats
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, KVShape
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import OpenSegment, SegmentInfo
from impress_sglang.store.bucket import MAX_READS, RANGE_BYTES
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.lookahead import AwaitedRange, LookAhead, turns_of
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.stored import StoredSegment, StoredSpan
from impress_sglang.threads import BackgroundThread, locked
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.basis_codec import is_misfit
from impress_sglang.transfer.sources import OpenSpan, StoredSource, WholeSource
from impress_sglang.transfer.wanted import pages_per_chunk

logger = logging.getLogger(__name__)
# Number of bytes for which the speeds of SSD and bucket are compared.
_COMPARED_BYTES = 1e7


class SegmentReaders:
    """Open files, chunk ids of the files that were read so far, and estimates of the time of reads.

    Thread: one opens sources and reads them; the other methods may be called on any.
    """

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        memory: StoreMemory,
        disk: StoreDisk,
        reader: BlockReader,
        lookahead: LookAhead,
    ) -> None:
        self._lock = threading.RLock()
        self._shape, self._memory, self._cache = shape, memory, memory.cache
        self._disk, self._reader, self._lookahead = disk, reader, lookahead
        # Columns of exact KVs whose rows are all read.
        self._certain_columns = np.array(
            [PROBE] if shape.probe_kv_heads else range(len(shape.heads))
        )
        self._patience = config.io_timeout
        self._opener = self._bucket_opener = BackgroundThread("impress-open")
        # Reads objects of the bucket.
        self._bucket_reader: BlockReader | None = None
        if disk.bucket is not None:
            # Local files do not wait for the network.
            self._bucket_opener = BackgroundThread("impress-open-s3")
            files = disk.bucket.files
            self._bucket_reader = BlockReader(
                MAX_READS, files, patience=config.io_timeout, piece_bytes=RANGE_BYTES
            )
        self._open: dict[str, OpenSegment] = {}
        # First chunk id and description of a file, by segment and by whether its codes are meant.
        self._ids: dict[str, dict[bool, tuple[int, SegmentInfo]]] = {}
        self._closing: list[StoredSource] = []
        self._logged_too_small = False

    def is_open(self, segment_id: str) -> bool:
        return segment_id in self._open

    def _first_id(self, info: SegmentInfo, *, codes: bool) -> int:
        """Return the first id of the chunks of a kind of a file, which are about to be read."""
        kinds = self._ids.setdefault(info.segment_id, {})
        if codes not in kinds:
            first_id = self._cache.placement.attach(pages_per_chunk(info.geometry, codes=codes))
            kinds[codes] = first_id, info
            if ranges := self._lookahead.ranges(info.segment_id):
                self._expect(first_id, info, ranges, codes=codes)
        return kinds[codes][0]

    def tiers(self, info: SegmentInfo, *, codes: bool) -> npt.NDArray[np.uint8]:
        """Return the `Tier` value of each chunk of a kind; SSD for chunks without an id."""
        chunk_ids = self._ids.get(info.segment_id, {}).get(codes)
        count = len(pages_per_chunk(info.geometry, codes=codes))
        if chunk_ids is None:
            return np.full(count, Tier.SSD, np.uint8)
        return self._cache.placement.tiers(chunk_ids[0], count)

    @locked
    def update_expected(self) -> None:
        """Set in the caches which chunks requests wait for: these are evicted last.

        They are the chunks of awaited tokens that are certain to be read: codes, and of exact KVs
        the probe heads' columns, which choose the tokens, or all columns.
        """
        for segment_id in self._lookahead.take_changed():
            for codes, chunks in self._ids.get(segment_id, {}).items():
                self._expect(*chunks, self._lookahead.ranges(segment_id), codes=codes)

    def _expect(
        self, first_id: int, info: SegmentInfo, ranges: Sequence[AwaitedRange], *, codes: bool
    ) -> None:
        layout, first_raw = info.geometry, self._shape.first_raw
        # First chunk of each layer.
        starts = first_id + np.array(layout.first_chunks[codes][:-1])
        if codes:
            pages = layout.codes[0]
            turns = turns_of(pages.num_pages, pages.page_tokens, ranges)
            self._cache.placement.expect(starts[:first_raw], turns)
        else:
            # Only the file has the mapping of reordered tokens to chunks.
            anywhere = info.reordered and ranges
            parts = [(0, layout.num_tokens, ranges[-1][2])] if anywhere else ranges
            columns = starts[:first_raw, None] + layout.num_chunks * self._certain_columns
            turns = turns_of(layout.num_chunks, layout.chunk_tokens, parts)
            self._cache.placement.expect(columns.reshape(-1), turns)
        if self._shape.raw_layers:
            pages = layout.rows
            turns = turns_of(pages.num_pages, pages.page_tokens, ranges)
            self._cache.placement.expect(starts[first_raw:], turns)

    @locked
    def cached_bytes(self, segment_id: str) -> npt.NDArray[np.int64]:
        """Return the bytes of a segment in the caches, by `Tier`."""
        num_bytes = np.zeros(len(Tier), np.int64)
        for codes, (_, info) in self._ids.get(segment_id, {}).items():
            pages = pages_per_chunk(info.geometry, codes=codes)
            counts = np.bincount(self.tiers(info, codes=codes), pages, len(Tier))
            num_bytes += counts.astype(np.int64) * BLOCK_BYTES
        num_bytes[Tier.SSD] = 0
        return num_bytes

    def seconds_to_read(self, num_bytes: float) -> float:
        """Estimate the seconds that reading this many bytes from SSD takes, by recent reads."""
        return self._reader.cost.seconds_for(num_bytes)

    def bytes_to_read(self, spans: Sequence[StoredSpan], *, codes: bool) -> float:
        """Return the bytes of whole spans that would be read from SSD; bytes in a bucket count as
        those that SSD reads in the same time."""
        total = 0.0
        # There may be many spans of one segment.
        lengths = Counter[StoredSegment]()
        for span in spans:
            lengths[span.segment] += len(span)
        for segment, length in lengths.items():
            info = segment.info
            on_ssd = self.tiers(info, codes=codes) == Tier.SSD
            pages = pages_per_chunk(info.geometry, codes=codes)[on_ssd]
            num_bytes = int(pages.sum(dtype=np.int64)) * BLOCK_BYTES
            slowdown = 1.0
            if self._bucket_reader is not None and self._disk.only_in_bucket(segment):
                slowdown = self._bucket_reader.cost.seconds_for(_COMPARED_BYTES)
                slowdown /= self.seconds_to_read(_COMPARED_BYTES)
            total += slowdown * length / info.num_tokens * num_bytes
        return total

    def least_cached(self, spans: Sequence[StoredSpan], *, codes: bool) -> StoredSpan:
        """Return the span of which most bytes would be read, to measure reads."""
        return max(spans, key=lambda span: self.bytes_to_read([span], codes=codes))

    def can_read(self, spans: Sequence[StoredSpan], *, in_codes: bool) -> bool:
        """Whether a layer of these spans fits into the buffer pool; the first failure is logged."""
        pool = self._memory.buffers
        segments = {span.segment for span in spans}
        needed = pool.size_of(
            sum(segment.info.geometry.max_bytes(codes=in_codes) for segment in segments)
        )
        if needed > pool.limit_bytes and not self._logged_too_small:
            self._logged_too_small = True
            logger.warning(
                "a stored prefix is computed, for a layer of it takes %.2f GB: "
                "raise --impress-buffer-gb",
                needed / 1e9,
            )
        return needed <= pool.limit_bytes

    def acquire(self, stored: StoredSegment) -> OpenSegment:
        """Open a segment for one more reader.

        Raises:
            SegmentUnreadable: the file is missing, damaged, or differs from the index.
            StoreUnavailable: it cannot be opened now, or not in time.
        """
        if not stored.ready:
            raise SegmentUnreadable(stored.segment_id, "was removed after it was matched")
        if not self._disk.health.readable:
            raise StoreUnavailable(stored.segment_id, "the store is degraded")
        with self._lock:
            segment = self._open.get(stored.segment_id)
            if segment is not None:
                segment.readers += 1
                return segment
        opened = self._open_file(stored)
        with self._lock:
            segment = self._open.setdefault(stored.segment_id, opened)
            if segment is not opened:
                # Another thread was faster.
                opened.close()
            segment.readers += 1
            return segment

    def _open_file(self, stored: StoredSegment) -> OpenSegment:
        in_bucket = self._disk.only_in_bucket(stored)
        opener = self._bucket_opener if in_bucket else self._opener
        opening = opener.submit(self._disk.open, stored)
        try:
            error = opening.exception(self._patience)
        except TimeoutError:
            opening.add_done_callback(_close_late)
            raise StoreUnavailable(stored.segment_id, "takes too long to open") from None
        if isinstance(error, PrefixUnreadable):
            raise error
        if error is not None:
            raise StoreUnavailable(stored.segment_id, f"cannot be opened: {error}") from error
        segment = opening.result()
        # The index has no checksums, but the header has.
        if not segment.info.describes_same(stored.info):
            segment.close()
            raise SegmentUnreadable(stored.segment_id, "index and segment file do not agree")
        # It may have become a local file since it was asked for.
        is_local = segment.files is self._disk.files
        segment.reader = self._reader if is_local else self._bucket_reader
        return segment

    @locked
    def release(self, segment_id: str) -> None:
        """End one reader; the last one closes the file."""
        opened = self._open[segment_id]
        opened.readers -= 1
        if not opened.readers:
            self._open.pop(segment_id).close()
            # Another thread may have evicted it while it was opened.
            self.retire(segment_id)

    @locked
    def retire(self, segment_id: str) -> None:
        """Drop the chunks of a file that was removed from the tree and has no reader."""
        if segment_id not in self._open and segment_id not in self._disk.tree:
            for codes, (first, info) in self._ids.pop(segment_id, {}).items():
                self._cache.placement.detach(
                    first, len(pages_per_chunk(info.geometry, codes=codes))
                )

    @locked
    def replace(self, old_id: str, segment: StoredSegment, shares: Floats) -> None:
        """Replace the file `old_id` of a segment by its reordered one, whose chunks inherit the
        statistics of the old chunks; requests wait for these instead.

        `shares`: expected shares of wanted rows, float64 [chunks].
        """
        self._lookahead.replace(old_id, segment.segment_id)
        if (old_ids := self._ids.get(old_id, {}).get(False)) is not None:
            ids = np.arange(segment.info.geometry.first_chunks[False][-1])
            first_id = self._first_id(segment.info, codes=False)
            self._cache.placement.inherit(first_id + ids, old_ids[0] + ids, shares)
        self.retire(old_id)

    def open(self, spans: Sequence[StoredSpan], *, exact: bool) -> WholeSource:
        """Open a source for whole layers of consecutive spans, which `StoredTree.touch` has counted
        as used; `PrefixStore.close_source` closes it.

        May be called on another thread, which then reads the source.

        If a segment is unlike the data to which its basis was fitted, its codes are too inexact:
        then exact KVs of all spans are read, also if not `exact`.

        Raises:
            PrefixUnreadable: a segment cannot be opened, or its rows are in another order, or a
                layer of exact KVs that replace codes fits no buffers; the caller should `report`
                it.
        """
        pool = self._memory.buffers
        with self.acquired(spans) as segments:
            # Codes without exact KVs were checked when they were written.
            unlike = self._shape.exact and any(is_misfit(segment.fits) for segment in segments)
            codes = not exact and not unlike
            for segment in segments:
                # Only `paper/` restores reordered rows.
                if not codes and segment.mapping is not None:
                    raise SegmentUnreadable(segment.segment_id, "was reordered")
            opened = self.open_spans(spans, segments, codes=codes)
            source = WholeSource(opened, pool, self._cache, codes=codes)
            if not codes and not exact and source.layer_bytes > pool.limit_bytes:
                # Raised before a read, and so not as a failure of the drive.
                raise PrefixUnreadable(
                    "-",
                    "it is unlike what its basis knows, and a layer of its exact KVs takes "
                    f"{source.layer_bytes / 1e9:.2f} GB: raise --impress-buffer-gb",
                )
            return source

    @contextlib.contextmanager
    def acquired(self, spans: Sequence[StoredSpan]) -> Iterator[list[OpenSegment]]:
        """Acquire the segments of spans; releases them if the body raises. Raises as `acquire`."""
        segments = list[OpenSegment]()
        try:
            for span in spans:
                segments.append(self.acquire(span.segment))
            yield segments
        except BaseException:
            for segment in segments:
                self.release(segment.segment_id)
            raise

    @locked
    def open_spans(
        self, spans: Sequence[StoredSpan], segments: Sequence[OpenSegment], *, codes: bool
    ) -> list[OpenSpan]:
        """Return the `OpenSpan`s of a source of consecutive spans, whose segments were acquired."""
        assert codes or self._shape.exact, "only codes are kept"
        self._cache.placement.advance()
        return [
            (segment, range(span.start, span.stop), self._first_id(segment.info, codes=codes))
            for span, segment in zip(spans, segments, strict=True)
        ]

    def close_source(self, source: StoredSource) -> None:
        """Stop the reads of a source, and release its segments when none is in flight."""
        source.close()
        with self._lock:
            self._closing.append(source)
        self.release_closed()

    @locked
    def release_closed(self) -> None:
        """Release the segments of closed sources whose last reads have ended."""
        for source in [closing for closing in self._closing if not closing.is_reading]:
            self._closing.remove(source)
            for segment_id in source.segment_ids:
                self.release(segment_id)

    def close(self, seconds: float) -> None:
        """Release the segments whose reads end within `seconds`, and end the threads."""
        deadline = time.monotonic() + seconds
        while self._closing and time.monotonic() < deadline:
            self.release_closed()
            time.sleep(1e-3)
        # The loader may come late, and would wait for a thread that has ended.
        self._patience = 0.0
        self._opener.close(seconds)
        if self._bucket_reader is not None:
            self._bucket_opener.close(seconds)
            self._bucket_reader.close()

    @locked
    def check(self, segment_id: str) -> None:
        if (opened := self._open.get(segment_id)) is not None:
            assert opened.readers > 0


def _close_late(opening: Future[OpenSegment]) -> None:
    if opening.exception() is None:
        opening.result().close()
