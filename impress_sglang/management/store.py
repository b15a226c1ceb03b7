"""The store of prefixes: finds them, hands them to readers, takes new ones, keeps the quota.

One thread (the scheduler's) owns the store: tree, quota, readers and caches change only there. A
second thread writes and removes files and keeps the catalog, a third one rewrites segments in a
better order; their results are taken in by `poll`. So a request never waits for a write, and no
lock is needed.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ChunkUnreadable
from impress_sglang.management.estimate import StoredBytes
from impress_sglang.management.policies import make_policy
from impress_sglang.management.readers import SegmentReaders
from impress_sglang.management.reordering import Outcome, Reorderer
from impress_sglang.management.rewriting import Rewriter
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
from impress_sglang.storage.reader import ChunkReader
from impress_sglang.storage.segment import SegmentInfo, Tokens
from impress_sglang.storage.throttle import TokenBucket
from impress_sglang.storage.writer import LayerReader, WriteAbandoned, write_segment
from impress_sglang.threads import compute_alone
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.timeline import NO_TIMELINE, Timeline
from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.area import AreaPool
from impress_sglang.transfer.source import Demand, SegmentSource

logger = logging.getLogger(__name__)


# What an emulated drive may be behind its rate; threads wake up late by less.
BURST_SECONDS = 2e-3


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
    segments_abandoned: int = 0
    segments_evicted: int = 0
    segments_unreadable: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    bytes_read_ahead: int = 0
    bytes_read_ahead_used: int = 0
    offers_without_space: int = 0


@dataclasses.dataclass(slots=True)
class _Write:
    segment: StoredSegment
    future: Future[None]
    on_done: Callable[[], None]


class PrefixStore:
    """Stored prefixes of one model on one SSD directory, with the chunk caches above it."""

    def __init__(
        self,
        config: ImpressConfig,
        identity: str,
        shape: KVShape,
        device: torch.device | None = None,
    ) -> None:
        """Open the store, and find what an earlier process left in it.

        Args:
            config: of the server.
            identity: names the model.
            shape: of its KVs.
            device: where attention runs, the CPU if not given.

        Raises:
            ConfigError: the directory cannot be written, or the caches do not fit in memory.
            StoreInUseError: another process serves the same model from it.
        """
        self._config = config
        self._identity = identity
        self._shape = shape
        self._directory, self._lock = claim_directory(config.ssd_path, identity)
        self._others = OtherModels(config.ssd_path, self._directory)
        self._direct = supports_direct_io(self._directory)
        policy = make_policy(config)
        self.cache = ChunkCache(
            shape,
            config.chunk_tokens,
            policy.replacement_rule(),
            device=device or torch.device("cpu"),
            device_bytes=config.device_bytes if policy.stores else 0,
            host_bytes=config.host_bytes - config.buffer_bytes if policy.stores else 0,
        )
        self._bucket = TokenBucket(config.ssd_mbps * 1e6, burst_seconds=BURST_SECONDS)
        self._reader = ChunkReader(config.io_depth, self._bucket, engine=config.io_engine)
        # Chunks are cached by whole pages, also where they end inside one.
        self._pool = AreaPool(
            config.buffer_bytes,
            pin=self.cache.device.type == "cuda",
            spare_bytes=self.cache.page.page_bytes,
        )
        self.ahead = ReadAhead(self._pool, config.readahead)
        self._readers = SegmentReaders(
            self._directory,
            shape,
            self._reader,
            self.cache,
            self._pool,
            direct=self._direct,
            reorder_by_importance=config.reorder_key == "importance",
            retention=config.usual_retention,
            learns=self.ahead.enabled,
        )
        self._reorders = policy.reorders
        self._next_reorder = time.monotonic() + config.reorder_interval
        self._buffer = AlignedBuffer()
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="impress-write", initializer=compute_alone
        )
        self._writes: collections.deque[_Write] = collections.deque()
        self._catalog = Catalog(self._directory)
        self._closed = False
        self._measuring: SegmentSource | None = None
        self.stats = StoreStats()
        self.tree, self._used_bytes = self._recover()
        rewriter = Rewriter(self._directory, self._bucket, direct=self._direct)
        self._reorderer = Reorderer(self.tree, self._readers, rewriter)

    @property
    def is_writing(self) -> bool:
        """Whether accepted writes have not been taken in yet."""
        return bool(self._writes)

    def match(self, namespace: str, tokens: Tokens, *, allow_approximate: bool) -> StoredMatch:
        """The longest published prefix of `tokens`."""
        self.poll()
        return self.tree.match(namespace, tokens, allow_approximate=allow_approximate)

    def open_source(
        self,
        match: StoredMatch,
        start: int,
        stop: int,
        demand: Demand,
        timeline: Timeline = NO_TIMELINE,
    ) -> SegmentSource:
        """A source for the tokens [start, stop) of a match; `close_source` gives it back.

        `demand` says what will be asked of it.

        Raises:
            ChunkUnreadable: a segment is gone or cannot be opened; the caller should `drop` it.
        """
        for span in match.spans:
            if self.tree.get(span.segment.segment_id) is not span.segment:
                raise ChunkUnreadable(span.segment.segment_id, "was removed after it was matched")
        self.tree.touch(match)
        return self._readers.open_source(match.slice(start, stop), demand, timeline)

    def stored_bytes(
        self, match: StoredMatch, start: int, stop: int, *, probe: bool
    ) -> StoredBytes:
        """What of the tokens [start, stop) of a match would have to come from SSD."""
        return self._readers.stored_bytes(match.slice(start, stop), probe=probe)

    def seconds_to_read(self, num_bytes: float) -> float:
        """What reading so many bytes from SSD takes, as reads went lately."""
        return self._reader.cost.seconds_for(num_bytes)

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of the SSD, as reads went lately."""
        return self._reader.cost.bytes_per_second

    def measure_reading(self, match: StoredMatch) -> None:
        """Read a little of a match in the background, only to know how fast that is now.

        A prefix that is not loaded because reading was slow would else never be loaded again.
        """
        if self._measuring is not None:
            return
        try:
            source = self.open_source(match, 0, match.num_tokens, Demand(whole=True, probe=False))
        except ChunkUnreadable as error:
            self.drop(error.segment_id)
            return
        source.read_ahead(0.0)
        self._measuring = source

    def close_source(self, source: SegmentSource) -> None:
        """Count what a source has read, and let its segments be removed again."""
        self._readers.close_source(source)
        self.ahead.leave(source)
        self.stats.bytes_read += source.stats.ssd_bytes
        self.stats.bytes_read_ahead += source.stats.ahead_bytes
        self.stats.bytes_read_ahead_used += source.stats.ahead_used_bytes

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
        """Take in finished writes: publish them, or drop what could not be written.

        Also begins reordering when its interval is over, and goes on with it.
        """
        if self._closed:
            return
        self._end_measuring()
        while self._writes and self._writes[0].future.done():
            self._finish(self._writes.popleft())
        if (outcome := self._reorderer.take_finished()) is not None:
            self._settle(outcome)
        if self._config.reorder_interval and time.monotonic() >= self._next_reorder:
            self.reorder()
        try:
            self._reorderer.begin_next(self._reader.cost.gap_bytes, self._has_room)
        except ChunkUnreadable as error:
            logger.warning("a segment cannot be reordered: %s", error)
            self.drop(error.segment_id)

    def drain(self) -> None:
        """Wait until all accepted writes are finished, and take them in."""
        while self._writes:
            self._finish(self._writes.popleft())

    def abandon_writes(self) -> None:
        """Give up all accepted writes at once: none is published, and their KVs are let go."""
        for write in self._writes:
            write.on_done()
            write.on_done = _nothing
            if self.tree.get(write.segment.segment_id) is write.segment:
                self.tree.remove_subtree(write.segment)

    def reorder(self, *, force: bool = False) -> int:
        """Begin to reorder, in the background, the segments for which it pays.

        A rewrite pays if the reads since the segment got its order would have been shorter by more
        bytes than the file has: what was read so often will be read as often again. `force` takes
        every segment that was selected from.

        Returns:
            How many segments are queued; 0 for a policy that does not reorder.
        """
        self._next_reorder = time.monotonic() + self._config.reorder_interval
        return self._reorderer.enqueue(force=force) if self._reorders else 0

    def emulate_ssd(self, mbps: float) -> None:
        """Let reads from SSD be as slow as `mbps` MB/s from now on; 0 as fast as they are."""
        self._bucket.set_rate(mbps * 1e6)

    def set_readahead(self, waste: float) -> None:
        """Let so much be read ahead in vain from now on, as a share of what is wanted; 0: none."""
        self.ahead.set_waste(waste)

    def reorder_summary(self) -> dict[str, int]:
        """Counters for the statistics page; `pending` are in work or wait."""
        stats = dataclasses.asdict(self._reorderer.stats)
        return {"pending": self._reorderer.pending, **stats}

    def drop(self, segment_id: str) -> None:
        """Remove a segment that turned out to be unreadable, and all that builds on it."""
        segment = self.tree.get(segment_id)
        if segment is not None:
            self.stats.segments_unreadable += 1
            self._remove(segment)

    def summary(self) -> dict[str, Any]:
        """Counters and sizes for the statistics page."""
        return {
            **dataclasses.asdict(self.stats),
            "directory": str(self._directory),
            "segments": len(self.tree),
            "writes_pending": len(self._writes),
            "used_bytes": self._used_bytes + self._reorderer.reserved_bytes,
            "other_models_bytes": self._others.used_bytes,
            "quota_bytes": self._config.ssd_bytes,
            "direct_io": self._direct,
            "io_engine": self._reader.engine,
            "buffer_bytes": self._pool.limit_bytes,
            "buffer_used_bytes": self._pool.used_bytes,
            "gap_bytes": self._reader.cost.gap_bytes,
            "read_mbps": round(self._reader.cost.bytes_per_second / 1e6),
        }

    def check_integrity(self) -> None:
        """Compare tree, quota, readers, caches and index with each other.

        The index is left out while something is being written, which may take long.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        if self._closed:
            return
        self.tree.check_integrity()
        live = {segment.segment_id: segment for segment in self.tree.segments()}
        pending = {write.segment.segment_id: write.segment for write in self._writes}
        assert {sid for sid, segment in live.items() if not segment.ready} <= set(pending)
        charged = {**pending, **live}
        used = sum(segment.file_bytes for segment in charged.values())
        assert self._used_bytes == used
        self._readers.check_integrity(live)
        if not self._writes and not self._reorderer.pending:
            indexed = self._worker.submit(self._catalog.indexed).result()
            # A row too many is a file that could not be removed, which was logged.
            assert all(indexed.get(sid) == segment.file_bytes for sid, segment in live.items())

    def close(self) -> None:
        """Finish writes, keep access times, close files and release the lock; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._end_measuring(wait=True)
            self.drain()
            self._reorderer.close()
            if (outcome := self._reorderer.take_finished(wait=True)) is not None:
                self._settle(outcome)
            accesses = [(s.segment_id, s.last_access, s.hits) for s in self.tree.segments()]
            self._worker.submit(self._catalog.record_accesses, accesses).result()
        except sqlite3.Error as error:
            logger.warning("access times are not kept for the next start: %s", error)
        finally:
            self._worker.shutdown(wait=True)
            self._reader.close()
            self._pool.close()
            self.cache.close()
            self._catalog.close()
            os.close(self._lock)

    def _end_measuring(self, *, wait: bool = False) -> None:
        if self._measuring is not None and (wait or not self._measuring.is_reading):
            self.close_source(self._measuring)
            self._measuring = None

    def _recover(self) -> tuple[StoredTree, int]:
        segments = [
            StoredSegment(e.info, e.file_bytes, last_access=e.last_access, hits=e.hits)
            for e in self._catalog.recover(self._identity)
        ]
        latest = max((segment.last_access for segment in segments), default=0)
        tree = StoredTree(first_time=latest + 1)
        for lost in restore_segments(tree, segments):
            logger.warning("segment %s has lost the prefix it builds on; removed", lost.segment_id)
            self._delete(lost.segment_id)
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
        self._delete(segment.segment_id)
        if isinstance(error, WriteAbandoned):
            self.stats.segments_abandoned += 1
        elif error is not None:
            self.stats.segments_failed += 1
            logger.warning(
                "a prefix of %d tokens could not be stored: %s", segment.info.num_tokens, error
            )
        if alive:
            self.tree.remove_subtree(segment)

    def _settle(self, outcome: Outcome) -> None:
        """Draw the consequences of a rewrite for quota and files."""
        segment = outcome.segment
        if outcome.taken_over:
            self._used_bytes += segment.file_bytes - outcome.old_bytes
            self.stats.bytes_written += segment.file_bytes
            entry = CatalogEntry(
                segment.info, segment.file_bytes, segment.last_access, segment.hits
            )
            self._delete(outcome.old_id, successor=entry)
        if outcome.discard is not None:
            self._delete(outcome.discard)
        if outcome.unreadable:
            self.drop(outcome.old_id)

    def _has_room(self, num_bytes: int) -> bool:
        """Whether a file fits without evicting anything."""
        return self._missing_bytes(num_bytes) <= 0

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
        reserved = self._reorderer.reserved_bytes
        used = self._used_bytes + reserved + self._others.used_bytes
        pending = reserved + sum(write.segment.file_bytes for write in self._writes)
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
            and not self._readers.is_read(segment.segment_id)
            and segment.segment_id not in kept
        ]

    def _remove(self, segment: StoredSegment) -> None:
        for gone in self.tree.remove_subtree(segment):
            # A segment that is still being written is settled when its write finishes.
            if gone.ready:
                self._used_bytes -= gone.file_bytes
                self._delete(gone.segment_id)
            self._readers.retire(gone.segment_id)

    def _delete(self, segment_id: str, successor: CatalogEntry | None = None) -> None:
        """Remove a file, on the writing thread; readers that have it open go on reading it."""
        path = segment_path(self._directory, segment_id)

        def delete() -> None:
            try:
                path.unlink(missing_ok=True)
                if successor is None:
                    self._catalog.remove(segment_id)
                else:
                    self._catalog.replace(segment_id, successor)
            except (OSError, sqlite3.Error) as error:
                # The next start compares files and index again.
                logger.warning("segment %s could not be removed: %s", segment_id, error)

        self._worker.submit(delete)


def _nothing() -> None:
    """What is left to do when an abandoned write is over."""
