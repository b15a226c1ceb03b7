"""The store of prefixes on SSD: finds them, hands them to readers, takes new ones, keeps the quota.

One thread (the scheduler's) owns the store: tree, quota and pins change only there. A second thread
writes and removes files and keeps the catalog; its results are taken in by `poll`. So a request
never waits for a write, and no lock is needed.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ChunkUnreadable
from impress_sglang.management.tree import (
    StoredMatch,
    StoredSegment,
    StoredTree,
    prefix_digest,
    restore_segments,
)
from impress_sglang.storage.catalog import Catalog, CatalogEntry, segment_path
from impress_sglang.storage.direct_io import AlignedBuffer, supports_direct_io
from impress_sglang.storage.directory import OtherModels, claim_directory, free_bytes
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.reader import ChunkReader, OpenSegment
from impress_sglang.storage.segment import SegmentInfo, Tokens
from impress_sglang.storage.writer import LayerReader, write_segment
from impress_sglang.transfer.source import SegmentSource, SourceSpan, Staging

logger = logging.getLogger(__name__)


class StoreOutcome(enum.Enum):
    """What became of an offer to store a prefix."""

    ACCEPTED = "accepted"
    KNOWN = "known"
    UNREACHABLE = "unreachable"
    NO_SPACE = "no_space"


@dataclasses.dataclass(slots=True)
class StoreStats:
    """Counters since start; sizes in bytes."""

    segments_written: int = 0
    segments_failed: int = 0
    segments_evicted: int = 0
    segments_unreadable: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    chunks_read: int = 0
    offers_without_space: int = 0


@dataclasses.dataclass(slots=True)
class _Write:
    segment: StoredSegment
    future: Future[None]
    on_done: Callable[[], None]


class PrefixStore:
    """Stored prefixes of one model on one SSD directory."""

    def __init__(self, config: ImpressConfig, identity: str, shape: KVShape) -> None:
        """Open the store, and find what an earlier process left in it.

        Raises:
            ConfigError: the directory cannot be written.
            StoreInUseError: another process serves the same model from it.
        """
        self._config = config
        self._identity = identity
        self._shape = shape
        self._directory, self._lock = claim_directory(config.ssd_path, identity)
        self._others = OtherModels(config.ssd_path, self._directory)
        self._direct = supports_direct_io(self._directory)
        self._reader = ChunkReader(config.io_threads)
        self._staging = Staging()
        self._buffer = AlignedBuffer()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="impress-write")
        self._writes: collections.deque[_Write] = collections.deque()
        self._pins: dict[str, tuple[OpenSegment, int]] = {}
        self._catalog = Catalog(self._directory)
        self._closed = False
        self.stats = StoreStats()
        self.tree, self._used_bytes = self._recover()

    @property
    def is_writing(self) -> bool:
        """Whether accepted writes have not been taken in yet."""
        return bool(self._writes)

    def match(self, namespace: str, tokens: Tokens, *, allow_approximate: bool) -> StoredMatch:
        """The longest published prefix of `tokens`."""
        self.poll()
        return self.tree.match(namespace, tokens, allow_approximate=allow_approximate)

    def open_source(self, match: StoredMatch, start: int, stop: int) -> SegmentSource:
        """A source for the tokens [start, stop) of a match; `close_source` gives it back.

        Raises:
            ChunkUnreadable: a segment cannot be opened; the caller should `drop` it.
        """
        self.tree.touch(match)
        opened: list[SourceSpan] = []
        try:
            for span in match.slice(start, stop):
                segment = self._pin(span.segment)
                opened.append(SourceSpan(segment, span.start, span.stop))
        except BaseException:
            self._unpin(span.segment.segment_id for span in opened)
            raise
        return SegmentSource(self._shape, opened, self._reader, self._staging)

    def close_source(self, source: SegmentSource) -> None:
        """Count what a source has read, and let its segments be removed again."""
        self.stats.bytes_read += source.bytes_read
        self.stats.chunks_read += sum(source.chunks_read.values())
        self._unpin(source.segment_ids)

    def offer(
        self,
        namespace: str,
        tokens: Tokens,
        read_layers: Callable[[int], LayerReader],
        on_done: Callable[[], None],
        *,
        available_from: int = 0,
        approximate: bool,
        min_tokens: int,
    ) -> StoreOutcome:
        """Store what is new of a prefix, in the background.

        Args:
            namespace: keeps requests with other `extra_key` or `cache_salt` apart.
            tokens: all tokens from the start of the sequence.
            read_layers: given the number of leading tokens that are stored already, returns the
                reader of the KVs of the others. It is only called if the offer is accepted.
            on_done: called by `poll` when the KVs are no longer needed, written or not.
            available_from: the reader has no KVs of earlier tokens; those must be stored.
            approximate: the new KVs were computed after a partly loaded prefix.
            min_tokens: a shorter rest is not worth a file.
        """
        known = self.tree.match(
            namespace, tokens, allow_approximate=approximate, include_pending=True
        )
        start = known.num_tokens
        if len(tokens) - start < min_tokens:
            return StoreOutcome.KNOWN
        if start < available_from:
            return StoreOutcome.UNREACHABLE
        info = self._describe(namespace, tokens, start, approximate)
        segment = StoredSegment(info, info.layout().file_bytes, ready=False)
        if not self._make_room(segment.file_bytes, known):
            self.stats.offers_without_space += 1
            return StoreOutcome.NO_SPACE
        read_layer = read_layers(start)
        attached = self.tree.insert(segment, tokens[:start])
        assert attached, "the matched prefix is not in the tree"
        self._used_bytes += segment.file_bytes
        future = self._worker.submit(self._write, segment, read_layer)
        self._writes.append(_Write(segment, future, on_done))
        return StoreOutcome.ACCEPTED

    def poll(self) -> None:
        """Take in finished writes: publish them, or drop what could not be written."""
        while self._writes and self._writes[0].future.done():
            self._finish(self._writes.popleft())

    def drain(self) -> None:
        """Wait until all accepted writes are finished, and take them in."""
        while self._writes:
            self._finish(self._writes.popleft())

    def drop(self, segment_id: str) -> None:
        """Remove a segment that turned out to be unreadable, and all that builds on it."""
        segment = self.tree.get(segment_id)
        if segment is not None:
            self.stats.segments_unreadable += 1
            self._remove(segment)

    def summary(self) -> dict[str, int | bool | str]:
        """Counters and sizes for the statistics page."""
        return {
            **dataclasses.asdict(self.stats),
            "directory": str(self._directory),
            "segments": len(self.tree),
            "writes_pending": len(self._writes),
            "used_bytes": self._used_bytes,
            "other_models_bytes": self._others.used_bytes,
            "quota_bytes": self._config.ssd_bytes,
            "direct_io": self._direct,
        }

    def check_integrity(self) -> None:
        """Compare tree, quota and pins with each other.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        self.tree.check_integrity()
        live = {segment.segment_id: segment for segment in self.tree.segments()}
        pending = {write.segment.segment_id: write.segment for write in self._writes}
        assert {sid for sid, segment in live.items() if not segment.ready} <= set(pending)
        charged = {**pending, **live}
        assert self._used_bytes == sum(segment.file_bytes for segment in charged.values())
        assert all(count > 0 for _, count in self._pins.values())

    def close(self) -> None:
        """Finish writes, keep access times, close files and release the lock; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self.drain()
            accesses = [(s.segment_id, s.last_access, s.hits) for s in self.tree.segments()]
            self._worker.submit(self._catalog.record_accesses, accesses).result()
        except sqlite3.Error as error:
            logger.warning("access times are not kept for the next start: %s", error)
        finally:
            self._worker.shutdown(wait=True)
            self._reader.close()
            self._catalog.close()
            os.close(self._lock)

    def _recover(self) -> tuple[StoredTree, int]:
        segments = [
            StoredSegment(e.info, e.file_bytes, last_access=e.last_access, hits=e.hits)
            for e in self._catalog.recover(self._identity)
        ]
        latest = max((segment.last_access for segment in segments), default=0)
        tree = StoredTree(first_time=latest + 1)
        for lost in restore_segments(tree, segments):
            logger.warning("segment %s has lost the prefix it builds on; removed", lost.segment_id)
            self._delete(lost)
        used = sum(segment.file_bytes for segment in tree.segments())
        logger.info(
            "SSD store %s: %d segments, %.1f MB, O_DIRECT %s",
            self._directory,
            len(tree),
            used / 1e6,
            "on" if self._direct else "off",
        )
        return tree, used

    def _describe(
        self, namespace: str, tokens: Tokens, start: int, approximate: bool
    ) -> SegmentInfo:
        return SegmentInfo(
            segment_id=uuid.uuid4().hex,
            identity=self._identity,
            namespace=namespace,
            prefix_digest=prefix_digest(namespace, tokens[:start]),
            prefix_len=start,
            tokens=tokens[start:].copy(),
            approximate=approximate,
            shape=self._shape,
            chunk_tokens=self._config.chunk_tokens,
        )

    def _write(self, segment: StoredSegment, read_layer: LayerReader) -> None:
        """On the writing thread: write and publish a segment."""
        path = segment_path(self._directory, segment.segment_id)
        write_segment(path, segment.info, read_layer, self._buffer, direct=self._direct)
        self._catalog.add(CatalogEntry(segment.info, segment.file_bytes, segment.last_access))

    def _finish(self, write: _Write) -> None:
        """Take in one write, waiting for it if it still runs."""
        segment, error = write.segment, write.future.exception()
        alive = self.tree.get(segment.segment_id) is segment
        write.on_done()
        if error is None and alive:
            segment.ready = True
            self.stats.segments_written += 1
            self.stats.bytes_written += segment.file_bytes
            return
        self._used_bytes -= segment.file_bytes
        self._delete(segment)
        if error is not None:
            self.stats.segments_failed += 1
            logger.warning(
                "a prefix of %d tokens could not be stored: %s", segment.info.num_tokens, error
            )
        if alive:
            self.tree.remove_subtree(segment)

    def _make_room(self, num_bytes: int, keep: StoredMatch) -> bool:
        """Evict until `num_bytes` more fit under the quota and above the free-space floor."""
        needed = self._missing_bytes(num_bytes)
        if needed > self._others.used_bytes + self._evictable_bytes(keep):
            return False
        while needed > 0:
            freed = self._others.remove_oldest() or self._evict_one(keep)
            if not freed:
                return False
            needed -= freed
        return True

    def _missing_bytes(self, num_bytes: int) -> int:
        used = self._used_bytes + self._others.used_bytes
        pending = sum(write.segment.file_bytes for write in self._writes)
        available = free_bytes(self._directory) - pending - self._config.min_free_bytes
        return max(used + num_bytes - self._config.ssd_bytes, num_bytes - available)

    def _evict_one(self, keep: StoredMatch) -> int:
        """Evict the least recently used segment that nothing builds on or reads."""
        candidates = [s for s in self._replaceable(keep) if not s.dependents]
        if not candidates:
            return 0
        victim = min(candidates, key=lambda segment: segment.last_access)
        self.stats.segments_evicted += 1
        self._remove(victim)
        return victim.file_bytes

    def _evictable_bytes(self, keep: StoredMatch) -> int:
        """An upper bound: a segment below which one is pinned stays as well."""
        return sum(segment.file_bytes for segment in self._replaceable(keep))

    def _replaceable(self, keep: StoredMatch) -> list[StoredSegment]:
        kept = {span.segment.segment_id for span in keep.spans}
        return [
            segment
            for segment in self.tree.segments()
            if segment.ready
            and segment.segment_id not in self._pins
            and segment.segment_id not in kept
        ]

    def _remove(self, segment: StoredSegment) -> None:
        for gone in self.tree.remove_subtree(segment):
            # A segment that is still being written is settled when its write finishes.
            if gone.ready:
                self._used_bytes -= gone.file_bytes
                self._delete(gone)

    def _delete(self, segment: StoredSegment) -> None:
        path = segment_path(self._directory, segment.segment_id)

        def delete() -> None:
            try:
                path.unlink(missing_ok=True)
                self._catalog.remove(segment.segment_id)
            except (OSError, sqlite3.Error) as error:
                # The next start compares files and index again.
                logger.warning("segment %s could not be removed: %s", segment.segment_id, error)

        self._worker.submit(delete)

    def _pin(self, stored: StoredSegment) -> OpenSegment:
        segment_id = stored.segment_id
        if segment_id in self._pins:
            segment, count = self._pins[segment_id]
        else:
            segment, count = self._open(stored), 0
        self._pins[segment_id] = (segment, count + 1)
        return segment

    def _open(self, stored: StoredSegment) -> OpenSegment:
        path = segment_path(self._directory, stored.segment_id)
        segment = OpenSegment(path, direct=self._direct)
        # The index has no checksums; the header has.
        if not segment.info.describes_same(stored.info):
            segment.close()
            raise ChunkUnreadable(stored.segment_id, "index and segment file do not agree")
        return segment

    def _unpin(self, segment_ids: Iterable[str]) -> None:
        for segment_id in segment_ids:
            segment, count = self._pins[segment_id]
            if count > 1:
                self._pins[segment_id] = (segment, count - 1)
            else:
                segment.close()
                del self._pins[segment_id]
