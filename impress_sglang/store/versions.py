"""Versions of segments: the ids of their chunks in the caches, and what is known of these chunks.

A version of a segment (one file) gets a range of chunk ids when it is first read, and keeps it
until it has left the tree *and* its last reader is done: a request goes on with the version that it
began with, whatever is published meanwhile.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from impress_sglang.importance.history import TokenHistory
from impress_sglang.loops.types import Floats
from impress_sglang.storage.layout import PROBE, Column, KVShape, SegmentLayout
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.store.lookahead import AwaitedRange
from impress_sglang.store.stored import SegmentState, StoredSegment
from impress_sglang.store.token_order import expected_shares
from impress_sglang.threads import locked
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Tier
from impress_sglang.tiers.rules import NOBODY
from impress_sglang.transfer.coded_span import cached_pages, chunks_of
from impress_sglang.transfer.expectation import BlockHistory, first_shares


@dataclasses.dataclass(slots=True)
class CachedSegment:
    """One file: its chunk ids, and its readers while it has any.

    `columns` and `codes`: the first id of their chunks; None until they are read. `blocks`: what is
    known of the blocks of columns; None until it is needed, because making it takes time in
    proportion to the length.
    """

    segment_id: str
    layout: SegmentLayout
    reordered: bool
    columns: int | None = None
    codes: int | None = None
    blocks: BlockHistory | None = None
    segment: OpenSegment | None = None
    readers: int = 0
    retired: bool = False


class SegmentVersions:
    """The versions read so far of segments in the tree or with readers."""

    def __init__(
        self,
        shape: KVShape,
        cache: ChunkCache,
        codes: ChunkCache,
        *,
        retention: float,
        certain: Sequence[Column],
        by_importance: bool,
    ) -> None:
        """Begin with no versions.

        Args:
            shape: shape of the KVs.
            cache: holds chunks of exact KVs.
            codes: holds chunks of codes.
            retention: the retention that requests usually ask for.
            certain: columns of exact KVs of which requests usually want all rows.
            by_importance: whether averages are of importance instead of selections.
        """
        self._lock = threading.RLock()
        self._shape = shape
        self._cache = cache
        self._codes = codes
        self._retention = retention
        self._certain = np.array(certain)
        self._by_importance = by_importance
        self._versions: dict[str, CachedSegment] = {}
        # What requests wait for, including segments that were not read yet.
        self._awaited: dict[str, Sequence[AwaitedRange]] = {}

    def __getitem__(self, segment_id: str) -> CachedSegment:
        return self._versions[segment_id]

    def get(self, segment_id: str) -> CachedSegment | None:
        """The version of a segment; None if it was not read."""
        return self._versions.get(segment_id)

    @locked
    def of(self, stored: StoredSegment) -> CachedSegment:
        """The version of a segment, which is made if the segment was not read before."""
        version = self._versions.get(stored.segment_id)
        if version is None:
            version = CachedSegment(stored.segment_id, stored.info.layout(), stored.info.reordered)
            # Another thread may have evicted it meanwhile, and has retired all that there was.
            version.retired = stored.state is SegmentState.LOST
            self._versions[stored.segment_id] = version
        return version

    @locked
    def blocks(self, version: CachedSegment) -> BlockHistory:
        """What is known of the blocks of exact KVs of a version."""
        if version.blocks is None:
            layout = version.layout
            shares = first_shares(layout, self._retention, ordered=version.reordered)
            version.blocks = BlockHistory(layout, shares)
        return version.blocks

    @locked
    def columns(self, version: CachedSegment) -> int:
        """The first id of a version's chunks of exact KVs, which are about to be read."""
        if version.columns is None:
            version.columns = self._cache.attach(self._cache.page.chunk_pages(version.layout))
            if ranges := self._awaited.get(version.segment_id):
                self._expect_columns(version, ranges)
        return version.columns

    @locked
    def codes(self, version: CachedSegment) -> int:
        """The first id of a version's chunks in codes, which are about to be read."""
        if version.codes is None:
            assert version.layout.codes, "the store has no codes"
            version.codes = self._codes.attach(cached_pages(version.layout.codes))
            if ranges := self._awaited.get(version.segment_id):
                self._expect_codes(version, ranges)
        return version.codes

    def tiers(self, version: CachedSegment, *, codes: bool) -> npt.NDArray[np.uint8]:
        """The tier of each of a version's chunks, of exact KVs or in codes, `Tier` values."""
        if codes:
            return _tiers(self._codes, version.codes, self._num_codes(version))
        return _tiers(self._cache, version.columns, version.layout.total_chunks)

    @locked
    def expect(self, awaited: Iterable[tuple[str, Sequence[AwaitedRange]]]) -> None:
        """Note the tokens that requests wait for in some segments; they wait for no others there.

        Of these tokens, what is certain to be read is evicted last from the caches: the bases of
        codes, and the `certain` columns of exact KVs.
        """
        for segment_id, ranges in awaited:
            if ranges:
                self._awaited[segment_id] = ranges
            else:
                self._awaited.pop(segment_id, None)
            if (version := self._versions.get(segment_id)) is not None:
                self._expect_columns(version, ranges)
                self._expect_codes(version, ranges)

    def _expect_columns(self, version: CachedSegment, ranges: Sequence[AwaitedRange]) -> None:
        if version.columns is None:
            return
        layout = version.layout
        if version.reordered and ranges:
            # Which chunks have these tokens is known only from the file.
            ranges = [(0, layout.num_tokens, ranges[-1][2])]
        chunks = turns_of(layout.num_chunks, layout.chunk_tokens, ranges)
        layers = version.columns + layout.layer_chunks * np.arange(self._shape.num_layers)
        starts = layers[:, None] + layout.num_chunks * self._certain
        self._cache.expect(starts.reshape(-1), chunks)

    def _expect_codes(self, version: CachedSegment, ranges: Sequence[AwaitedRange]) -> None:
        if version.codes is None:
            return
        layout = version.layout.codes[0]
        pages = turns_of(layout.num_pages, layout.page_groups * layout.group_tokens, ranges)
        count = len(chunks_of(layout).count)
        layers = version.codes + count * np.arange(self._shape.num_layers)
        self._codes.expect(layers, pages)

    @locked
    def history(self, stored: StoredSegment) -> TokenHistory:
        """The history of the tokens of a segment, which is made if there is none."""
        if stored.history is None:
            num_tokens = stored.info.num_tokens
            stored.history = TokenHistory(
                self._shape.num_layers,
                self._shape.num_head_groups,
                num_tokens,
                by_importance=self._by_importance,
            )
        return stored.history

    @locked
    def cached_bytes(self, segment_id: str) -> npt.NDArray[np.int64]:
        """How many bytes of a segment are in the caches, by `Tier`."""
        version, found = self._versions.get(segment_id), np.zeros(len(Tier), np.int64)
        kinds = []
        if version is not None and version.columns is not None:
            pages = self._cache.page.chunk_pages(version.layout)
            kinds.append((self._cache, self.tiers(version, codes=False), pages))
        if version is not None and version.codes is not None:
            pages = cached_pages(version.layout.codes)
            kinds.append((self._codes, self.tiers(version, codes=True), pages))
        for cache, tiers, pages in kinds:
            found += np.bincount(tiers, pages, len(Tier)).astype(np.int64) * cache.page.page_bytes
        found[Tier.SSD] = 0
        return found

    @locked
    def acquire(
        self, stored: StoredSegment, opened: OpenSegment | None = None
    ) -> OpenSegment | None:
        """Count one more reader of a version that is open, or was just `opened`; else None."""
        version = self._versions.get(stored.segment_id)
        if opened is None and version is None:
            return None
        version = self.of(stored)
        assert opened is None or version.segment is None
        version.segment = opened or version.segment
        version.readers += version.segment is not None
        return version.segment

    @locked
    def release(self, segment_id: str) -> None:
        """End one reader of a version; after the last one its file is closed."""
        version = self._versions[segment_id]
        version.readers -= 1
        if version.readers:
            return
        assert version.segment is not None
        version.segment.close()
        version.segment = None
        if version.retired:
            self._forget(segment_id)

    @locked
    def retire(self, segment_id: str) -> None:
        """Retire a segment that has left the tree; its chunks go after the last reader."""
        version = self._versions.get(segment_id)
        if version is None:
            return
        version.retired = True
        if not version.readers:
            self._forget(segment_id)

    @locked
    def succeed(self, old_id: str, new: StoredSegment, shares: Floats) -> None:
        """Let a reordered version take over: its chunks inherit what is known of the old ones.

        Args:
            old_id: the version that is replaced, still known here.
            new: the segment with its new description.
            shares: float64 [L, head groups, chunks], expected share of selected rows.
        """
        old = self._versions.get(old_id)
        if old is None:
            return
        layout = new.info.layout()
        version = CachedSegment(new.segment_id, layout, new.info.reordered)
        self._versions[new.segment_id] = version
        if old.columns is None:
            return
        base = self._cache.attach(self._cache.page.chunk_pages(layout))
        expected = expected_shares(layout, shares)
        # Averages of few requests say nothing of the tokens that none of them selected, but the
        # places of these tokens do: they count like one more request.
        requests = 0.0 if new.history is None else float(new.history.accesses.mean())
        by_place = first_shares(layout, self._retention, ordered=True)
        chances = (requests * expected + by_place) / (requests + 1)
        version.columns, version.blocks = base, BlockHistory(layout, chances)
        ids = np.arange(layout.total_chunks)
        self._cache.placement.inherit(base + ids, old.columns + ids, expected)

    @locked
    def check_integrity(self, live: Iterable[str]) -> None:
        """Compare versions with the segments in the tree, and check the caches.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        known = set(live)
        for segment_id, version in self._versions.items():
            _check_readers(version)
            assert version.retired == (segment_id not in known)
            assert not version.retired or version.readers
        self._cache.check_integrity()
        self._codes.check_integrity()

    @locked
    def check(self, segment_id: str) -> None:
        """Check the version of a segment in the tree.

        Raises:
            AssertionError: as for `check_integrity`.
        """
        if (version := self._versions.get(segment_id)) is not None:
            _check_readers(version)
            assert not version.retired

    def _forget(self, segment_id: str) -> None:
        version = self._versions.pop(segment_id)
        if version.codes is not None:
            self._codes.detach(version.codes, self._num_codes(version))
        if version.columns is not None:
            self._cache.detach(version.columns, version.layout.total_chunks)

    def _num_codes(self, version: CachedSegment) -> int:
        """How many chunks in codes a version has."""
        assert version.layout.codes, "the store has no codes"
        return self._shape.num_layers * len(chunks_of(version.layout.codes[0]).count)


def _check_readers(version: CachedSegment) -> None:
    assert version.readers >= 0
    assert (version.segment is not None) == (version.readers > 0)


def _tiers(cache: ChunkCache, first: int | None, count: int) -> npt.NDArray[np.uint8]:
    """The tiers of chunks with neighbouring ids; SSD if they have no ids."""
    if first is None:
        return np.full(count, Tier.SSD, np.uint8)
    return cache.placement.tiers(first, count)


def turns_of(
    num_chunks: int, chunk_tokens: int, ranges: Sequence[AwaitedRange]
) -> npt.NDArray[np.int64]:
    """The turn at which each chunk is needed next, int64 [num_chunks]; -1: nobody waits."""
    turns = np.full(num_chunks, NOBODY)
    for start, stop, turn in ranges:
        turns[start // chunk_tokens : -(-stop // chunk_tokens)] = turn
    return turns


def certain_columns(shape: KVShape, *, whole: bool) -> Sequence[Column]:
    """Columns that are read in full: all if `whole`, otherwise those that choose the tokens."""
    if whole:
        return shape.columns
    return (PROBE,) if shape.probe_kv_heads else shape.key_columns
