"""Segments that are read: their files while these are open, and their chunks in the caches.

A file gets a range of chunk ids when it is first read, and keeps it until its segment has left the
tree, or has got another file, *and* its last reader is done: a request goes on with the file that
it began with, whatever is published meanwhile.

Files are opened on a thread of their own, and no caller waits for more than `patience` seconds.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable, StoreUnavailable
from impress_sglang.loops.types import Floats
from impress_sglang.storage.layout import PROBE, KVShape, SegmentLayout
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.reader import BlockReader
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.lookahead import AwaitedRange, turns_of
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.stored import SegmentState, StoredSegment, StoredSpan
from impress_sglang.threads import BackgroundThread, locked
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.coded_span import CodedSpan, cached_pages, chunks_of
from impress_sglang.transfer.columns import ColumnSource, ColumnSpan, ExactSource, column_pages
from impress_sglang.transfer.kv_codec import is_unlike
from impress_sglang.transfer.stored_source import StoredSource

AnySource = ExactSource | CodedSource
_Source = TypeVar("_Source", bound=StoredSource)
_Columns = TypeVar("_Columns", bound=ColumnSource)


@dataclasses.dataclass(slots=True)
class CachedSegment:
    """One file: its chunk ids, and its readers while it has any.

    `columns` and `codes`: the first id of their chunks; None until they are read. `retired`: its
    segment has left the tree, or has another file.
    """

    segment_id: str
    layout: SegmentLayout
    reordered: bool
    retired: bool = False
    columns: int | None = None
    codes: int | None = None
    opened: OpenSegment | None = None
    readers: int = 0

    def check(self) -> None:
        """Raises: AssertionError: it is wrong by itself, which is a bug."""
        assert self.readers >= 0 and (self.opened is not None) == (self.readers > 0)


class OpenSegments:
    """Files that were read so far, of segments in the tree or with readers.

    One thread opens sources and reads them; others may ask what is read, retire, and settle.
    """

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        memory: StoreMemory,
        disk: StoreDisk | None,
        reader: BlockReader,
    ) -> None:
        """Begin with no readers; `disk` has the files, None if none is going to be opened."""
        self._lock = threading.RLock()
        self._shape = shape
        self._memory = memory
        self._cache, self._codes = memory.cache, memory.codes
        self._disk = disk
        self._reader = reader
        # Columns of exact KVs of which requests want all rows.
        self._certain = np.array([PROBE] if shape.probe_kv_heads else shape.columns)
        self._patience = config.io_timeout
        self._opener = BackgroundThread("impress-open")
        self._known: dict[str, CachedSegment] = {}
        # What requests wait for, including segments that were not read yet.
        self._awaited: dict[str, Sequence[AwaitedRange]] = {}
        self._closing: list[StoredSource] = []

    def get(self, segment_id: str) -> CachedSegment | None:
        """What is known of a segment that was read before; else None."""
        return self._known.get(segment_id)

    @locked
    def of(self, stored: StoredSegment) -> CachedSegment:
        """What is known of a segment, which begins now if it was not read before."""
        known = self._known.get(stored.segment_id)
        if known is None:
            # Another thread may have evicted it meanwhile, and has retired all that there was.
            info, retired = stored.info, stored.state is SegmentState.LOST
            known = CachedSegment(info.segment_id, info.layout(), info.reordered, retired)
            self._known[stored.segment_id] = known
        return known

    @locked
    def columns(self, own: CachedSegment) -> int:
        """The first id of the chunks of exact KVs, which are about to be read."""
        if own.columns is None:
            own.columns = self._cache.attach(column_pages(own.layout))
            if ranges := self._awaited.get(own.segment_id):
                self._expect_columns(own, ranges)
        return own.columns

    @locked
    def codes(self, own: CachedSegment) -> int:
        """The first id of the chunks in codes, which are about to be read."""
        if own.codes is None:
            assert own.layout.codes, "the store has no codes"
            own.codes = self._codes.attach(cached_pages(own.layout.codes))
            if ranges := self._awaited.get(own.segment_id):
                self._expect_codes(own, ranges)
        return own.codes

    def tiers(self, own: CachedSegment, *, codes: bool) -> npt.NDArray[np.uint8]:
        """The tier of each chunk, of exact KVs or in codes, `Tier` values; SSD without an id."""
        cache, first = (self._codes, own.codes) if codes else (self._cache, own.columns)
        count = self._num_codes(own) if codes else own.layout.total_chunks
        if first is None:
            return np.full(count, Tier.SSD, np.uint8)
        return cache.placement.tiers(first, count)

    @locked
    def expect(self, awaited: Iterable[tuple[str, Sequence[AwaitedRange]]]) -> None:
        """Note the tokens that requests wait for in some segments; they wait for no others there.

        Of these tokens, what is certain to be read is evicted last from the caches: the bases of
        codes, and of exact KVs what chooses the tokens, or all columns.
        """
        for segment_id, ranges in awaited:
            if ranges:
                self._awaited[segment_id] = ranges
            else:
                self._awaited.pop(segment_id, None)
            if (own := self._known.get(segment_id)) is not None:
                self._expect_columns(own, ranges)
                self._expect_codes(own, ranges)

    def _expect_columns(self, own: CachedSegment, ranges: Sequence[AwaitedRange]) -> None:
        if own.columns is None:
            return
        layout = own.layout
        if own.reordered and ranges:
            # Which chunks have these tokens is known only from the file.
            ranges = [(0, layout.num_tokens, ranges[-1][2])]
        chunks = turns_of(layout.num_chunks, layout.chunk_tokens, ranges)
        layers = own.columns + layout.layer_chunks * np.arange(self._shape.num_layers)
        starts = layers[:, None] + layout.num_chunks * self._certain
        self._cache.expect(starts.reshape(-1), chunks)

    def _expect_codes(self, own: CachedSegment, ranges: Sequence[AwaitedRange]) -> None:
        if own.codes is None:
            return
        layout = own.layout.codes[0]
        pages = turns_of(layout.num_pages, layout.page_groups * layout.group_tokens, ranges)
        count = len(chunks_of(layout).count)
        self._codes.expect(own.codes + count * np.arange(self._shape.num_layers), pages)

    @locked
    def cached_bytes(self, segment_id: str) -> npt.NDArray[np.int64]:
        """How many bytes of a segment are in the caches, by `Tier`."""
        own, found = self._known.get(segment_id), np.zeros(len(Tier), np.int64)
        kinds = []
        if own is not None and own.columns is not None:
            kinds.append((self._cache, False, column_pages(own.layout)))
        if own is not None and own.codes is not None:
            kinds.append((self._codes, True, cached_pages(own.layout.codes)))
        for cache, codes, pages in kinds:
            assert own is not None
            counts = np.bincount(self.tiers(own, codes=codes), pages, len(Tier))
            found += counts.astype(np.int64) * cache.page.page_bytes
        found[Tier.SSD] = 0
        return found

    def acquire(self, stored: StoredSegment) -> OpenSegment:
        """Open a segment for one more reader.

        Raises:
            SegmentUnreadable: the file is missing, damaged, or not what the index says.
            StoreUnavailable: it cannot be opened now, or not in time.
        """
        opened = self._read_again(stored)
        if opened is None:
            opened = self._open(stored)
            with self._lock:
                own = self.of(stored)
                if own.opened is not None:
                    # Another thread was faster.
                    opened.close()
                own.opened = opened = own.opened or opened
                own.readers += 1
        return opened

    @locked
    def _read_again(self, stored: StoredSegment) -> OpenSegment | None:
        own = self._known.get(stored.segment_id)
        if own is None or own.opened is None:
            return None
        own.readers += 1
        return own.opened

    def _open(self, stored: StoredSegment) -> OpenSegment:
        disk = self._disk
        assert disk is not None
        path = disk.directory.segment_path(stored.segment_id)
        opening = self._opener.submit(lambda: OpenSegment(path, disk.files, direct=disk.direct))
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
        return segment

    @locked
    def release(self, segment_id: str) -> None:
        """End one reader; after the last one the file is closed."""
        own = self._known[segment_id]
        own.readers -= 1
        if own.readers:
            return
        assert own.opened is not None
        own.opened.close()
        own.opened = None
        if own.retired:
            self._forget(own)

    @locked
    def retire(self, segment_id: str) -> None:
        """Retire a file that belongs to the tree no more; its chunks go after the last reader."""
        if (own := self._known.get(segment_id)) is not None:
            own.retired = True
            if not own.readers:
                self._forget(own)

    def _forget(self, own: CachedSegment) -> None:
        del self._known[own.segment_id]
        if own.codes is not None:
            self._codes.detach(own.codes, self._num_codes(own))
        if own.columns is not None:
            self._cache.detach(own.columns, own.layout.total_chunks)

    def _num_codes(self, own: CachedSegment) -> int:
        assert own.layout.codes, "the store has no codes"
        return self._shape.num_layers * len(chunks_of(own.layout.codes[0]).count)

    @locked
    def succeed(self, old_id: str, new: StoredSegment, shares: Floats) -> None:
        """Let a reordered file take over: its chunks inherit what is known of the old ones.

        Args:
            old_id: name of the segment before.
            new: the segment with its new description.
            shares: float64 [chunks], expected share of wanted rows.
        """
        old, layout = self._known.get(old_id), new.info.layout()
        if old is None:
            return
        own = self.of(new)
        if old.columns is not None:
            own.columns = self._cache.attach(column_pages(layout))
            ids = np.arange(layout.total_chunks)
            self._cache.placement.inherit(own.columns + ids, old.columns + ids, shares)
        self.retire(old_id)

    def open_exact(self, spans: Sequence[StoredSpan]) -> ExactSource:
        """Open a source for whole layers of consecutive spans; `close_source` closes it.

        Raises:
            PrefixUnreadable: a segment cannot be opened, or was reordered.
        """
        return self.open_columns(spans, self._exact)

    def open_columns(
        self, spans: Sequence[StoredSpan], make: Callable[[list[ColumnSpan]], _Columns]
    ) -> _Columns:
        """Open a source for consecutive spans of exact KVs, as `make` makes it.

        Raises:
            PrefixUnreadable: a segment cannot be opened, or `make` raises that.
        """
        return self._opened(spans, lambda segments: make(self._columns_of(spans, segments)))

    def open_coded(self, spans: Sequence[StoredSpan]) -> AnySource:
        """Open a source for spans in codes.

        Where a segment is unlike what its basis was fitted to, codes say too little: then exact KVs
        of all spans are read.

        Raises:
            PrefixUnreadable: a segment cannot be opened, or a layer of exact KVs fits no buffers.
        """
        return self._opened(spans, lambda segments: self._coded(spans, segments))

    def _opened(
        self,
        spans: Sequence[StoredSpan],
        make: Callable[[list[OpenSegment]], _Source],
    ) -> _Source:
        segments = list[OpenSegment]()
        try:
            for span in spans:
                segments.append(self.acquire(span.segment))
            return make(segments)
        except BaseException:
            for done in segments:
                self.release(done.segment_id)
            raise

    def _coded(self, spans: Sequence[StoredSpan], segments: Sequence[OpenSegment]) -> AnySource:
        # Of codes that stand alone this was asked when they were written.
        if self._shape.exact and any(is_unlike(segment.fits) for segment in segments):
            source = self._exact(self._columns_of(spans, segments))
            if source.layer_bytes > self._memory.pool.limit_bytes:
                # Found before it is read: it is no failure of the drive.
                source.close()
                raise PrefixUnreadable(
                    "-",
                    "it is unlike what its basis knows, and a layer of its exact KVs takes "
                    f"{source.layer_bytes / 1e9:.2f} GB: raise --impress-buffer-gb",
                )
            return source
        self._codes.placement.advance()
        opened = []
        for span, segment in zip(spans, segments, strict=True):
            base = self.codes(self._known[segment.segment_id])
            opened.append(CodedSpan(segment, span.start, span.stop, base))
        return CodedSource(opened, self._reader, self._memory.pool, self._codes)

    def _exact(self, spans: list[ColumnSpan]) -> ExactSource:
        for span in spans:
            # Its rows are not in the order of the tokens, which only `paper/` restores.
            if span.segment.mapping is not None:
                raise SegmentUnreadable(span.segment.segment_id, "was reordered")
        return ExactSource(spans, self._reader, self._memory.pool, self._cache)

    def _columns_of(
        self, spans: Sequence[StoredSpan], segments: Sequence[OpenSegment]
    ) -> list[ColumnSpan]:
        assert self._shape.exact, "only codes are kept"
        self._cache.placement.advance()
        return [
            ColumnSpan(
                segment, span.start, span.stop, self.columns(self._known[segment.segment_id])
            )
            for span, segment in zip(spans, segments, strict=True)
        ]

    def close_source(self, source: StoredSource) -> None:
        """Stop the reads of a source, and release its segments when none is in flight."""
        source.close()
        with self._lock:
            self._closing.append(source)
        self.settle()

    @locked
    def settle(self) -> None:
        """Release the segments of closed sources whose last reads have ended."""
        for source in [own for own in self._closing if not own.is_reading]:
            self._closing.remove(source)
            for segment_id in source.segment_ids:
                self.release(segment_id)

    def close(self, seconds: float) -> None:
        """Release the segments that can be released in `seconds`, and end the thread."""
        deadline = time.monotonic() + seconds
        while self._closing and time.monotonic() < deadline:
            self.settle()
            time.sleep(1e-3)
        self._opener.close(seconds)

    @locked
    def check_integrity(self, live: Iterable[str]) -> None:
        """Compare with the segments in the tree that have files, and check the caches.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        names = set(live)
        for segment_id, own in self._known.items():
            own.check()
            assert own.retired == (segment_id not in names)
            assert not own.retired or own.readers
        self._cache.check_integrity()
        self._codes.check_integrity()

    @locked
    def check(self, segment_id: str) -> None:
        """Check what is known of a segment in the tree; raises like `check_integrity`."""
        if (own := self._known.get(segment_id)) is not None:
            own.check()
            assert not own.retired


def _close_late(opening: Future[OpenSegment]) -> None:
    if opening.exception() is None:
        opening.result().close()
