"""What is being stored: offers, and the writes that were accepted.

Owned by the store's thread. An offer is decided at once: what of it is known, what it builds on,
whether there is room. The keeper writes; `poll` takes in what became of it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.management.keeper import Keeper
from impress_sglang.management.quota import Quota
from impress_sglang.management.tree import (
    SegmentState,
    StoredMatch,
    StoredSegment,
    StoredSpan,
    StoredTree,
    prefix_digest,
)
from impress_sglang.storage.catalog import CatalogEntry
from impress_sglang.storage.health import Health
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import SegmentInfo, Tokens
from impress_sglang.storage.writer import LayerReader, WriteAbandoned

logger = logging.getLogger(__name__)

# Who waits for writes looks so often whether they still make progress.
LOOK_SECONDS = 0.25


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


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """KVs that may be stored.

    Args:
        tokens: all tokens from the start of the sequence.
        read_layers: given the number of leading tokens that are stored already, returns the reader
            of the KVs of the others. It is only called if the offer is accepted.
        on_done: called when the KVs are no longer needed, written or not.
        abandon: called if the KVs are wanted back before that: from then on the reader must raise
            `WriteAbandoned`.
        min_tokens: a shorter rest is not worth a file.
        quality: of the new KVs.
        available_from: the reader has no KVs of earlier tokens; those must be stored.
        frees: whether giving the KVs up frees memory, or somebody else holds all of it as well.
    """

    tokens: Tokens
    read_layers: Callable[[int], LayerReader]
    on_done: Callable[[], None]
    abandon: Callable[[], None]
    min_tokens: int
    quality: Quality = EXACT
    available_from: int = 0
    frees: Callable[[], bool] = lambda: True


@dataclasses.dataclass(slots=True)
class _Write:
    """`info` and `num_bytes` are of the file, which may be for a segment that was lost."""

    segment: StoredSegment
    info: SegmentInfo
    num_bytes: int
    future: Future[None]
    offer: Offer
    abandoned: bool = False


class SegmentWrites:
    """Takes offers, and knows the writes that have not been taken in yet, oldest first."""

    def __init__(
        self,
        config: ImpressConfig,
        identity: str,
        shape: KVShape,
        tree: StoredTree,
        quota: Quota,
        keeper: Keeper,
        health: Health,
        stats: StoreStats,
        evict: Callable[[StoredSegment], None],
    ) -> None:
        """`evict` takes a segment out of the tree, and its file; the others are the store's."""
        self._config = config
        self._identity = identity
        self._shape = shape
        self._tree = tree
        self._quota = quota
        self._keeper = keeper
        self._health = health
        self._stats = stats
        self._evict = evict
        self._writes: collections.deque[_Write] = collections.deque()

    def __len__(self) -> int:
        return len(self._writes)

    def __iter__(self) -> Iterator[tuple[StoredSegment, int]]:
        """The segments that are being written, and the bytes of their files."""
        return ((write.segment, write.num_bytes) for write in self._writes)

    def take(self, namespace: str, offer: Offer) -> StoreOutcome:
        """Store what is new of an offer, in the background; `namespace` is its stored name."""
        if not self._health.writable:
            self._stats.offers_while_unavailable += 1
            return StoreOutcome.UNAVAILABLE
        tokens, quality = offer.tokens, offer.quality
        known = self._tree.match(namespace, tokens, least=quality, only_ready=False)
        lost = next((s for s in known.spans if s.segment.state is SegmentState.LOST), None)
        if lost is not None:
            return self._refill(known, lost, offer)
        if len(tokens) - known.num_tokens < offer.min_tokens:
            return StoreOutcome.KNOWN
        if known.num_tokens < offer.available_from:
            return StoreOutcome.UNREACHABLE
        info = self._describe(namespace, offer, known.num_tokens)
        if not self._make_room(info, known):
            shorter = _shortened(known, offer.available_from)
            info = self._describe(namespace, offer, shorter.num_tokens)
            if not self._replaces(known, shorter, info, tokens):
                self._stats.offers_without_space += 1
                return StoreOutcome.NO_SPACE
        segment = StoredSegment(info, info.layout().file_bytes, SegmentState.PENDING)
        attached = self._tree.insert(segment, tokens[: info.prefix_len])
        assert attached, "the matched prefix is not in the tree"
        self._begin(segment, info, offer.read_layers(info.prefix_len), offer)
        return StoreOutcome.ACCEPTED

    def poll(self) -> None:
        """Take in writes that have ended: publish them, or draw the consequences."""
        while self._writes and self._writes[0].future.done():
            self._finish(self._writes.popleft())

    def drain(self) -> None:
        """Wait until all are finished, and take them in.

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
                    self._health.failed("writes do not end", late, reading=False)
                    self.abandon()
                    return
                continue
            self._finish(self._writes.popleft())

    def abandon(self, enough: Callable[[], bool] | None = None) -> None:
        """Give writes up, the latest first; nothing waits.

        That is all of them, or those that free memory by that until there is `enough` of it.
        """
        for write in reversed(self._writes):
            if enough is not None and enough():
                return
            if not write.abandoned and (enough is None or write.offer.frees()):
                write.abandoned = True
                write.offer.abandon()
                write.offer.on_done()

    def _describe(self, namespace: str, offer: Offer, start: int) -> SegmentInfo:
        return SegmentInfo(
            segment_id=uuid.uuid4().hex,
            identity=self._identity,
            namespace=namespace,
            prefix_digest=prefix_digest(namespace, offer.tokens[:start]),
            prefix_len=start,
            tokens=offer.tokens[start:].copy(),
            shape=self._shape,
            chunk_tokens=self._config.chunk_tokens,
            quality=offer.quality,
        )

    def _make_room(
        self, info: SegmentInfo, keep: StoredMatch, first: StoredSegment | None = None
    ) -> bool:
        return self._quota.make_room(info.layout().file_bytes, keep, self._evict, first)

    def _replaces(
        self, known: StoredMatch, shorter: StoredMatch, info: SegmentInfo, tokens: Tokens
    ) -> bool:
        """Make room at the cost of the last segment of a match; whether the new one fits then."""
        if shorter is known or not self._make_room(info, shorter, known.spans[-1].segment):
            return False
        # A worse version of the same tokens may stand there as well.
        rest = self._tree.match(info.namespace, tokens, least=info.quality, only_ready=False)
        return rest.num_tokens == info.prefix_len

    def _refill(self, known: StoredMatch, hole: StoredSpan, offer: Offer) -> StoreOutcome:
        """Store the tokens of a segment that was lost in its place, so that others fit again."""
        lost = hole.segment
        info = dataclasses.replace(lost.info, segment_id=uuid.uuid4().hex, generation=0)
        # A match may leave the segment at a branch, and its tokens are others from there on.
        whole = len(hole) == info.num_tokens and info.prefix_len >= offer.available_from
        if not whole or not offer.quality.suffices(info.quality):
            return StoreOutcome.UNREACHABLE
        # It keeps its place, although all that builds on it may go to make room.
        lost.state = SegmentState.PENDING
        if not self._make_room(info, known):
            lost.state = SegmentState.LOST
            self._tree.prune(lost)
            self._stats.offers_without_space += 1
            return StoreOutcome.NO_SPACE
        read_layer = offer.read_layers(info.prefix_len)

        def read_lost(layer: int) -> tuple[Tensor, Tensor]:
            keys, values = read_layer(layer)
            return keys[: info.num_tokens], values[: info.num_tokens]

        self._begin(lost, info, read_lost, offer)
        return StoreOutcome.ACCEPTED

    def _begin(
        self, segment: StoredSegment, info: SegmentInfo, read_layer: LayerReader, offer: Offer
    ) -> None:
        num_bytes = info.layout().file_bytes
        self._quota.begin(num_bytes)
        future = self._keeper.write(CatalogEntry(info, num_bytes, segment.last_access), read_layer)
        self._writes.append(_Write(segment, info, num_bytes, future, offer))

    def _finish(self, write: _Write) -> None:
        segment, error = write.segment, write.future.exception()
        alive = self._tree.get(segment.segment_id) is segment
        if not write.abandoned:
            write.offer.on_done()
        written = error is None and alive
        self._quota.end(write.num_bytes, written=written)
        if written:
            if segment.info is not write.info:
                self._tree.replace(segment, write.info, write.num_bytes)
            segment.state = SegmentState.READY
            self._stats.segments_written += 1
            self._stats.bytes_written += write.num_bytes
            return
        self._keeper.delete(write.info.segment_id, write.num_bytes)
        if isinstance(error, WriteAbandoned):
            self._stats.segments_abandoned += 1
        elif error is not None:
            self._stats.segments_failed += 1
            logger.warning(
                "a prefix of %d tokens could not be stored: %s", write.info.num_tokens, error
            )
        if alive:
            segment.state = SegmentState.LOST
            self._tree.prune(segment)


def _shortened(known: StoredMatch, available_from: int) -> StoredMatch:
    """A match without its last segment, if little of that is shared.

    A prompt that begins like another one need not keep all of that one on the disk.
    """
    if not known.spans or 2 * len(known.spans[-1]) >= known.spans[-1].segment.info.num_tokens:
        return known
    shorter = StoredMatch(known.spans[:-1])
    return shorter if shorter.num_tokens >= available_from else known
