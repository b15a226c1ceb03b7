"""Open segments, and their readers.

Files are opened on a thread of their own, and no caller waits for more than `patience` seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable, StoreUnavailable
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.reader import BlockReader
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.stored import StoredSegment, StoredSpan
from impress_sglang.store.versions import SegmentVersions
from impress_sglang.threads import BackgroundThread, locked
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.coded_span import CodedSpan
from impress_sglang.transfer.geometry import SourceSpan
from impress_sglang.transfer.kv_codec import is_unlike
from impress_sglang.transfer.source import ReadNeeds, SegmentSource

logger = logging.getLogger(__name__)

AnySource = SegmentSource | CodedSource


class OpenSegments:
    """Opens sources on segments.

    One thread opens sources and reads them; others may ask what is read, and settle.
    """

    def __init__(
        self,
        disk: StoreDisk,
        shape: KVShape,
        reader: BlockReader,
        versions: SegmentVersions,
        memory: StoreMemory,
        *,
        learns: bool,
        patience: float,
    ) -> None:
        """Begin with no readers.

        Args:
            disk: has the files; its meter is told how many planes belong to a base.
            shape: shape of the KVs.
            reader: reads blocks.
            versions: versions of the segments.
            memory: the caches of chunks, and the buffers for reads.
            learns: whether blocks are read ahead, so that sources learn which are wanted.
            patience: seconds to wait for a file to open.
        """
        self._disk = disk
        self._opener = BackgroundThread("impress-open")
        self._patience = patience
        self._lock = threading.RLock()
        self._closing: list[AnySource] = []
        self._shape = shape
        self._reader = reader
        self._versions = versions
        self._memory = memory
        self._learns = learns

    def open_source(self, spans: Sequence[StoredSpan], needs: ReadNeeds) -> SegmentSource:
        """Open a source for consecutive spans; `close_source` closes it.

        Raises:
            PrefixUnreadable: a segment cannot be opened.
        """
        return self._exact(spans, self._acquire_all(spans), needs)

    def open_coded(self, spans: Sequence[StoredSpan], planes: int) -> AnySource:
        """Open a source for spans in codes, and so many planes of them.

        Where a segment is unlike what its basis was fitted to, codes say too little: then exact KVs
        of all spans are read.

        Raises:
            PrefixUnreadable: a segment cannot be opened, or a layer of exact KVs fits no buffers.
        """
        segments = self._acquire_all(spans)
        # Of codes that stand alone this was asked when they were written.
        if self._shape.exact and any(is_unlike(segment.fits) for segment in segments):
            source = self._exact(spans, segments, ReadNeeds(whole=True))
            if source.layer_bytes > self._memory.pool.limit_bytes:
                # Found before it is read: it is no failure of the drive.
                self.close_source(source)
                raise PrefixUnreadable(
                    "-",
                    "it is unlike what its basis knows, and a layer of its exact KVs takes "
                    f"{source.layer_bytes / 1e9:.2f} GB: raise --impress-buffer-gb",
                )
            return source
        self._memory.codes.placement.advance()
        opened = []
        for span, segment in zip(spans, segments, strict=True):
            base = self._versions.codes(self._versions[segment.segment_id])
            opened.append(CodedSpan(segment, span.start, span.stop, base))
        return CodedSource(opened, self._reader, self._memory.pool, self._memory.codes, planes)

    def _exact(
        self,
        spans: Sequence[StoredSpan],
        segments: Sequence[OpenSegment],
        needs: ReadNeeds,
    ) -> SegmentSource:
        assert self._shape.exact, "only codes are kept"
        self._memory.cache.placement.advance()
        opened = []
        for span, segment in zip(spans, segments, strict=True):
            version = self._versions[segment.segment_id]
            base, blocks = self._versions.columns(version), self._versions.blocks(version)
            history = self._versions.history(span.segment)
            opened.append(SourceSpan(segment, span.start, span.stop, base, history, blocks))
        return SegmentSource(
            self._shape,
            opened,
            self._reader,
            self._memory.pool,
            self._memory.cache,
            needs,
            learns=self._learns,
        )

    def _acquire_all(self, spans: Sequence[StoredSpan]) -> list[OpenSegment]:
        segments: list[OpenSegment] = []
        try:
            for span in spans:
                segments.append(self.acquire(span.segment))
        except BaseException:
            for done in segments:
                self._versions.release(done.segment_id)
            raise
        return segments

    def close_source(self, source: AnySource) -> None:
        """Stop the reads of a source, and release its segments when none is in flight."""
        source.close()
        with self._lock:
            self._closing.append(source)
        self.settle()

    @locked
    def settle(self) -> None:
        """Release the segments of closed sources whose last reads have ended."""
        ended = [source for source in self._closing if not source.is_reading]
        for source in ended:
            self._closing.remove(source)
            for segment_id in source.segment_ids:
                self._versions.release(segment_id)

    def close(self, seconds: float) -> None:
        """Release the segments that can be released in `seconds`, and end the thread."""
        deadline = time.monotonic() + seconds
        while self._closing and time.monotonic() < deadline:
            self.settle()
            time.sleep(1e-3)
        self._opener.close(seconds)

    def acquire(self, stored: StoredSegment) -> OpenSegment:
        """Open a segment for one more reader.

        Raises:
            SegmentUnreadable: the file is missing, damaged, or not what the index says.
            StoreUnavailable: it cannot be opened now, or not in time.
        """
        segment = self._versions.acquire(stored)
        if segment is None:
            segment = self._open(stored)
            self._versions.acquire(stored, segment)
            self._disk.meter.note(segment.floors)
        return segment

    def _open(self, stored: StoredSegment) -> OpenSegment:
        path = self._disk.directory.segment_path(stored.segment_id)
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
        # The index has no checksums, but the header has.
        if not segment.info.describes_same(stored.info):
            segment.close()
            raise SegmentUnreadable(stored.segment_id, "index and segment file do not agree")
        return segment

    def _open_file(self, path: Path) -> OpenSegment:
        return OpenSegment(path, self._disk.files, direct=self._disk.direct)


def _close_late(opening: Future[OpenSegment]) -> None:
    if opening.exception() is None:
        opening.result().close()
