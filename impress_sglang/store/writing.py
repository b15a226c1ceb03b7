"""Takes offers of KVs, and writes those that are accepted. Thread: the store's.

An offer is decided immediately: which of its tokens are stored already, on which segment it builds,
whether there is room. The worker writes, and `poll` collects the results. Objects fetched from a
bucket become files of the store in the same way.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from torch import Tensor

from impress_sglang.codes.groups.energy import QuerySource, no_queries
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import NotCodable
from impress_sglang.storage.directory import CODING
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Priority, SegmentInfo, Tokens
from impress_sglang.storage.writer import LayerReader, WriteAbandoned, WriteDiscarded
from impress_sglang.store.bucket_peer import BucketPeer
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.miss_log import MissCause, MissLog
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS, prefix_digest
from impress_sglang.store.quota import Quota
from impress_sglang.store.segment_readers import SegmentReaders
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSegment
from impress_sglang.transfer.codecs import Codec

logger = logging.getLogger(__name__)

# Seconds between two checks for progress while waiting for writes.
PROGRESS_SECONDS = 0.25
# Seconds between two requests to other servers to make room.
_REQUEST_SECONDS = 0.5


class StoreOutcome(enum.Enum):
    """Result of an offer to store a prefix."""

    ACCEPTED = "accepted"
    ALREADY_STORED = "known"
    PREFIX_MISSING = "unreachable"
    NO_SPACE = "no_space"
    OVER_BUDGET = "spent"
    """The write budget of the drive is spent."""
    UNAVAILABLE = "unavailable"
    """The disk accepts no writes now."""
    NOT_CODABLE = "not_codable"
    """Most of it could not be coded in an earlier attempt."""


@dataclasses.dataclass(slots=True)
class StoreStats:
    """Counters since start; sizes in bytes."""

    segments_written: int = 0
    segments_failed: int = 0
    segments_abandoned: int = 0
    segments_evicted: int = 0
    segments_purged: int = 0
    segments_expired: int = 0
    segments_unreadable: int = 0
    segments_cleared: int = 0
    """Unreadable segments that a second look has found good."""
    segments_quarantined: int = 0
    segments_gone: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    bytes_read_ahead: int = 0
    bytes_read_ahead_used: int = 0
    offers_without_space: int = 0
    offers_while_unavailable: int = 0
    offers_above_budget: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """KVs that may be stored.

    Args:
        tokens: all tokens from the start of the sequence.
        read_layers: given the number of leading tokens that are stored already, returns the reader
            of the KVs of the others. It is only called if the offer is accepted.
        on_done: called when the KVs are no longer needed, written or not.
        abandon: called if the write is abandoned before that: from then on the reader must raise
            `WriteAbandoned`.
        min_tokens: minimum number of new tokens for a file.
        quality: quality of the new KVs.
        available_from: first token whose KVs the reader has; earlier ones must be stored already.
        queries: gives the last queries of a layer; called after the KVs of the layer were read.
        ttl: seconds after which the new KVs expire; 0: never.
        priority: priority of the new KVs for eviction.
        windows_from: tokens before this one lack the KVs of layers with sliding windows.
    """

    tokens: Tokens
    read_layers: Callable[[int], LayerReader]
    on_done: Callable[[], None]
    abandon: Callable[[], None]
    min_tokens: int
    quality: Quality = EXACT
    available_from: int = 0
    queries: QuerySource = no_queries
    ttl: float = 0.0
    priority: Priority = Priority.NORMAL
    windows_from: int = 0


@dataclasses.dataclass(slots=True)
class _Write:
    segment: StoredSegment
    offer: Offer
    future: Future[None]
    abandoned: bool = False


class SegmentWrites:
    """Puts segments into the tree and removes them; iterates over pending ones."""

    def __init__(
        self,
        config: ImpressConfig,
        identity: str,
        shape: KVShape,
        disk: StoreDisk,
        quota: Quota,
        readers: SegmentReaders,
        codec: Codec | None,
    ) -> None:
        self.stats, self.miss_log = StoreStats(), MissLog()
        self._config, self._identity, self._shape, self._codec = config, identity, shape, codec
        self._disk, self._quota = disk, quota
        self._tree, self._worker, self._health = disk.tree, disk.worker, disk.health
        self._readers = readers
        # Oldest first.
        self._writes = collections.deque[_Write]()
        # An object of the bucket that is being moved into the store.
        self._adoption: tuple[SegmentInfo, Future[None]] | None = None
        self._room_requested_at = -math.inf

    def __len__(self) -> int:
        return len(self._writes)

    def __iter__(self) -> Iterator[StoredSegment]:
        return (write.segment for write in self._writes if not write.segment.lost)

    def should_sample_queries(self) -> bool:
        return (
            self._codec is not None
            and self._codec.by_energy
            and self._disk.meter.sample_next_prompt()
        )

    @property
    def accepts(self) -> bool:
        """Whether writes are accepted now: the disk works, and the write budget is not spent."""
        return self._health.writable and not self._quota.budget.is_spent

    def offer(self, namespace: str, offer: Offer) -> StoreOutcome:
        """Store the new tokens of a prefix, in the background."""
        namespace = self._disk.namespace(namespace)
        if not self._health.writable:
            self.stats.offers_while_unavailable += 1
            return StoreOutcome.UNAVAILABLE
        tokens = offer.tokens
        match = self._tree.match(namespace, tokens, min_quality=offer.quality, only_ready=False)
        # The KVs are in SGLang's pool and need not be read, but this is a use, too.
        self._tree.touch(match)
        start, stop = _missing_range(match, offer)
        if len(tokens) - start < offer.min_tokens:
            return StoreOutcome.ALREADY_STORED
        if start < offer.available_from or start == stop:
            return StoreOutcome.PREFIX_MISSING
        if self._quota.budget.is_spent:
            self.stats.offers_above_budget += 1
            self.miss_log.record_tokens(namespace, tokens, MissCause.WRITE_BUDGET)
            return StoreOutcome.OVER_BUDGET
        miss = self.miss_log.find(namespace, tokens[:stop], start)
        # Rejected if most of it could not be coded before.
        num_uncodable = (
            0 if miss is None or miss.cause is not MissCause.NOT_CODABLE else miss.num_tokens
        )
        if 2 * num_uncodable >= stop - start:
            return StoreOutcome.NOT_CODABLE
        segment = self._new_segment(namespace, offer, start, stop)
        blocked_removals = self._worker.blocked_removals()
        victims = self._quota.make_room(segment, match)
        if victims is None:
            self.stats.offers_without_space += 1
            self.miss_log.record_tokens(namespace, tokens, MissCause.NO_ROOM)
            self._request_room(segment.file_bytes)
            return StoreOutcome.NO_SPACE
        if victims and self._quota.free_share_bytes > 0:
            self._request_room(segment.file_bytes)
        self.discard(victims, MissCause.EVICTED)
        parent = match.slice(0, start)[-1].segment if start else None
        attached = self._tree.attach(segment, parent)
        assert attached, "the matched prefix is not in the tree"
        self._begin(segment, offer, blocked_removals)
        return StoreOutcome.ACCEPTED

    def poll(self) -> None:
        """Publish written segments, and take over fetched objects."""
        while self._writes and self._writes[0].future.done():
            self._finish(self._writes.popleft())
        if self._disk.bucket is not None:
            self._take_fetched(self._disk.bucket)

    def drain(self) -> None:
        """Wait for all writes; abandons them after `--impress-io-timeout` without progress."""
        began = time.monotonic()
        while self._writes:
            try:
                self._writes[0].future.exception(PROGRESS_SECONDS)
            except TimeoutError:
                idle = time.monotonic() - max(began, self._worker.progress)
                if idle > self._config.io_timeout:
                    late = TimeoutError(f"no progress for {idle:.1f} s")
                    self._health.report_failure("writes do not end", late, reading=False)
                    self.abandon()
                    return
                continue
            self._finish(self._writes.popleft())

    def discard(self, segments: Sequence[StoredSegment], cause: MissCause) -> int:
        """Remove segments, dependents first, with their files; returns how many writes of pending
        ones were abandoned."""
        writes = {write.segment: write for write in self._writes}
        num_abandoned, removed = 0, dict[str, int]()
        for segment in segments:
            if segment.state is SegmentState.PENDING:
                num_abandoned += 1
                self._quota.pending_bytes -= segment.file_bytes
                self._abandon(writes[segment])
            self.lose(segment, cause)
            if segment.foreign_dir is None:
                # The worker removes it after its write.
                removed[segment.segment_id] = segment.file_bytes
            else:
                is_purged = cause is MissCause.PURGED
                self._disk.unattached.ban(segment.segment_id, is_purged=is_purged)
        self._disk.remove_foreign(segments)
        if removed:
            count = len(removed) - num_abandoned
            self.stats.segments_evicted += count * (cause is MissCause.EVICTED)
            self.stats.segments_purged += count * (cause is MissCause.PURGED)
            self.stats.segments_expired += count * (cause is MissCause.EXPIRED)
            # In one job, because with each job the worker can take the GIL from this thread.
            self._worker.delete(removed)
        if cause is MissCause.PURGED:
            self._worker.submit(self._worker.empty_quarantine)
        return num_abandoned

    def lose(self, segment: StoredSegment, cause: MissCause) -> None:
        """Remove a segment from the tree, where a tombstone may remain; see `StoredTree.lose`."""
        self.miss_log.record(segment, cause)
        stored = segment.on_disk
        if stored:
            # An estimate until the next measurement.
            self._health.free_bytes += segment.file_bytes
        self._health.suspects.pop(segment, None)
        self._tree.lose(segment)
        if stored and self._disk.bucket is not None:
            self._disk.bucket.on_removed(segment, is_purged=cause is MissCause.PURGED)
        # After it left the tree, which `retire` checks.
        self._readers.retire(segment.segment_id)

    def _request_room(self, num_bytes: int) -> None:
        """Ask other servers to make room, if they use any."""
        missing_bytes, now = self._quota.missing(num_bytes), time.monotonic()
        if (
            missing_bytes > 0
            and self._disk.peers.num_bytes
            and now > self._room_requested_at + _REQUEST_SECONDS
        ):
            self._room_requested_at = now
            self._worker.submit(self._worker.record, {"want": missing_bytes})

    def abandon(self) -> None:
        """Abandon all writes, the latest first; never waits."""
        for write in reversed(self._writes):
            self._abandon(write)

    def _abandon(self, write: _Write) -> None:
        if not write.abandoned:
            write.abandoned = True
            write.offer.abandon()
            write.offer.on_done()

    def _new_segment(self, namespace: str, offer: Offer, start: int, stop: int) -> StoredSegment:
        info = SegmentInfo(
            segment_id=uuid.uuid4().hex,
            identity=self._identity,
            namespace=namespace,
            prefix_digest=prefix_digest(namespace, offer.tokens[:start]),
            prefix_len=start,
            tokens=offer.tokens[start:stop].copy(),
            shape=self._shape,
            chunk_tokens=self._config.chunk_tokens,
            quality=offer.quality,
            expires=math.ceil(time.time() + offer.ttl) if offer.ttl else 0,
            priority=offer.priority,
            windows_from=min(max(offer.windows_from, start), stop) - start,
        )
        return StoredSegment(info, info.layout().file_bytes, SegmentState.PENDING)

    def _begin(
        self, segment: StoredSegment, offer: Offer, blocked_removals: frozenset[str]
    ) -> None:
        info = segment.info
        self._quota.budget.spend(segment.file_bytes)
        self._quota.pending_bytes += segment.file_bytes
        read_layer, coding = offer.read_layers(info.prefix_len), None

        def read_first(layer: int) -> tuple[Tensor, Tensor]:
            keys, values = read_layer(layer)
            return keys[: info.num_tokens], values[: info.num_tokens]

        if self._codec is not None:
            energy = functools.partial(self._disk.meter.energy, queries=offer.queries)
            coding = self._codec.layer_encoder(info.prefix_len, energy, alone=not self._shape.exact)
        future = self._worker.submit(
            self._worker.write,
            segment,
            read_first,
            coding,
            blocked_removals,
            lambda: not segment.lost,
        )
        self._writes.append(_Write(segment, offer, future))

    def _finish(self, write: _Write) -> None:
        """Publish a segment whose write has ended, or act on its failure."""
        segment, error = write.segment, write.future.exception()
        if not write.abandoned:
            write.offer.on_done()
        if error is not None and not isinstance(error, (WriteDiscarded, NotCodable)):
            self._quota.budget.spend(-segment.file_bytes)
        if segment.lost:
            self.stats.segments_abandoned += 1
            return
        self._quota.pending_bytes -= segment.file_bytes
        if error is None:
            # An estimate until the next measurement.
            self._health.free_bytes -= segment.file_bytes
            segment.state = SegmentState.READY
            self._disk.unattached.on_attached(segment)
            if self._disk.bucket is not None:
                self._disk.bucket.on_stored(segment)
            self.stats.segments_written += 1
            self.stats.bytes_written += segment.file_bytes
            if self._disk.meter.has_news:
                self._worker.submit(
                    lambda: self._worker.put_small_file(CODING, self._disk.meter.dump())
                )
            return
        self._worker.delete({segment.segment_id: segment.file_bytes})
        if isinstance(error, NotCodable):
            # Only the end is recorded: prompts with the same beginning may have codes.
            tokens = segment.prompt()
            end = max(segment.info.prefix_len, len(tokens) - BLOCK_TOKENS)
            self.miss_log.record_tokens(segment.info.namespace, tokens, MissCause.NOT_CODABLE, end)
        if isinstance(error, WriteAbandoned):
            self.stats.segments_abandoned += 1
        else:
            self.stats.segments_failed += 1
            logger.warning(
                "a prefix of %d tokens could not be stored: %s", segment.info.num_tokens, error
            )
        self._tree.lose(segment)

    def _take_fetched(self, bucket: BucketPeer) -> None:
        """Take over a file that was moved into the store, and start to move the next one."""
        if self._adoption is not None:
            info, moving = self._adoption
            if not moving.done():
                return
            self._adoption = None
            size, self._quota.adopting_bytes = self._quota.adopting_bytes, 0
            segment = self._find_in_bucket(info)
            if (error := moving.exception()) is not None:
                self._health.report_failure("a segment could not be kept", error, reading=False)
            elif segment is None:
                # Purged meanwhile.
                self._worker.delete({info.segment_id: size})
            else:
                self._tree.replace(segment, info, size)
                self._quota.budget.spend(size)
                bucket.on_stored(segment, upload=False)
        if not bucket.completed:
            return
        completed = bucket.completed.popleft()
        completed.is_adopted, info = True, completed.info
        segment, victims = self._find_in_bucket(info), None
        if segment is not None and self.accepts:
            file = segment.detached_copy(file_bytes=completed.size)
            key = info.namespace, segment.prompt()
            keep = self._tree.match(*key, min_quality=info.quality, only_ready=False)
            victims = self._quota.make_room(file, keep)
        if victims is None:
            self._worker.submit(bucket.files.end, completed)
            return
        self.discard(victims, MissCause.EVICTED)
        self._quota.adopting_bytes = file.file_bytes
        adopt = functools.partial(self._worker.adopt, file)
        self._adoption = info, self._worker.submit(bucket.files.end, completed, adopt)

    def _find_in_bucket(self, info: SegmentInfo) -> StoredSegment | None:
        """Return a segment of the tree if only the bucket has it and it can be read."""
        segment = self._tree.get(info.segment_id)
        is_readable = segment is not None and segment.ready and self._disk.only_in_bucket(segment)
        return segment if is_readable else None


def _missing_range(match: StoredMatch, offer: Offer) -> tuple[int, int]:
    """Return the first tokens of an offer that are not stored, [start, stop): those of consecutive
    tombstones, or those after the match. Empty if the tombstones have another quality."""
    lost = [span.segment.state is SegmentState.LOST for span in match.spans]
    if True not in lost:
        return match.num_tokens, len(offer.tokens)
    first = lost.index(True)
    start = stop = sum(map(len, match.spans[:first]))
    for span, tombstone in zip(match.spans[first:], lost[first:], strict=True):
        if not tombstone or span.segment.info.quality != offer.quality:
            return start, stop
        stop += len(span)
    return start, len(offer.tokens)
