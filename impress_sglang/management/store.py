"""The store of prefixes: finds them, hands them to readers, takes new ones.

One thread (the scheduler's) owns the store: tree, quota, readers and caches change only there.
Other threads touch the disk; their results are taken in by `poll`. So a request never waits for a
write, no lock is needed, and what a disk does wrong ends here: where it fails the store is degraded
(`Health`), finds and takes nothing, and comes back by itself.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import logging
import sqlite3
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import (
    ChunkUnreadable,
    ConfigError,
    PrefixUnreadable,
    StoreUnavailable,
)
from impress_sglang.management.estimate import StoredBytes
from impress_sglang.management.keeper import Keeper, Verdict
from impress_sglang.management.looks import SecondLooks
from impress_sglang.management.monitor import Monitor
from impress_sglang.management.policies import make_policy
from impress_sglang.management.quota import Quota
from impress_sglang.management.readers import SegmentReaders
from impress_sglang.management.reordering import Outcome, Reorderer
from impress_sglang.management.rewriting import Rewriter
from impress_sglang.management.tree import (
    SegmentState,
    StoredMatch,
    StoredSegment,
    StoredTree,
    prefix_digest,
    restore_segments,
)
from impress_sglang.storage.catalog import CatalogEntry
from impress_sglang.storage.directory import StoreDirectory, other_stores
from impress_sglang.storage.files import FileSystem, installed
from impress_sglang.storage.health import Health
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.reader import ChunkReader
from impress_sglang.storage.segment import SegmentInfo, Tokens
from impress_sglang.storage.writer import LayerReader, WriteAbandoned
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.timeline import NO_TIMELINE, Timeline
from impress_sglang.transfer.ahead import ReadAhead
from impress_sglang.transfer.area import AreaPool
from impress_sglang.transfer.source import Demand, SegmentSource

logger = logging.getLogger(__name__)

# Who waits for writes looks so often whether they still make progress.
LOOK_SECONDS = 0.25

# Names of namespaces that are kept; finding one anew costs a microsecond.
_NAMESPACES = 4096


class StoreOutcome(enum.Enum):
    """What became of an offer to store a prefix."""

    ACCEPTED = "accepted"
    KNOWN = "known"
    UNREACHABLE = "unreachable"
    NO_SPACE = "no_space"
    UNAVAILABLE = "unavailable"
    """The disk does not take anything now."""


@dataclasses.dataclass(slots=True)
class StoreStats:
    """Counters since start; sizes in bytes."""

    segments_written: int = 0
    segments_failed: int = 0
    segments_abandoned: int = 0
    segments_evicted: int = 0
    segments_unreadable: int = 0
    segments_cleared: int = 0
    """Of the unreadable ones, those that a second look has found good."""
    segments_quarantined: int = 0
    segments_gone: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    bytes_read_ahead: int = 0
    bytes_read_ahead_used: int = 0
    offers_without_space: int = 0
    offers_while_unavailable: int = 0


@dataclasses.dataclass(slots=True)
class _Write:
    """`info` and `num_bytes` are of the file, which may be for a segment that was lost."""

    segment: StoredSegment
    info: SegmentInfo
    num_bytes: int
    future: Future[None]
    on_done: Callable[[], None]
    abandon: Callable[[], None]
    abandoned: bool = False


class PrefixStore:
    """Stored prefixes of one model on one SSD directory, with the chunk caches above it."""

    def __init__(
        self,
        config: ImpressConfig,
        identity: str,
        shape: KVShape,
        device: torch.device | None = None,
        files: FileSystem | None = None,
    ) -> None:
        """Open the store, and find what an earlier process left in it.

        Args:
            config: of the server.
            identity: names the model.
            shape: of its KVs.
            device: where attention runs, the CPU if not given.
            files: how the disk is touched; None for what is installed.

        Raises:
            ConfigError: the directory cannot be used, or the caches do not fit in memory.
            StoreInUseError: another process serves the same model from it.
        """
        self._config = config
        self._identity = identity
        self._shape = shape
        files = files or installed()
        self._directory = StoreDirectory(files, config.ssd_path, identity)
        self.namespace = functools.lru_cache(_NAMESPACES)(self._directory.namespace)
        self.health = Health()
        self._direct = files.supports_direct_io(self._directory.path)
        policy = make_policy(config)
        self.cache = ChunkCache(
            shape,
            config.chunk_tokens,
            policy.replacement_rule(),
            device=device or torch.device("cpu"),
            device_bytes=config.device_bytes if policy.stores else 0,
            host_bytes=config.host_bytes - config.buffer_bytes if policy.stores else 0,
        )
        patience = config.io_timeout
        self._reader = ChunkReader(
            config.io_depth, files, engine=config.io_engine, patience=patience
        )
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
            patience=patience,
        )
        self._reorders = policy.reorders
        self._next_reorder = time.monotonic() + config.reorder_interval
        self._writes: collections.deque[_Write] = collections.deque()
        self._closed = False
        self._measuring: SegmentSource | None = None
        self.stats = StoreStats()
        self._keeper = Keeper(self._directory, self.health, direct=self._direct)
        self._looks = SecondLooks(self._keeper)
        try:
            self._monitor = Monitor(self._directory, self.health, patience)
            self.tree = self._recover()
            others = other_stores(files, self._directory.path)
        except (OSError, sqlite3.Error) as error:
            self._directory.close()
            raise ConfigError(
                f"--impress-ssd-dir {config.ssd_path} cannot be read: {error}"
            ) from error
        rewriter = Rewriter(self._directory, direct=self._direct, patience=patience)
        self._reorderer = Reorderer(self.tree, self._readers, rewriter)
        self._quota = Quota(
            config,
            self.tree,
            self._keeper,
            self._monitor,
            others,
            self._readers.is_read,
            lambda: self._reorderer.reserved_bytes,
        )

    @property
    def is_writing(self) -> bool:
        """Whether accepted writes have not been taken in yet."""
        return bool(self._writes)

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
        demand: Demand,
        timeline: Timeline = NO_TIMELINE,
    ) -> SegmentSource:
        """A source for the tokens [start, stop) of a match; `close_source` gives it back.

        `demand` says what will be asked of it.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened; the caller should `report` it.
        """
        for span in match.spans:
            segment = span.segment
            if self.tree.get(segment.segment_id) is not segment or not segment.ready:
                raise ChunkUnreadable(segment.segment_id, "was removed after it was matched")
            if not self.health.readable:
                raise StoreUnavailable(segment.segment_id, "the store is degraded")
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
        except PrefixUnreadable as error:
            self.report(error)
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
        abandon: Callable[[], None],
        *,
        available_from: int = 0,
        quality: Quality = EXACT,
        min_tokens: int,
    ) -> StoreOutcome:
        """Store what is new of a prefix, in the background.

        Args:
            namespace: keeps requests with other `extra_key` or `cache_salt` apart.
            tokens: all tokens from the start of the sequence.
            read_layers: given the number of leading tokens that are stored already, returns the
                reader of the KVs of the others. It is only called if the offer is accepted.
            on_done: called when the KVs are no longer needed, written or not.
            abandon: called if the KVs are wanted back before that: from then on the reader must
                raise `WriteAbandoned`.
            available_from: the reader has no KVs of earlier tokens; those must be stored.
            quality: of the new KVs.
            min_tokens: a shorter rest is not worth a file.
        """
        if not self.health.writable:
            self.stats.offers_while_unavailable += 1
            return StoreOutcome.UNAVAILABLE
        name = self.namespace(namespace)
        known = self.tree.match(name, tokens, least=quality, only_ready=False)
        lost = next((s for s in known.spans if s.segment.state is SegmentState.LOST), None)
        if lost is not None:
            if not quality.suffices(lost.segment.info.quality):
                return StoreOutcome.UNREACHABLE
            return self._refill(known, lost.segment, read_layers, on_done, abandon, available_from)
        if len(tokens) - known.num_tokens < min_tokens:
            return StoreOutcome.KNOWN
        if known.num_tokens < available_from:
            return StoreOutcome.UNREACHABLE
        info = self._describe(name, tokens, known.num_tokens, quality)
        if not self._quota.make_room(info.layout().file_bytes, known, self._evict):
            shorter = self._shortened(known, available_from)
            info = self._describe(name, tokens, shorter.num_tokens, quality)
            if not self._replaces(known, shorter, info, tokens):
                self.stats.offers_without_space += 1
                return StoreOutcome.NO_SPACE
        segment = StoredSegment(info, info.layout().file_bytes, SegmentState.PENDING)
        attached = self.tree.insert(segment, tokens[: info.prefix_len])
        assert attached, "the matched prefix is not in the tree"
        self._begin_write(segment, info, read_layers(info.prefix_len), on_done, abandon)
        return StoreOutcome.ACCEPTED

    def poll(self) -> None:
        """Take in what other threads have done, and begin what is due; never waits."""
        self._end_measuring()
        self._readers.settle()
        while self._writes and self._writes[0].future.done():
            self._finish(self._writes.popleft())
        self._quota.poll()
        if (answer := self._monitor.poll()) is not None:
            self._take_answer(answer.segments, answer.error)
        if self.health.readable:
            for segment, verdict in self._looks.poll():
                self._judge(segment, verdict)
        if (outcome := self._reorderer.take_finished()) is not None:
            self._settle(outcome)
        if self._config.reorder_interval and time.monotonic() >= self._next_reorder:
            self.reorder()
        if not self.health.writable:
            return
        try:
            self._reorderer.begin_next(self._reader.cost.gap_bytes, self._has_room)
        except PrefixUnreadable as error:
            self.report(error)

    def drain(self) -> None:
        """Wait until all accepted writes are finished, and take them in.

        Those that make no progress for `--impress-io-timeout` are abandoned.
        """
        began = time.monotonic()
        while self._writes:
            try:
                self._writes[0].future.exception(LOOK_SECONDS)
            except TimeoutError:
                idle = time.monotonic() - max(began, self._keeper.progress)
                if idle > self._config.io_timeout:
                    late = TimeoutError(f"no progress for {idle:.1f} s")
                    self.health.failed("writes do not end", late, reading=False)
                    self.abandon_writes()
                    return
                continue
            self._finish(self._writes.popleft())

    def abandon_writes(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Give accepted writes up, the latest first, until there is `enough`; nothing waits."""
        for write in reversed(self._writes):
            if enough():
                return
            if not write.abandoned:
                write.abandoned = True
                write.abandon()
                write.on_done()

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

    def reorder_summary(self) -> dict[str, int]:
        """Counters for the statistics page; `pending` are in work or wait."""
        stats = dataclasses.asdict(self._reorderer.stats)
        return {"pending": self._reorderer.pending, **stats}

    def report(self, error: PrefixUnreadable) -> None:
        """A segment could not be read: it is not used before a second look has found it good."""
        if isinstance(error, StoreUnavailable):
            self.health.failed("a prefix could not be read", error, reading=True)
        segment = self.tree.get(error.segment_id)
        if segment is not None and segment.ready:
            logger.warning("%s; a second look will decide", error)
            self.stats.segments_unreadable += 1
            self._looks.add(segment)

    def summary(self) -> dict[str, Any]:
        """Counters and sizes for the statistics page."""
        return {
            **dataclasses.asdict(self.stats),
            "directory": str(self._directory.path),
            "segments": len(self.tree),
            "writes_pending": len(self._writes),
            "health": self.health.summary(),
            "segments_suspect": len(self._looks),
            "used_bytes": self._quota.used_bytes + self._reorderer.reserved_bytes,
            "quarantined_bytes": self._keeper.quarantined_bytes,
            "other_models_bytes": self._quota.other_models_bytes,
            "quota_bytes": self._config.ssd_bytes,
            "direct_io": self._direct,
            "io_engine": self._reader.engine,
            "buffer_bytes": self._pool.limit_bytes,
            "buffer_used_bytes": self._pool.used_bytes,
            "gap_bytes": self._reader.cost.gap_bytes,
            "read_mbps": round(self._reader.cost.bytes_per_second / 1e6),
        }

    def check_integrity(self) -> None:
        """Compare tree, quota, readers and caches with each other.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        self.tree.check_integrity()
        live = {segment.segment_id: segment for segment in self.tree.segments()}
        writing = {write.segment.segment_id for write in self._writes}
        suspects = 0
        for segment_id, segment in live.items():
            assert segment.state is not SegmentState.PENDING or segment_id in writing
            assert segment.state is not SegmentState.LOST or segment.dependents
            suspects += segment.state is SegmentState.SUSPECT
        assert suspects == len(self._looks)
        pending = sum(write.num_bytes for write in self._writes)
        on_disk = sum(s.file_bytes for s in live.values() if s.on_disk)
        assert self._quota.used_bytes == pending + on_disk
        assert self._quota.pending_bytes == pending
        self._readers.check_integrity(s.segment_id for s in live.values() if s.on_disk)

    def check_index(self) -> None:
        """Compare the index with the tree; waits for the disk, and for what is being written.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        self.drain()
        if not self._reorderer.pending:
            indexed = self._keeper.indexed().result()
            # A row too many is a file that could not be removed, which was logged.
            for segment in self.tree.segments():
                if segment.on_disk:
                    assert indexed.get(segment.segment_id) == segment.file_bytes

    def close(self) -> None:
        """Finish writes, keep access times, close files and release the lock; idempotent.

        What does not end within `--impress-io-timeout` is left behind.
        """
        if self._closed:
            return
        self._closed = True
        seconds = self._config.io_timeout
        self._end_measuring(wait=True)
        self.drain()
        self._reorderer.close(seconds)
        if (outcome := self._reorderer.take_finished()) is not None:
            self._settle(outcome)
        accesses = [(s.segment_id, s.last_access, s.hits) for s in self.tree.segments()]
        kept = self._keeper.record_accesses(accesses)
        if not self._keeper.close(seconds) or kept.exception() is not None:
            logger.warning("access times are not kept for the next start")
        self._readers.close(seconds)
        self._monitor.close(seconds)
        self._reader.close()
        self._pool.close()
        self.cache.close()
        self._directory.close()

    def _end_measuring(self, *, wait: bool = False) -> None:
        """Close the source of a measurement that has ended, or with `wait` in any case."""
        if self._measuring is not None and (wait or not self._measuring.is_reading):
            self.close_source(self._measuring)
            self._measuring = None

    def _recover(self) -> StoredTree:
        segments = [
            StoredSegment(e.info, e.file_bytes, last_access=e.last_access, hits=e.hits)
            for e in self._keeper.recover(self._identity)
        ]
        latest = max((segment.last_access for segment in segments), default=0)
        tree = StoredTree(first_time=latest + 1)
        for orphan in restore_segments(tree, segments):
            # What builds on a file that cannot be read now may be found at another start.
            if not self._keeper.unused_files:
                logger.warning(
                    "segment %s has lost the prefix it builds on; removed", orphan.segment_id
                )
                self._keeper.delete(orphan.segment_id, orphan.file_bytes)
        used = sum(segment.file_bytes for segment in tree.segments())
        logger.info(
            "SSD store %s: %d segments, %.1f MB, O_DIRECT %s",
            self._directory.path,
            len(tree),
            used / 1e6,
            "on" if self._direct else "off",
        )
        return tree

    def _describe(
        self, namespace: str, tokens: Tokens, start: int, quality: Quality
    ) -> SegmentInfo:
        return SegmentInfo(
            segment_id=uuid.uuid4().hex,
            identity=self._identity,
            namespace=namespace,
            prefix_digest=prefix_digest(namespace, tokens[:start]),
            prefix_len=start,
            tokens=tokens[start:].copy(),
            shape=self._shape,
            chunk_tokens=self._config.chunk_tokens,
            quality=quality,
        )

    def _shortened(self, known: StoredMatch, available_from: int) -> StoredMatch:
        """A match without its last segment, if little of that is shared.

        A prompt that begins like another one need not keep all of that one on the disk.
        """
        if not known.spans or 2 * len(known.spans[-1]) >= known.spans[-1].segment.info.num_tokens:
            return known
        shorter = StoredMatch(known.spans[:-1])
        return shorter if shorter.num_tokens >= available_from else known

    def _replaces(
        self, known: StoredMatch, shorter: StoredMatch, info: SegmentInfo, tokens: Tokens
    ) -> bool:
        """Make room at the cost of the last segment of a match; whether the new one fits then."""
        if shorter is known:
            return False
        victim = known.spans[-1].segment
        if not self._quota.make_room(info.layout().file_bytes, shorter, self._evict, victim):
            return False
        # A worse version of the same tokens may stand there as well.
        rest = self.tree.match(info.namespace, tokens, least=info.quality, only_ready=False)
        return rest.num_tokens == info.prefix_len

    def _refill(
        self,
        known: StoredMatch,
        lost: StoredSegment,
        read_layers: Callable[[int], LayerReader],
        on_done: Callable[[], None],
        abandon: Callable[[], None],
        available_from: int,
    ) -> StoreOutcome:
        """Store the tokens of a segment that was lost in its place, so that others fit again."""
        info = dataclasses.replace(lost.info, segment_id=uuid.uuid4().hex, generation=0)
        stop = info.prefix_len + info.num_tokens
        if known.num_tokens < stop or info.prefix_len < available_from:
            return StoreOutcome.UNREACHABLE
        # It keeps its place, although all that builds on it may go to make room.
        lost.state = SegmentState.PENDING
        if not self._quota.make_room(info.layout().file_bytes, known, self._evict):
            lost.state = SegmentState.LOST
            self._prune(lost)
            self.stats.offers_without_space += 1
            return StoreOutcome.NO_SPACE
        read_layer = read_layers(info.prefix_len)

        def read_lost(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = read_layer(layer)
            return keys[: info.num_tokens], values[: info.num_tokens]

        self._begin_write(lost, info, read_lost, on_done, abandon)
        return StoreOutcome.ACCEPTED

    def _begin_write(
        self,
        segment: StoredSegment,
        info: SegmentInfo,
        read_layer: LayerReader,
        on_done: Callable[[], None],
        abandon: Callable[[], None],
    ) -> None:
        num_bytes = info.layout().file_bytes
        self._quota.begin(num_bytes)
        future = self._keeper.write(CatalogEntry(info, num_bytes, segment.last_access), read_layer)
        self._writes.append(_Write(segment, info, num_bytes, future, on_done, abandon))

    def _finish(self, write: _Write) -> None:
        """Take in one write that has ended."""
        segment, error = write.segment, write.future.exception()
        alive = self.tree.get(segment.segment_id) is segment
        if not write.abandoned:
            write.on_done()
        written = error is None and alive
        self._quota.end(write.num_bytes, written=written)
        if written:
            if segment.info is not write.info:
                self.tree.replace(segment, write.info, write.num_bytes)
            segment.state = SegmentState.READY
            self.stats.segments_written += 1
            self.stats.bytes_written += write.num_bytes
            return
        self._keeper.delete(write.info.segment_id, write.num_bytes)
        if isinstance(error, WriteAbandoned):
            self.stats.segments_abandoned += 1
        elif error is not None:
            self.stats.segments_failed += 1
            logger.warning(
                "a prefix of %d tokens could not be stored: %s", write.info.num_tokens, error
            )
        if alive:
            segment.state = SegmentState.LOST
            self._prune(segment)

    def _settle(self, outcome: Outcome) -> None:
        """Draw the consequences of a rewrite for quota and files."""
        segment = outcome.segment
        if outcome.taken_over:
            self._quota.replace(outcome.old_bytes, segment.file_bytes)
            self.stats.bytes_written += segment.file_bytes
            # The old version was read to the end; what stands there now was verified.
            self._looks.forget(outcome.old_id)
            segment.state = SegmentState.READY
            entry = CatalogEntry(
                segment.info, segment.file_bytes, segment.last_access, segment.hits
            )
            self._keeper.delete(outcome.old_id, outcome.old_bytes, successor=entry)
        if outcome.discard is not None:
            self._keeper.delete(outcome.discard, segment.file_bytes)
        if isinstance(outcome.error, PrefixUnreadable):
            self.report(outcome.error)
        elif isinstance(outcome.error, OSError):
            self.health.failed("a segment could not be reordered", outcome.error, reading=False)

    def _has_room(self, num_bytes: int) -> bool:
        """Whether a file fits without evicting anything."""
        return self._quota.missing(num_bytes) <= 0

    def _evict(self, segment: StoredSegment) -> None:
        """Remove a segment that nothing builds on, to make room."""
        self.stats.segments_evicted += 1
        self._keeper.delete(segment.segment_id, segment.file_bytes)
        self._lose(segment)

    def _lose(self, segment: StoredSegment) -> None:
        """A segment has no file any more; it stays in the tree as long as others build on it."""
        self._quota.remove(segment.file_bytes)
        self._looks.forget(segment.segment_id)
        self._readers.retire(segment.segment_id)
        segment.state = SegmentState.LOST
        self._prune(segment)

    def _prune(self, segment: StoredSegment | None) -> None:
        """Take lost segments that nothing builds on out of the tree."""
        while segment is not None and segment.state is SegmentState.LOST and not segment.dependents:
            parent = segment.parent
            self.tree.remove(segment)
            segment = parent

    def _judge(self, segment: StoredSegment, verdict: Verdict) -> None:
        """Draw the consequences of a second look."""
        if self.tree.get(segment.segment_id) is not segment:
            return
        self.stats.segments_cleared += verdict is Verdict.GOOD
        self.stats.segments_quarantined += verdict is Verdict.BAD
        self.stats.segments_gone += verdict is Verdict.GONE
        if verdict is not Verdict.GOOD:
            self._lose(segment)

    def _take_answer(self, segments: dict[str, int] | None, error: Exception | None) -> None:
        """A disk that failed was asked again: go on with what is on it now."""
        if segments is not None and not self.health.readable:
            try:
                self._reader.revive()
            except (ConfigError, OSError) as failure:
                self.health.probed(failure, readable=False)
                return
            # What is not there may have been written after the disk was asked.
            for segment in self.tree.segments():
                if segment.ready and segment.segment_id not in segments:
                    self._looks.add(segment)
            self._looks.hurry()
        if error is None:
            self._keeper.catch_up()
        self.health.probed(error, readable=segments is not None)
