"""The store of prefixes: finds them, hands them to readers, takes new ones.

One thread (the scheduler's) owns the store: tree, quota, readers and caches change only there.
Disk access happens on other threads, whose results `poll` collects. So a request never waits for a
write, no lock is needed, and a failure of the disk goes no further than this: the store is degraded
(`Health`), finds and accepts nothing, and recovers by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import (
    ConfigError,
    PrefixUnreadable,
    SegmentUnreadable,
    StoreUnavailable,
)
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.checking import StoreChecks
from impress_sglang.store.disk import Answer, StoreDisk
from impress_sglang.store.forecast import ReadForecast
from impress_sglang.store.health import Verdict, Work
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.losses import Cause, Losses
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.open_segments import AnySource, OpenSegments
from impress_sglang.store.policies import make_policy
from impress_sglang.store.quota import Quota, WriteBudget
from impress_sglang.store.reordering import ReorderQueue, Rewrite
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSegment, StoredSpan
from impress_sglang.store.versions import SegmentVersions, certain_columns
from impress_sglang.store.writing import SegmentWrites, StoreStats
from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.kv_codec import KVCodec
from impress_sglang.transfer.source import ReadNeeds, SegmentSource

logger = logging.getLogger(__name__)

# The most that expire in one poll.
MOST_EXPIRED = 64


class PrefixStore:
    """Stored prefixes of one model on one SSD directory, with the chunk caches above it."""

    def __init__(
        self,
        config: ImpressConfig,
        identity: str,
        shape: KVShape,
        device: torch.device | None = None,
        files: FileSystem | None = None,
        *,
        disk: StoreDisk | None = None,
        memory: StoreMemory | None = None,
        lookahead: LookAhead | None = None,
        budget: WriteBudget | None = None,
        codec: KVCodec | None = None,
    ) -> None:
        """Open the store, or take over the parts of it that another thread has opened.

        Args:
            config: options of the server.
            identity: model identity.
            shape: shape of the model's KVs.
            device: where attention runs; the CPU if not given.
            files: file system to use; None for the installed one.
            disk: opened with the same configuration and identity, so that nothing here waits for
                the disk. The caller still owns it if this raises.
            memory: for the same configuration and shape, emptied; None to allocate it.
            lookahead: knows what requests wait for, which is evicted last; None: no request waits.
            budget: limits the bytes written to the drive; None for a new one.
            codec: codes KVs, if the shape names a basis; else only what has codes can be stored.

        Raises:
            ConfigError: the directory cannot be used, or the caches do not fit in memory.
            StoreInUseError: another process serves the same model from it.
        """
        self._config = config
        self._shape = shape
        self._disk = disk or StoreDisk(config, identity, files)
        self.worker, self.health = self._disk.worker, self._disk.health
        self.tree, self.pins = self._disk.tree, self._disk.pins
        self.namespace = self._disk.namespace
        patience = config.io_timeout
        self._memory = memory or StoreMemory.allocate(config, shape, device or torch.device("cpu"))
        self.cache = self._memory.cache
        self._reader = BlockReader(
            config.io_depth, self._disk.files, engine=config.io_engine, patience=patience
        )
        self.ahead = ReadAhead(self._memory.pool, config.readahead)
        self.versions = SegmentVersions(
            shape,
            self.cache,
            self._memory.codes,
            retention=config.part_retention,
            certain=certain_columns(shape, whole=config.usual_retention >= 1.0),
            by_importance=config.reorder_key == "importance",
        )
        self.forecast = ReadForecast(
            shape,
            self._reader,
            self.versions,
            self._memory,
            self._disk.meter,
            retention=config.part_retention,
        )
        self._readers = OpenSegments(
            self._disk,
            shape,
            self._reader,
            self.versions,
            self._memory,
            learns=self.ahead.enabled,
            patience=patience,
        )
        self._lookahead = lookahead or LookAhead()
        self._lookahead.tell_to(self.versions.expect)
        self._closed = False
        self._measuring: AnySource | None = None
        self.stats = StoreStats()
        self.losses = Losses()
        self.reorders = ReorderQueue(
            self._disk,
            self._readers,
            self.versions,
            config.reorder_interval,
            enabled=make_policy(config).reorders,
            patience=patience,
        )
        self._quota = Quota(
            config,
            self._disk,
            self._evict,
            self._is_needed,
            lambda: self.reorders.reserved_bytes,
            budget or WriteBudget(config.write_gb_per_day),
        )
        self.writes = SegmentWrites(
            config,
            identity,
            shape,
            self._disk,
            self._quota,
            self.stats,
            self.losses,
            self._evict,
            codec,
        )
        self.checks = StoreChecks(self._disk, self.writes, self._quota, self.versions, self._memory)

    def match(self, namespace: str, tokens: Tokens, *, least: Quality = EXACT) -> StoredMatch:
        """The longest published prefix of `tokens` in a quality of at least `least`."""
        self.poll()
        if not self.health.readable:
            return StoredMatch()
        return self.tree.match(self.namespace(namespace), tokens, least=least)

    def open_source(
        self,
        match: StoredMatch,
        start: int,
        stop: int,
        needs: ReadNeeds,
    ) -> SegmentSource:
        """Open a source for the tokens [start, stop) of a match; `close_source` closes it.

        `needs` says what the request will read from it.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened; the caller should `report` it.
        """
        with self._opening(match.spans):
            self.tree.touch(match)
            return self._readers.open_source(match.slice(start, stop), needs)

    def open_whole(self, spans: Sequence[StoredSpan], planes: int | None) -> AnySource:
        """Open a source for all of some spans, which `tree.touch` has counted as used.

        `planes`: how many are wanted of codes, besides the floors of heads; None: exact KVs. May be
        called on another thread, which then reads the source and gives it back with `close_source`.

        Raises:
            PrefixUnreadable: as for `open_source`.
        """
        with self._opening(spans):
            if planes is not None:
                return self._readers.open_coded(spans, planes)
            return self._readers.open_source(spans, ReadNeeds(whole=True))

    @contextlib.contextmanager
    def _opening(self, spans: Sequence[StoredSpan]) -> Iterator[None]:
        """Check that spans are there, and retire versions of those that another thread removes.

        Also if none can be opened.
        """
        for segment in (span.segment for span in spans):
            if self.tree.get(segment.segment_id) is not segment or not segment.ready:
                raise SegmentUnreadable(segment.segment_id, "was removed after it was matched")
            if not self.health.readable:
                raise StoreUnavailable(segment.segment_id, "the store is degraded")
        try:
            yield
        finally:
            for segment in {span.segment for span in spans}:
                if self.tree.get(segment.segment_id) is not segment:
                    self.versions.retire(segment.segment_id)

    def measure_reading(self, match: StoredMatch) -> None:
        """Read a little of a match in the background, only to measure how fast reads are now.

        Otherwise a prefix that is not loaded because reads were slow would never be loaded again.
        """
        if self._measuring is not None:
            return
        try:
            if self._shape.exact:
                needs = ReadNeeds(whole=True, probe=False)
                source: AnySource = self.open_source(match, 0, match.num_tokens, needs)
            else:
                source = self.open_whole(match.spans, 0)
        except PrefixUnreadable as error:
            self.report(error)
            return
        if self._memory.pool.has_room(source.layer_bytes):
            source.read_ahead(0.0)
        self._measuring = source

    def close_source(self, source: AnySource) -> None:
        """Close a source: count what it has read, and allow its segments to be removed again."""
        self._readers.close_source(source)
        self.reorders.note_read(source.segment_ids)
        self.ahead.leave(source)
        self.stats.bytes_read += source.stats.ssd_bytes
        self.stats.bytes_read_ahead += source.stats.ahead_bytes
        self.stats.bytes_read_ahead_used += source.stats.ahead_used_bytes

    def poll(self) -> None:
        """Collect the results of other threads, and start work that is due; never waits."""
        if self._closed:
            return
        self._end_measuring()
        self._lookahead.tell()
        self._readers.settle()
        self.writes.poll()
        self._quota.poll()
        self.expire(time.time())
        for task, future in self._disk.poll():
            if task.work is Work.MEASURE:
                self.health.measured(future.exception() or future.result())
            elif task.info is None:
                self._take_answer(future.result())
            else:
                # A look that failed for another reason says nothing about the segment.
                verdict = Verdict.UNCLEAR if future.exception() else future.result()
                self._judge(task.info.segment_id, verdict)
        self._disk.begin_due()
        if (outcome := self.reorders.take_finished()) is not None:
            self._settle(outcome)
        if not self.health.writable:
            return
        self._disk.note_uses(self.tree.order)
        gap_bytes, removing_bytes = self._reader.cost.gap_bytes, self.worker.removing_bytes
        try:
            self.reorders.poll(gap_bytes, self._quota.has_room, removing_bytes)
        except PrefixUnreadable as error:
            self.report(error)

    def expire(self, now: float) -> None:
        """Remove some segments that have expired; `now` is a time of `time.time`."""
        if due := self.tree.order.take_due(now, MOST_EXPIRED):
            due.sort(key=lambda own: -own.info.prefix_len)
            self.writes.discard(due, Cause.EXPIRED)

    def report(self, error: PrefixUnreadable) -> None:
        """Report an unreadable segment: it is not used until a second look has found it good."""
        if isinstance(error, StoreUnavailable):
            self.health.failed("a prefix could not be read", error, reading=True)
        segment = self.tree.get(error.segment_id)
        if segment is not None and segment.ready:
            logger.warning("%s; a second look will decide", error)
            self.stats.segments_unreadable += 1
            self.health.suspect(segment)

    def summary(self) -> dict[str, Any]:
        """Counters and sizes for the statistics page."""
        return {
            **dataclasses.asdict(self.stats),
            "directory": str(self._disk.directory.path),
            "segments": len(self.tree),
            "writes_pending": len(self.writes),
            "health": self.health.summary(),
            "segments_suspect": len(self.health.suspects),
            **self._quota.summary(),
            "direct_io": self._disk.direct,
            **self._reader.summary(),
            "buffer_bytes": self._memory.pool.limit_bytes,
            "buffer_used_bytes": self._memory.pool.used_bytes,
        }

    def cache_summary(self) -> dict[str, object]:
        """Sizes and counters of the cache that has memory."""
        return self._memory.cache_summary()

    def check_integrity(self) -> None:
        """Compare tree, quota, readers and caches with each other.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        if not self._closed:
            self.checks.check_integrity()

    def close(self) -> None:
        """Finish writes, record access times, close files and release the lock; idempotent.

        Work that does not end within `--impress-io-timeout` is left behind.
        """
        if not self._closed:
            memory = self.retire()
            self.leave_disk()
            memory.close()

    def retire(self) -> StoreMemory:
        """Do the first half of `close`, which runs on the store's thread and waits for nothing.

        After it, the store reads and accepts nothing, and the caller owns the memory. If all writes
        were abandoned, so that nobody depends on their end, `leave_disk` may run on another thread.
        """
        self._closed = True
        # The next store that gets the memory has other chunks in it.
        self._lookahead.tell_to(list)
        self._end_measuring(wait=True)
        return self._memory

    def leave_disk(self) -> None:
        """Do the second half of `close`, which may wait for the disk."""
        seconds = self._config.io_timeout
        try:
            self.writes.drain()
            self.reorders.close(seconds)
            if (outcome := self.reorders.take_finished()) is not None:
                self._settle(outcome)
            self._readers.close(seconds)
            self._reader.close()
        finally:
            self._disk.close(self.tree.order.take_changed(len(self.tree)))

    def _end_measuring(self, *, wait: bool = False) -> None:
        """Close the source of a measurement if that has ended; with `wait`, in any case."""
        if self._measuring is not None and (wait or not self._measuring.is_reading):
            self.close_source(self._measuring)
            self._measuring = None

    def _settle(self, outcome: Rewrite) -> None:
        """Update quota, files and index after a rewrite."""
        segment = outcome.stored
        if outcome.taken_over:
            if not self._closed:
                # Otherwise this may be another thread, and the look-ahead is another store's.
                self._lookahead.succeed(outcome.old_id, segment.segment_id)
            self._quota.replace(segment, outcome.old_bytes)
            self.stats.bytes_written += segment.file_bytes
            # The old version was read to the end, so what was written from it is verified.
            self.health.suspects.pop(outcome.old_id, None)
            segment.state = SegmentState.READY
            self.worker.replace(outcome.old_id, outcome.old_bytes, segment.row)
        if outcome.useless:
            self.worker.delete({outcome.info.segment_id: outcome.new_bytes})
        if isinstance(outcome.error, PrefixUnreadable):
            self.report(outcome.error)
        elif isinstance(outcome.error, OSError):
            self.health.failed("a segment could not be reordered", outcome.error, reading=False)

    def _is_needed(self, segment_id: str) -> bool:
        version = self.versions.get(segment_id)
        is_read = version is not None and version.readers > 0
        return is_read or segment_id in self._lookahead or segment_id in self.pins

    def _evict(self, segments: Sequence[StoredSegment], cause: Cause) -> None:
        """Remove segments and their files, each before the segment that it builds on."""
        self.stats.count_removed(len(segments), cause)
        for segment in segments:
            self._lose(segment, cause)
        # In one job, because with each job the other thread can take the GIL from this one.
        self.worker.delete({own.segment_id: own.file_bytes for own in segments})

    def _lose(self, segment: StoredSegment, cause: Cause) -> None:
        """Mark a segment as lost; it stays in the tree as long as others build on it."""
        self.losses.note(segment, cause)
        self._quota.remove(segment)
        self.health.suspects.pop(segment.segment_id, None)
        self.reorders.forget(segment)
        self.tree.lose(segment)
        # Behind that: see `_opening`.
        self.versions.retire(segment.segment_id)

    def _judge(self, segment_id: str, verdict: Verdict) -> None:
        """Act on the verdict of a second look."""
        if (segment := self.health.looked(segment_id, verdict)) is None:
            return
        self.stats.segments_cleared += verdict is Verdict.GOOD
        self.stats.segments_quarantined += verdict is Verdict.BAD
        self.stats.segments_gone += verdict is Verdict.GONE
        if verdict is not Verdict.GOOD:
            self._lose(segment, Cause.DAMAGED)

    def _take_answer(self, answer: Answer) -> None:
        """Take the answer to a probe of a failed disk: go on with the segments on it now."""
        found, error = answer.segments, answer.error
        if found is not None and not self.health.readable:
            try:
                self._reader.revive()
            except (ConfigError, OSError) as failure:
                found, error = None, failure
            else:
                # A segment that the answer lacks may have been written after the probe.
                for segment in self.tree.segments():
                    if segment.ready and segment.segment_id not in found:
                        self.health.suspect(segment)
        # This comes before `catch_up`, which may fail again.
        self.health.probed(error, readable=found is not None)
        if error is None:
            self.worker.submit(self.worker.catch_up)
