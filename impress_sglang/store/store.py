"""The store of prefixes: matches them, opens them for readers, takes new ones.

Thread: scheduler. Tree, quota, readers and caches change only there. Disk access happens on other
threads, whose results `poll` collects. So a request never waits for a write, no lock is needed, and
a failure of the disk only degrades the store (`Health`), which then matches and accepts nothing,
and recovers by itself.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ConfigError, PrefixUnreadable, StoreUnavailable
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.disk import ProbeResult, StoreDisk
from impress_sglang.store.health import DiskTask, Suspect, Verdict
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.miss_log import MissCause
from impress_sglang.store.orders import Purge
from impress_sglang.store.peers import PeerEvent
from impress_sglang.store.quota import Quota, WriteBudget
from impress_sglang.store.segment_readers import SegmentReaders
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSegment
from impress_sglang.store.writing import SegmentWrites
from impress_sglang.tiers.placement import CACHES
from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.codecs import Codec
from impress_sglang.transfer.sources import StoredSource

logger = logging.getLogger(__name__)

# Maximum number of segments that expire in one poll.
MAX_EXPIRED = 64
# Maximum number of segments, and of chunks, that one step checks.
CHECKED_SEGMENTS = 8
# Seconds for which a segment of another server is not used after it could not be read.
RETRY_SECONDS = 60.0
CHECKED_CHUNKS = 1024


class PrefixStore:
    """Stored prefixes of one model on one SSD directory, and their chunk caches."""

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
        codec: Codec | None = None,
    ) -> None:
        """Open the store, or take over parts of it that another thread has opened.

        Args:
            config: options of the server.
            identity: model identity.
            shape: shape of the model's KVs.
            device: device where attention runs; None for the CPU.
            files: file system to use; None for the installed one.
            disk: disk opened for the same identity; the caller still owns it if this raises.
            memory: emptied memory for the same configuration and shape; None to allocate it.
            lookahead: tokens that requests wait for; None for a new object.
            budget: write budget of the server; None for a new one.
            codec: codec of the KVs; None if the shape has no codes.

        Raises:
            ConfigError: the directory cannot be used, or the caches do not fit in memory.
            StoreInUseError: another process serves the same model from it.
        """
        self._config, self._shape = config, shape
        self._disk = disk or StoreDisk(config, identity, files)
        self.worker, self.health = self._disk.worker, self._disk.health
        self.tree, self.pins = self._disk.tree, self._disk.pins
        self.unattached = self._disk.unattached
        self.namespace, self.segment_path = self._disk.namespace, self._disk.directory.segment_path
        self._memory = memory or StoreMemory.allocate(config, shape, device or torch.device("cpu"))
        self.cache = self._memory.cache
        files, patience = self._disk.files, config.io_timeout
        self._reader = BlockReader(
            config.io_depth, files, engine=config.io_engine, patience=patience
        )
        self.ahead = ReadAhead(self._memory.buffers, enabled=config.readahead > 0)
        lookahead = lookahead or LookAhead()
        parts = self._memory, self._disk, self._reader, lookahead
        self.readers = SegmentReaders(config, shape, *parts)
        self._closed = False
        self._tasks: list[tuple[DiskTask | Suspect, Future[Any]]] = []
        # Purges ordered by other servers.
        self._orders: list[Purge] = []
        budget = budget or WriteBudget(config.write_gb_per_day)
        self.quota = Quota(config, self._disk, self.readers, lookahead, budget)
        self.writes = SegmentWrites(
            config, identity, shape, self._disk, self.quota, self.readers, codec
        )
        self.stats, self.miss_log = self.writes.stats, self.writes.miss_log

    def match(self, namespace: str, tokens: Tokens, *, min_quality: Quality = EXACT) -> StoredMatch:
        """Return the longest published prefix of `tokens` of at least `min_quality`."""
        self._poll()
        if not self.health.readable:
            return StoredMatch()
        return self.tree.match(self.namespace(namespace), tokens, min_quality=min_quality)

    def close_source(self, source: StoredSource) -> None:
        """Close a source and count its reads; its segments may be removed again."""
        self.readers.close_source(source)
        self.ahead.remove(source)
        self.stats.bytes_read += source.stats.ssd_bytes
        self.stats.bytes_read_ahead += source.stats.ahead_bytes
        self.stats.bytes_read_ahead_used += source.stats.ahead_used_bytes

    def poll(self) -> None:
        """Collect the results of other threads, and start due work; never waits.

        Everything that depends on a clock, the disk or a thread changes the tree only here.
        """
        if not self._closed:
            # Not in `match`: many requests may arrive between two passes.
            self.readers.update_expected()
        self._poll()

    def _poll(self) -> None:
        if not self._closed:
            self._collect()
            self._start_due()

    def _collect(self) -> None:
        bucket = self._disk.bucket
        self.readers.release_closed()
        self.writes.poll()
        self.quota.collect_removals()
        self.expire(time.time())
        for event in self._disk.peers.take():
            self._take_event(event)
        self.unattached.retry()
        # Not before orders to purge, which may concern only the duplicate that stays.
        for duplicate, replacement in () if self._orders else self.unattached.take_duplicates():
            # With a bucket, each server stores its own copy, to read it from its drive.
            if bucket is None and not self.quota.is_needed(duplicate):
                self.writes.discard([duplicate], MissCause.EVICTED)
                self.unattached.forget(replacement.segment_id)
                self.unattached.add(replacement)
        self._disk.remove_unattached(self.unattached.to_remove)
        self.unattached.to_remove.clear()
        if self._orders:
            self._orders[0].apply_locally(self)
            if not self._orders[0].unfinished:
                del self._orders[0]
        elif bucket is not None:
            bucket.upload_backlog(self._disk.place)
        ended = [task for task in self._tasks if task[1].done()]
        self._tasks = [task for task in self._tasks if task not in ended]
        for task, future in ended:
            if task is DiskTask.MEASURE:
                self.health.on_measured(future.exception() or future.result())
            elif task is DiskTask.PROBE:
                self._take_probe_result(future.result())
            else:
                # A look that failed for another reason is no verdict on the segment.
                self._take_verdict(task, Verdict.UNCLEAR if future.exception() else future.result())

    def _take_event(self, event: PeerEvent) -> None:
        if (added := event.added) is not None:
            bucket = self._disk.bucket if event.from_bucket else None
            # Stored by this or another server, under any id.
            is_known = bucket is not None and (
                added.segment_id in self.tree or bucket.has_local(added)
            )
            self.unattached.add(added, is_known=is_known)
        elif event.gone:
            self.unattached.forget(event.gone)
            segment = self.tree.get(event.gone)
            is_foreign = segment is not None and segment.foreign_dir is not None
            if (
                segment is not None
                and is_foreign
                and self._disk.only_in_bucket(segment) == event.from_bucket
            ):
                self.writes.lose(segment, MissCause.EVICTED)
        elif event.want:
            self.writes.discard(self.quota.choose_for_peer(event.want), MissCause.EVICTED)
        elif event.purge is not None:
            try:
                self._orders.append(Purge.from_peer(event.purge))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                logger.warning("an order of another server is of another version: %s", error)

    def _start_due(self) -> None:
        # After results were taken: a result that came long ago is not late.
        self._tasks += [(task, self._disk.begin(task)) for task in self.health.due()]
        if self.health.writable:
            self._disk.record_recent_uses()

    def expire(self, now: float, max_segments: int = MAX_EXPIRED) -> None:
        """Remove at most `max_segments` segments that have expired at `now`, of `time.time`."""
        expired = self.tree.order.take_expired(now, max_segments)
        # Dependents first, so that a killed process leaves no segment without its parent.
        expired.sort(key=lambda segment: -segment.info.prefix_len)
        self.writes.discard(expired, MissCause.EXPIRED)

    def send_order(self, order: Mapping[str, Any]) -> None:
        self.worker.submit(self.worker.record, {"purge": order})
        if self._disk.bucket is not None:
            self._disk.bucket.send_order(order)

    def report(self, error: PrefixUnreadable) -> None:
        """Report an unreadable segment, which is not used until a second look finds it good."""
        segment = self.tree.get(error.segment_id)
        if segment is not None and segment.foreign_dir is not None:
            # Its server looks itself; the disk of this server need not be at fault.
            logger.warning("%s; another server has it", error)
            if isinstance(error, StoreUnavailable):
                self.unattached.postpone(segment.detached_copy(), RETRY_SECONDS)
            else:
                self.unattached.ban(segment.segment_id)
            self.writes.lose(segment, MissCause.DAMAGED)
            return
        if isinstance(error, StoreUnavailable):
            self.health.report_failure("a prefix could not be read", error, reading=True)
        if segment is not None and segment.ready:
            logger.warning("%s; a second look will decide", error)
            self.stats.segments_unreadable += 1
            self.health.suspect(segment)

    def summary(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.stats),
            "directory": str(self._disk.directory.path),
            "segments": len(self.tree),
            "other_servers": len(self._disk.peers.folders),
            **({} if self._disk.bucket is None else {"bucket": self._disk.bucket.summary()}),
            "writes_pending": len(self.writes),
            "health": self.health.summary(),
            "segments_suspect": len(self.health.suspects),
            **self.quota.summary(),
            "direct_io": self._disk.direct,
            **self._reader.summary(),
            "buffer_bytes": self._memory.buffers.limit_bytes,
            "buffer_used_bytes": self._memory.buffers.used_bytes,
        }

    def check_steps(self) -> Iterator[None]:
        """Check the store's invariants step by step; it may change between two steps."""
        segments = list(self.tree.segments())
        for first in range(0, len(segments), CHECKED_SEGMENTS):
            checked = segments[first : first + CHECKED_SEGMENTS]
            self._check(
                [segment for segment in checked if self.tree.get(segment.segment_id) is segment]
            )
            yield
        for tier in CACHES:
            first = 0
            while self.cache.placement.check_members(tier, first, CHECKED_CHUNKS):
                first += CHECKED_CHUNKS
                yield

    def _check(self, segments: Sequence[StoredSegment]) -> None:
        """Check some segments of the tree, and sums, against other parts of the store."""
        pending = set(self.writes)
        assert self.quota.pending_bytes == sum(write.file_bytes for write in pending)
        assert self.tree.file_bytes == sum(self.tree.bytes_by_namespace.values())
        for segment in segments:
            self.tree.check(segment)
            self.readers.check(segment.segment_id)
            state = segment.state
            assert (state is SegmentState.PENDING) == (segment in pending)
            assert (state is SegmentState.SUSPECT) == (segment in self.health.suspects)

    def close(self) -> None:
        """Finish writes, record access times, close files and release the lock; idempotent.

        Work that does not end within `--impress-io-timeout` is left running.
        """
        if not self._closed:
            memory = self.retire()
            self.leave_disk()
            memory.close()

    def retire(self) -> StoreMemory:
        """Do the first half of `close`; the caller owns the returned memory.

        If all writes were abandoned, `leave_disk` may run on another thread.
        """
        self._closed = True
        return self._memory

    def leave_disk(self) -> None:
        """Do the second half of `close`, which may wait for the disk."""
        seconds = self._config.io_timeout
        try:
            self.writes.drain()
            self.readers.close(seconds)
            self._reader.close()
        finally:
            self._disk.close()

    def _take_verdict(self, suspect: Suspect, verdict: Verdict) -> None:
        if not self.health.on_looked(suspect, verdict):
            return
        self.stats.segments_cleared += verdict is Verdict.GOOD
        self.stats.segments_quarantined += verdict is Verdict.BAD
        self.stats.segments_gone += verdict is Verdict.GONE
        if verdict is not Verdict.GOOD:
            self.writes.lose(suspect.segment, MissCause.DAMAGED)

    def _take_probe_result(self, answer: ProbeResult) -> None:
        """Take the result of a probe: resume reading, and suspect segments without a file."""
        segment_ids, error = answer
        if segment_ids is not None and not self.health.readable:
            try:
                self._reader.revive()
            except (ConfigError, OSError) as failure:
                segment_ids, error = None, failure
            else:
                # Only suspects, because they may have been written after the probe.
                for segment in self.tree.without(segment_ids):
                    if segment.ready and segment.foreign_dir is None:
                        self.health.suspect(segment)
        # Before `retry_refused`, which may fail again.
        self.health.on_probed(error, readable=segment_ids is not None)
        if error is None:
            self.worker.submit(self.worker.retry_refused)
