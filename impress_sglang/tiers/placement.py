"""Decides the tier of each chunk: SSD only, or also the device or the host cache.

The SSD has all chunks, so eviction never writes. The rule is that of docs/design.md, "Tiers". This
module reads and copies no data, so that a decision can precede the read that it requires.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import threading

import numpy as np
import numpy.typing as npt

from impress_sglang.loops import heaps, placing
from impress_sglang.loops.heaps import Heaps
from impress_sglang.loops.placing import Caches, Journal
from impress_sglang.loops.types import Floats
from impress_sglang.threads import locked
from impress_sglang.tiers.rules import Ids, ReplacementRule, grown

_FIRST_CHUNKS = 1024
_NEVER = 1 << 62


class Tier(enum.IntEnum):
    """Fastest place of a chunk; `SSD` means in no cache."""

    SSD = 0
    HOST = 1
    DEVICE = 2


CACHES = (Tier.DEVICE, Tier.HOST)
_SSD, _HOST, _DEVICE = int(Tier.SSD), int(Tier.HOST), int(Tier.DEVICE)


@dataclasses.dataclass(frozen=True, slots=True)
class Moves:
    """Chunks to move to another tier, each once.

    `chunks` int64 [n] take `counts` uint16 [n] pages; `sources` and `targets` uint8 [n] are `Tier`
    values. `source_pages` and `target_pages` int64 are the pages of one chunk after another; those
    of a chunk on SSD are 0, 1, 2, ...
    """

    chunks: Ids
    counts: npt.NDArray[np.uint16]
    sources: npt.NDArray[np.uint8]
    source_pages: Ids
    targets: npt.NDArray[np.uint8]
    target_pages: Ids

    def __len__(self) -> int:
        return len(self.chunks)


_NO_TIERS, _NO_PAGES = np.empty(0, np.uint8), np.empty(0, np.int64)
_NO_MOVES = Moves(_NO_PAGES, np.empty(0, np.uint16), _NO_TIERS, _NO_PAGES, _NO_TIERS, _NO_PAGES)


@dataclasses.dataclass(slots=True)
class Access:
    """Tiers of the accessed chunks before the access, in the order of the ids, and the moves.

    `tiers` uint8 [n]; `pages` int64, of one chunk after another, counted within the chunk if it was
    on SSD, and empty if no chunk was cached; `kept` bool [n]: the chunk was on SSD and is cached
    now, so the whole chunk must be read.
    """

    tiers: npt.NDArray[np.uint8]
    pages: Ids
    kept: npt.NDArray[np.bool_]
    moves: Moves


class IdRanges:
    """Allocates ranges of ids, from the lowest gap that fits.

    Each call is one pass of NumPy over the gaps.
    """

    def __init__(self) -> None:
        self.gaps = np.array([[0, _NEVER]])
        """int64 [gaps, 2], ascending: begin and end of each gap; the last one has no end."""

    def take(self, size: int) -> int:
        """Take `size` neighbouring ids; returns the first."""
        gap = self.gaps[(self.gaps[:, 1] - self.gaps[:, 0] >= size).argmax()]
        base = int(gap[0])
        gap[0] += size
        if gap[0] == gap[1]:
            self.gaps = self.gaps[self.gaps[:, 0] < self.gaps[:, 1]]
        return base

    def put_back(self, base: int, size: int) -> None:
        """Give `size` ids from `base` on back."""
        stop = base + size
        # Adjacent gaps are merged with it.
        first = int(self.gaps[:, 1].searchsorted(base))
        last = int(self.gaps[:, 0].searchsorted(stop, "right"))
        touched = self.gaps[first:last].tolist()
        assert all(end == base or begin == stop for begin, end in touched), "an id is free twice"
        joined = sorted([base, stop, *itertools.chain.from_iterable(touched)])
        gaps = self.gaps[:first], [[joined[0], joined[-1]]], self.gaps[last:]
        self.gaps = np.concatenate(gaps)


class Placement:
    """Places the chunks of two caches; `attach` allocates their ids.

    Several threads may use it; between an access and the moves that follow from it, only one.
    """

    def __init__(
        self, rule: ReplacementRule, device_pages: int, host_pages: int, max_chunk_pages: int
    ) -> None:
        """Start with empty caches; capacities are in pages. A chunk with no page, or with more than
        `max_chunk_pages`, is never cached."""
        self._lock = threading.RLock()
        self.dropped = 0
        """Number of chunks evicted from the caches to make room for others."""
        self.evicted_scores: dict[int, float] = {}
        """By tier: the score, at that time, of the last chunk moved from it to a lower one; see
        `ReplacementRule.score`."""
        self.capacity: dict[int, int] = {Tier.DEVICE: device_pages, Tier.HOST: host_pages}
        self._rule = rule
        self._width = width = max_chunk_pages
        # Every chunk in a cache has at least one page.
        num_entries = max(host_pages, device_pages)
        capacity = np.array([host_pages, device_pages])
        none, places = np.zeros(0, np.uint8), np.zeros(0, np.int32)
        members, noted = np.zeros((2, 2, 1 + num_entries), np.int64)
        self._caches = Caches(
            tiers=none,
            num_pages=np.zeros(0, np.uint16),
            first=places,
            following=np.zeros((2, num_entries), np.int32),
            free=capacity.copy(),
            first_free=np.zeros(2, np.int64),
            capacity=capacity,
            heaps=Heaps(members, noted, np.zeros(2, np.int64), places, self._rule.priorities),
        )
        for row, count in zip(self._caches.following, capacity.tolist(), strict=True):
            row[:count] = np.arange(1, 1 + count)
        displaced, dropped = np.zeros((2, width), np.int64)
        sizes = np.zeros(2, np.int64)
        self._journal = Journal(_NO_PAGES, _NO_TIERS, _NO_PAGES, sizes, none, displaced, dropped)
        self._ids = IdRanges()
        self._grow(max(_FIRST_CHUNKS, host_pages + device_pages))

    @property
    def enabled(self) -> bool:
        """Whether there is any cache."""
        return any(self.capacity.values())

    def used_pages(self, tier: int) -> int:
        """Number of pages of a cache that chunks use."""
        return self.capacity[tier] - int(self._caches.free[tier - 1])

    def cached_chunks(self, tier: int) -> int:
        """Number of chunks in a cache."""
        return int(self._caches.heaps.sizes[tier - 1])

    @locked
    def attach(self, num_pages: npt.NDArray[np.uint16]) -> int:
        """Take a range of ids for new chunks with these numbers of pages; returns the first."""
        base = self._ids.take(len(num_pages))
        stop = base + len(num_pages)
        if stop > len(self._caches.tiers):
            self._grow(max(2 * len(self._caches.tiers), stop))
        self._caches.num_pages[base:stop] = num_pages
        return base

    @locked
    def detach(self, base: int, size: int) -> None:
        """Free a range of ids; their chunks are removed from the caches."""
        self.drop(np.arange(base, base + size))
        self._rule.forget(base, size)
        self._ids.put_back(base, size)

    @locked
    def drop(self, ids: Ids) -> None:
        """Remove chunks from the caches unconditionally."""
        placing.drop(self._caches, ids)

    def tiers(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """Return the current tiers of chunks with neighbouring ids, `Tier` values; read-only."""
        return self._caches.tiers[first : first + count]

    @locked
    def advance(self) -> None:
        """Note that a new request begins."""
        self._rule.advance()

    @locked
    def expect(self, firsts: Ids, turns: Ids) -> None:
        """Set the turns of requests that wait for runs of neighbouring chunks, or no longer do;
        turns are the same in each run: see `ReplacementRule.expect`.

        `firsts`: int64 [runs], the first id of each; `turns`: int64 [chunks of a run].
        """
        ids = (firsts[:, None] + np.arange(len(turns))).reshape(-1)
        self._rule.expect(ids, np.tile(turns, len(firsts)))
        heaps.note_falls(self._caches.heaps, ids, self._caches.tiers.take(ids))

    @locked
    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """Give new chunks the access history of old ones; the caches keep the old chunks."""
        self._rule.inherit(ids, sources, shares)

    @locked
    def access(self, ids: Ids, shares: Floats) -> Access:
        """Count an access to distinct chunks, and decide their tiers from now on.

        `shares`: float64 [n], wanted share of the rows of each chunk.
        """
        tiers = self._caches.tiers.take(ids)
        cached = bool(np.count_nonzero(tiers))
        pages = self._pages_of(ids) if cached else _NO_PAGES
        if self.enabled:
            self._rule.record(ids, shares)
        if cached:
            heaps.note_falls(self._caches.heaps, ids, tiers)
        # If all chunks are on the device, none moves.
        settled = cached and int(tiers.min()) == _DEVICE
        moves = self._place(ids, tiers) if self.enabled and not settled else _NO_MOVES
        if len(moves):
            kept = (tiers == _SSD) & (self._caches.tiers.take(ids) != _SSD)
        else:
            kept = np.zeros(len(ids), np.bool_)
        return Access(tiers, pages, kept, moves)

    def _pages_of(self, ids: Ids) -> Ids:
        """Pages of chunks, one after another, as in `Access`."""
        pages = np.empty(self._caches.num_pages.take(ids).sum(dtype=np.int64), np.int64)
        placing.put_pages(self._caches, ids, pages)
        return pages

    def _place(self, ids: Ids, tiers: npt.NDArray[np.uint8]) -> Moves:
        caches, priorities = self._caches, self._rule.priorities.take(ids)
        pages = caches.num_pages.take(ids)
        able = (tiers != _DEVICE) & (pages > 0) & (pages <= self._width)
        order = ids[able][np.argsort(-priorities[able], kind="stable")]
        # Each chunk is recorded once, and a cached chunk has at least one page.
        room = sum(self.capacity.values()) + len(ids) * self._width
        if room > len(self._journal.chunks):
            self._journal = self._journal._replace(
                chunks=np.empty(room, np.int64),
                sources=np.empty(room, np.uint8),
                pages=np.empty(room, np.int64),
            )
        placing.place(caches, order, self._journal)
        return self._moves() if self._journal.sizes[0] else _NO_MOVES

    def _moves(self) -> Moves:
        """Return the moves of chunks in the journal that are in a cache now, and empty it."""
        caches, journal = self._caches, self._journal
        count, end = journal.sizes.tolist()
        chunks, sources = journal.chunks[:count], journal.sources[:count]
        journal.sizes[:] = journal.marks[chunks] = 0
        targets, counts = caches.tiers.take(chunks), caches.num_pages.take(chunks)
        for tier in CACHES:
            left = chunks[(sources == tier) & (targets < tier)]
            if len(left):
                self.evicted_scores[tier] = self._rule.score(int(left[-1]))
        self.dropped += int(np.count_nonzero((sources != _SSD) & (targets == _SSD)))
        moving = targets != _SSD
        pages = journal.pages[:end][np.repeat(moving, counts)]
        chunks, sources = chunks[moving], sources[moving]
        places = self._pages_of(chunks)
        return Moves(chunks, counts[moving], sources, pages, targets[moving], places)

    def _grow(self, size: int) -> None:
        self._rule.resize(size)
        caches, heaps = self._caches, self._caches.heaps
        self._caches = caches._replace(
            tiers=grown(caches.tiers, size),
            num_pages=grown(caches.num_pages, size),
            first=grown(caches.first, size),
            heaps=heaps._replace(
                places=grown(heaps.places, size), priorities=self._rule.priorities
            ),
        )
        self._journal = self._journal._replace(marks=grown(self._journal.marks, size))

    @locked
    def check_members(self, tier: int, first: int, count: int) -> bool:
        """Check the invariants of some chunks of a cache, given by places in its heap.

        The time depends only on their number. Returns whether there are more after them.
        """
        caches, row = self._caches, tier - 1
        heaps, capacity = caches.heaps, self.capacity[tier]
        assert 0 <= caches.free[row] <= capacity
        end = 1 + int(heaps.sizes[row])
        places = np.arange(1 + first, min(1 + first + count, end))
        members, noted = heaps.members[row, places], heaps.noted[row, places]
        assert (caches.tiers[members] == tier).all()
        assert (heaps.places[members] == places).all()
        assert (noted <= heaps.priorities[members]).all()
        assert (heaps.noted[row, np.maximum(places // 2, 1)] <= noted).all()
        pages = self._pages_of(members)
        assert ((pages >= 0) & (pages < capacity)).all()
        return 1 + first + count < end
