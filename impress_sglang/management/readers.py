"""Open segments: who reads which file, and the ids of their chunks in the caches.

A version of a segment (one file) gets a range of chunk ids when it is first read, and keeps it
until it has left the tree *and* its last reader is done: a request goes on with the version that it
began with, whatever is published meanwhile.

Files are opened on a thread of their own, and nobody waits for longer than `patience` seconds.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from impress_sglang.errors import ChunkUnreadable, PrefixUnreadable, StoreUnavailable
from impress_sglang.importance.history import TokenHistory
from impress_sglang.management.expected_bytes import CodedBytes, StoredBytes
from impress_sglang.management.reorder import expected_shares
from impress_sglang.management.tree import StoredSegment, StoredSpan
from impress_sglang.precision.codec import NUM_PLANES
from impress_sglang.precision.floors import FloorMeter
from impress_sglang.storage.directory import StoreDirectory
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape, SegmentLayout
from impress_sglang.storage.reader import ChunkReader, OpenSegment
from impress_sglang.threads import BackgroundThread
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Tier
from impress_sglang.tiers.rules import Floats
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.area import AreaPool
from impress_sglang.transfer.coded import CodedSource, CodedSpan, cached_pages, chunks_of
from impress_sglang.transfer.expectation import STEPS, BlockHistory, UnitHistory, first_shares
from impress_sglang.transfer.plan import SourceSpan, geometry_of
from impress_sglang.transfer.source import Demand, SegmentSource, streams_area_bytes

logger = logging.getLogger(__name__)

AnySource = SegmentSource | CodedSource


@dataclasses.dataclass(slots=True)
class _Version:
    """One file: its chunk ids, and its readers while it has any.

    `streams` and `codes`: the first id of their chunks, and what is known of these; None until
    somebody asks, because that takes time in proportion to the length.
    """

    layout: SegmentLayout
    reordered: bool
    streams: tuple[int, BlockHistory] | None = None
    codes: tuple[int, UnitHistory] | None = None
    segment: OpenSegment | None = None
    readers: int = 0
    retired: bool = False


class SegmentReaders:
    """Opens sources on segments; owned by one thread."""

    def __init__(
        self,
        directory: StoreDirectory,
        shape: KVShape,
        reader: ChunkReader,
        cache: ChunkCache,
        codes: ChunkCache,
        pool: AreaPool,
        meter: FloorMeter,
        *,
        direct: bool,
        reorder_by_importance: bool,
        retention: float,
        learns: bool,
        patience: float,
    ) -> None:
        """Begin with no reader.

        Args:
            directory: of the segments.
            shape: of the KVs.
            reader: reads blocks.
            cache: holds chunks.
            codes: holds those of codes.
            pool: holds what is read.
            meter: is told how many planes belong to a base.
            direct: files can be opened with O_DIRECT.
            reorder_by_importance: averages are of importance, not of selections.
            retention: what requests usually ask for.
            learns: blocks are read ahead.
            patience: seconds to wait for a file to open.
        """
        self._directory = directory
        self._opener = BackgroundThread("impress-open")
        self._patience = patience
        self._closing: list[AnySource] = []
        self._shape = shape
        self._reader = reader
        self._cache = cache
        self._codes = codes
        self._direct = direct
        self._by_importance = reorder_by_importance
        self._pool = pool
        self._meter = meter
        self._retention = retention
        self._learns = learns
        self._versions: dict[str, _Version] = {}
        self._said_too_small = False

    def open_source(
        self, spans: Sequence[StoredSpan], demand: Demand, timeline: Timeline
    ) -> SegmentSource:
        """A source for consecutive spans; `close_source` gives it back.

        Raises:
            PrefixUnreadable: a segment cannot be opened.
        """
        segments = self._acquire_all(spans)
        self._cache.placement.advance()
        opened = []
        for span, segment in zip(spans, segments, strict=True):
            base, blocks = self._streams_of(self._versions[segment.segment_id])
            history = self._history(span.segment)
            opened.append(SourceSpan(segment, span.start, span.stop, base, history, blocks))
        return SegmentSource(
            self._shape,
            opened,
            self._reader,
            self._pool,
            self._cache,
            demand,
            learns=self._learns,
            timeline=timeline,
        )

    def open_coded(
        self, spans: Sequence[StoredSpan], in_slots: Sequence[bool], timeline: Timeline
    ) -> CodedSource:
        """A source for spans in codes; `in_slots` says of each whether its base is not needed.

        Raises:
            PrefixUnreadable: a segment cannot be opened.
        """
        segments = self._acquire_all(spans)
        self._codes.placement.advance()
        opened = []
        for span, segment in zip(spans, segments, strict=True):
            codes = self._codes_of(self._versions[segment.segment_id])
            opened.append(CodedSpan(segment, span.start, span.stop, *codes))
        return CodedSource(
            opened, self._reader, self._pool, self._codes, in_slots=in_slots, timeline=timeline
        )

    def _acquire_all(self, spans: Sequence[StoredSpan]) -> list[OpenSegment]:
        segments: list[OpenSegment] = []
        try:
            for span in spans:
                segments.append(self.acquire(span.segment))
        except BaseException:
            for done in segments:
                self.release(done.segment_id)
            raise
        return segments

    def can_read(self, spans: Sequence[StoredSpan], *, in_codes: bool) -> bool:
        """Whether a layer of spans fits into the pool; the first that does not is logged."""
        needed = 0
        # Spans of a segment share the image of its codes; of its streams each has its own.
        segments = {span.segment.segment_id: span.segment for span in spans}
        for segment in segments.values() if in_codes else (span.segment for span in spans):
            layout = self._version_of(segment).layout
            if in_codes:
                assert layout.codes is not None
                needed += self._pool.size_of(layout.codes.layer_bytes)
            else:
                needed += self._pool.size_of(streams_area_bytes(layout))
        if needed <= self._pool.limit_bytes:
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
        """What of spans would have to come from SSD in codes."""
        base_bytes = plane_bytes = 0.0
        # What belongs to the base of some heads.
        certain = self._meter.mean_planes / NUM_PLANES
        for span in spans:
            version = self._version_of(span.segment)
            base, _ = self._codes_of(version)
            layout = version.layout.codes
            assert layout is not None
            chunks = chunks_of(layout)
            count = self._shape.num_layers * len(chunks.count)
            tiers = self._codes.placement.tiers(base, count)
            on_ssd = (tiers == Tier.SSD).reshape(self._shape.num_layers, -1).sum(0) * chunks.count
            units = float(on_ssd[layout.num_pages :].sum())
            share = (span.stop - span.start) / version.layout.num_tokens * BLOCK_BYTES
            base_bytes += share * (float(on_ssd[: layout.num_pages].sum()) + certain * units)
            plane_bytes += share * (1.0 - certain) * units
        return CodedBytes(base_bytes, plane_bytes)

    def stored_bytes(self, spans: Sequence[StoredSpan]) -> StoredBytes:
        """What of consecutive spans would have to come from SSD."""
        probe_bytes, chances = 0.0, np.zeros(STEPS + 1)
        for span in spans:
            version = self._version_of(span.segment)
            base, blocks = self._streams_of(version)
            geometry = geometry_of(version.layout)
            tiers = self._cache.placement.tiers(base, version.layout.total_chunks)
            chunks_on_ssd = (tiers == Tier.SSD).reshape(-1, geometry.num_chunks)
            on_ssd = chunks_on_ssd[:, geometry.chunk_of_block]
            share = (span.stop - span.start) / version.layout.num_tokens * BLOCK_BYTES
            first = 0 if geometry.probe is None else geometry.probe.blocks.stop
            probe_bytes += share * np.count_nonzero(on_ssd[:, :first])
            codes = blocks.codes[:, first:][on_ssd[:, first:]]
            chances += share * np.bincount(codes, minlength=STEPS + 1)
        return StoredBytes(round(probe_bytes), chances, self._retention)

    def close_source(self, source: AnySource) -> None:
        """Stop what a source reads, and give its segments back when nothing is in flight."""
        source.close()
        self._closing.append(source)
        self.settle()

    def settle(self) -> None:
        """Give back the segments of closed sources whose last reads have ended."""
        ended = [source for source in self._closing if not source.is_reading]
        for source in ended:
            self._closing.remove(source)
            for segment_id in source.segment_ids:
                self.release(segment_id)

    def close(self, seconds: float) -> None:
        """Give back what can be given back within some seconds, and end the thread."""
        deadline = time.monotonic() + seconds
        while self._closing and time.monotonic() < deadline:
            self.settle()
            time.sleep(1e-3)
        self._opener.close(seconds)

    def acquire(self, stored: StoredSegment) -> OpenSegment:
        """Open a segment for one more reader.

        Raises:
            ChunkUnreadable: the file is missing, damaged, or not what the index says.
            StoreUnavailable: it cannot be opened now, or not in time.
        """
        if (version := self._versions.get(stored.segment_id)) is None or version.segment is None:
            segment = self._open(stored)
            version = self._version_of(stored)
            version.segment = segment
            self._meter.note(segment.floors)
        assert version.segment is not None
        version.readers += 1
        return version.segment

    def release(self, segment_id: str) -> None:
        """A reader of a segment is done."""
        version = self._versions[segment_id]
        version.readers -= 1
        if version.readers:
            return
        assert version.segment is not None
        version.segment.close()
        version.segment = None
        if version.retired:
            self._forget(segment_id)

    def retire(self, segment_id: str) -> None:
        """A segment has left the tree; its chunks leave the caches after its last reader."""
        version = self._versions.get(segment_id)
        if version is None:
            return
        version.retired = True
        if not version.readers:
            self._forget(segment_id)

    def succeed(self, old_id: str, new: StoredSegment, shares: Floats) -> None:
        """A reordered version takes over: its chunks inherit what is known of the old ones.

        Args:
            old_id: the version that is replaced, still known here.
            new: the segment with its new description.
            shares: float64 [L, lanes, chunks], expected share of selected rows.
        """
        old = self._versions.get(old_id)
        if old is None:
            return
        layout = new.info.layout()
        self._versions[new.segment_id] = version = _Version(layout, new.info.reordered)
        if old.streams is None:
            return
        base = self._cache.attach(self._cache.page.chunk_pages(layout))
        expected = expected_shares(layout, shares)
        # Averages of few requests say nothing of the tokens that none has selected, but the place
        # of these does: it counts like one more request.
        requests = 0.0 if new.history is None else float(new.history.accesses.mean())
        by_place = first_shares(layout, self._retention, ordered=True)
        chances = (requests * expected + by_place) / (requests + 1)
        version.streams = base, BlockHistory(layout, chances)
        ids = np.arange(layout.total_chunks)
        self._cache.placement.inherit(base + ids, old.streams[0] + ids, expected)

    def is_read(self, segment_id: str) -> bool:
        """Whether a segment has readers."""
        version = self._versions.get(segment_id)
        return version is not None and version.readers > 0

    def check_integrity(self, live: Iterable[str]) -> None:
        """Compare versions with the segments in the tree, and check the caches.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        known = set(live)
        for segment_id, version in self._versions.items():
            assert version.readers >= 0
            assert (version.segment is not None) == (version.readers > 0)
            assert version.retired == (segment_id not in known)
            assert not version.retired or version.readers
        self._cache.check_integrity()
        self._codes.check_integrity()

    def _version_of(self, stored: StoredSegment) -> _Version:
        version = self._versions.get(stored.segment_id)
        if version is None:
            version = _Version(stored.info.layout(), stored.info.reordered)
            self._versions[stored.segment_id] = version
        return version

    def _streams_of(self, version: _Version) -> tuple[int, BlockHistory]:
        if version.streams is None:
            layout = version.layout
            shares = first_shares(layout, self._retention, ordered=version.reordered)
            base = self._cache.attach(self._cache.page.chunk_pages(layout))
            version.streams = base, BlockHistory(layout, shares)
        return version.streams

    def _codes_of(self, version: _Version) -> tuple[int, UnitHistory]:
        if version.codes is None:
            layout = version.layout.codes
            assert layout is not None, "the store has no codes"
            pages = cached_pages(layout, self._shape.num_layers)
            units = UnitHistory(self._shape.num_layers, layout.total_units)
            version.codes = self._codes.attach(pages), units
        return version.codes

    def _forget(self, segment_id: str) -> None:
        version = self._versions.pop(segment_id)
        if version.codes is not None:
            assert version.layout.codes is not None
            count = self._shape.num_layers * len(chunks_of(version.layout.codes).count)
            self._codes.detach(version.codes[0], count)
        if version.streams is not None:
            self._cache.detach(version.streams[0], version.layout.total_chunks)

    def _history(self, stored: StoredSegment) -> TokenHistory:
        if stored.history is None:
            num_tokens = stored.info.num_tokens
            stored.history = TokenHistory(
                self._shape.num_layers,
                self._shape.num_lanes,
                num_tokens,
                by_importance=self._by_importance,
            )
        return stored.history

    def _open(self, stored: StoredSegment) -> OpenSegment:
        path = self._directory.segment_path(stored.segment_id)
        opening = self._opener.submit(self._open_file, path)
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
        # The index has no checksums; the header has.
        if not segment.info.describes_same(stored.info):
            segment.close()
            raise ChunkUnreadable(stored.segment_id, "index and segment file do not agree")
        return segment

    def _open_file(self, path: Path) -> OpenSegment:
        return OpenSegment(path, self._directory.files, direct=self._direct)


def _close_late(opening: Future[OpenSegment]) -> None:
    if opening.exception() is None:
        opening.result().close()
