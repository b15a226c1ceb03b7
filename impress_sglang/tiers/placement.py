"""Where each chunk stands: SSD alone, or in addition the device or the host cache.

The two caches are exclusive; the SSD has everything, so that eviction never writes. After each
access the paper's rule (4.4.2) decides, best chunk first:

  * found on the device: it stays;
  * found on the host: it moves to the device if its priority beats the lowest there;
  * found on SSD: to the device if it beats the lowest there, else to the host if it beats the
    lowest there, else it stays on SSD.

What a newcomer displaces from the device contends for the host in turn; what is displaced from the
host is dropped. Decisions are pure arithmetic on ids and pages: nothing is read or copied here, so
a decision can precede the read that it asks for, and a trace can be replayed without data.

Memory is given in pages of one size. A chunk takes some pages, wherever they are.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from impress_sglang import loops
from impress_sglang.tiers.heap import LowestFirst
from impress_sglang.tiers.rules import Floats, Ids, ReplacementRule

Pages = npt.NDArray[np.int32]
_FIRST_CHUNKS = 1024


class Tier(enum.IntEnum):
    """Where a chunk is found; `SSD` means in no cache."""

    SSD = 0
    HOST = 1
    DEVICE = 2


CACHES = (Tier.DEVICE, Tier.HOST)
# Looking a member of an enumeration up costs more than most steps of a decision.
_SSD, _HOST, _DEVICE = int(Tier.SSD), int(Tier.HOST), int(Tier.DEVICE)
_Origins = dict[int, tuple[int, list[int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class PlacementStats:
    """Counters since start, in chunks."""

    promoted: int = 0
    demoted: int = 0
    admitted_device: int = 0
    admitted_host: int = 0
    dropped: int = 0


@dataclasses.dataclass(slots=True)
class Move:
    """A chunk whose bytes must be brought to another place (tiers and pages)."""

    chunk: int
    source: int
    source_pages: list[int]
    target: int
    target_pages: list[int]


@dataclasses.dataclass(slots=True)
class Access:
    """Where the accessed chunks stood, in the order of the ids, and what moves now.

    `tiers` uint8 [n]; `pages` int32 [n, width], of which a chunk uses the first few, empty if none
    was cached; `kept` bool [n]: found on SSD and now to be cached, so its whole chunk is wanted.
    """

    tiers: npt.NDArray[np.uint8]
    pages: Pages
    kept: npt.NDArray[np.bool_]
    moves: tuple[Move, ...]


class _FreePages:
    """Pages of a tier that no chunk stands in: those given back, and those never used."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._returned: list[int] = []
        self._fresh = 0

    def __len__(self) -> int:
        return len(self._returned) + self._num_pages - self._fresh

    def take(self, count: int) -> list[int]:
        """`count` pages, which must be there."""
        assert count <= len(self)
        first = max(len(self._returned) - count, 0)
        pages = self._returned[first:]
        del self._returned[first:]
        missing = count - len(pages)
        pages.extend(range(self._fresh, self._fresh + missing))
        self._fresh += missing
        return pages

    def give(self, pages: list[int]) -> None:
        """Take pages back."""
        self._returned.extend(pages)

    def check_integrity(self, held: list[int]) -> None:
        """The pages that are held and those that are free are all there are, once.

        Raises:
            AssertionError: they are not, which is a bug.
        """
        assert 0 <= self._fresh <= self._num_pages
        assert sorted([*held, *self._returned]) == list(range(self._fresh))


class Placement:
    """Places the chunks of two caches; ids are handed out by `attach`. Not thread-safe."""

    def __init__(
        self, rule: ReplacementRule, *, device_pages: int, host_pages: int, max_chunk_pages: int
    ) -> None:
        """Capacities are in pages; a chunk of more than `max_chunk_pages` is never cached."""
        # How many chunks went from tier to tier, by 3 * source + target.
        self._moved = [0] * 9
        self.capacity: dict[int, int] = {Tier.DEVICE: device_pages, Tier.HOST: host_pages}
        self._rule = rule
        self._width = max_chunk_pages
        # Two views of the same bytes: single elements are read faster from the second.
        self._tiers = np.zeros(0, np.uint8)
        self._tier_of = self._tiers.data
        self._pages: Pages = np.zeros((0, max_chunk_pages), np.int32)
        self._num_pages = np.zeros(0, np.uint16)
        # Pages of the cached chunks again, as lists: decisions take one chunk at a time.
        self._own_pages: dict[int, list[int]] = {}
        self._free = {tier: _FreePages(pages) for tier, pages in self.capacity.items()}
        self._heaps: dict[int, LowestFirst] = {
            tier: LowestFirst(self._member_test(tier)) for tier in CACHES
        }
        self._counts: dict[int, int] = dict.fromkeys(CACHES, 0)
        self._gaps: list[tuple[int, int]] = []
        self._grow(_FIRST_CHUNKS)

    @property
    def stats(self) -> PlacementStats:
        """Counters since start."""
        moved = self._moved
        return PlacementStats(
            promoted=moved[3 * _HOST + _DEVICE],
            demoted=moved[3 * _DEVICE + _HOST],
            admitted_device=moved[3 * _SSD + _DEVICE],
            admitted_host=moved[3 * _SSD + _HOST],
            dropped=moved[3 * _HOST + _SSD] + moved[3 * _DEVICE + _SSD],
        )

    @property
    def enabled(self) -> bool:
        """Whether there is any cache."""
        return any(self.capacity.values())

    @property
    def num_bytes(self) -> int:
        """Memory of tables and heaps, in bytes."""
        own = (self._tiers, self._pages, self._num_pages)
        arrays = [v for v in (*own, *vars(self._rule).values()) if isinstance(v, np.ndarray)]
        heaps = sum(heap.num_bytes for heap in self._heaps.values())
        pages = sum(self.capacity.values())
        return (
            sum(array.nbytes for array in arrays) + heaps + 120 * len(self._own_pages) + 8 * pages
        )

    def used_pages(self, tier: int) -> int:
        """Pages of a cache that chunks stand in."""
        return self.capacity[tier] - len(self._free[tier])

    def cached_chunks(self, tier: int) -> int:
        """Chunks in a cache."""
        return self._counts[tier]

    def emptied(self, rule: ReplacementRule) -> Placement:
        """A placement without chunks, of the same pages."""
        return Placement(
            rule,
            device_pages=self.capacity[Tier.DEVICE],
            host_pages=self.capacity[Tier.HOST],
            max_chunk_pages=self._width,
        )

    def attach(self, num_pages: npt.NDArray[np.uint16]) -> int:
        """Take a range of ids for new chunks of so many pages each; returns the first."""
        size = len(num_pages)
        base = self._take_range(size)
        self._num_pages[base : base + size] = num_pages
        return base

    def detach(self, base: int, size: int) -> None:
        """Give a range of ids back; their chunks leave the caches."""
        ids = np.arange(base, base + size)
        self.drop(ids[self._tiers[ids] != Tier.SSD])
        self._rule.forget(ids)
        self._give_range(base, size)

    def drop(self, ids: Ids) -> None:
        """Remove chunks from the caches, without a decision."""
        for chunk in ids.tolist():
            if self._tier_of[chunk] != _SSD:
                self._release(chunk)

    def tiers(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """Where neighbouring chunks stand now, `Tier` values; not to be changed."""
        return self._tiers[first : first + count]

    def advance(self) -> None:
        """A new request begins."""
        factor = self._rule.advance()
        if factor != 1.0:
            for heap in self._heaps.values():
                heap.scale(factor)

    def inherit(self, ids: Ids, sources: Ids, shares: Floats) -> None:
        """New chunks replace old ones in the history of accesses; the caches keep the old ones."""
        self._rule.inherit(ids, sources, shares)

    def access(self, ids: Ids, shares: Floats) -> Access:
        """Count an access to distinct chunks and decide where they stand from now on.

        Args:
            ids: int64 [n].
            shares: float64 [n], share of each chunk's rows that is wanted.
        """
        tiers = self._tiers.take(ids)
        cached = bool(self._own_pages) and bool(np.count_nonzero(tiers))
        pages = self._pages.take(ids, axis=0) if cached else self._pages[:0]
        self._rule.record(ids, shares)
        if cached:
            for tier, heap in self._heaps.items():
                heap.note_falls(ids, tiers, int(tier), self._rule.priorities)
        # Looking for the lowest corrects the heaps; where all is on the device, nothing moves.
        settled = cached and int(tiers.min()) == _DEVICE
        moves = self._place(ids, tiers) if self.enabled and not settled else ()
        if moves:
            kept = (tiers == _SSD) & (self._tiers.take(ids) != _SSD)
        else:
            kept = np.zeros(len(ids), np.bool_)
        return Access(tiers, pages, kept, moves)

    def _place(self, ids: Ids, tiers: npt.NDArray[np.uint8]) -> tuple[Move, ...]:
        candidates = loops.find_candidates(
            ids,
            tiers,
            self._num_pages,
            self._rule.priorities,
            self._width,
            _DEVICE,
            self._lowest(_DEVICE),
            self._lowest(_HOST),
            len(self._free[_DEVICE]),
            len(self._free[_HOST]),
        )
        if not len(candidates):
            return ()
        origins: _Origins = {}
        chosen = ids[candidates]
        order = chosen[np.argsort(-self._rule.priorities[chosen], kind="stable")]
        self._place_in_order(order, origins)
        for tier, heap in self._heaps.items():
            if len(heap) > self._counts[tier] * 5 // 4 + 64:
                heap.compact(np.flatnonzero(self._tiers == tier), self._rule.priorities)
        return tuple(self._moves(origins))

    def _lowest(self, tier: int) -> float:
        lowest = self._heaps[tier].lowest(self._rule.priorities.data)
        return math.inf if lowest is None else lowest[0]

    def _place_in_order(self, ids: Ids, origins: _Origins) -> None:
        """Place chunks, best first.

        Where one finds no place, none that follows and is as large does, until something moves.
        """
        refused = self._width + 1
        columns = (self._num_pages[ids], self._rule.priorities[ids])
        rows = zip(ids.tolist(), *(column.tolist() for column in columns), strict=True)
        for chunk, num_pages, priority in rows:
            if num_pages >= refused and self._tier_of[chunk] == _SSD:
                continue
            if self._place_one(chunk, priority, origins):
                refused = self._width + 1
            elif self._tier_of[chunk] == _SSD:
                refused = num_pages

    def _place_one(self, chunk: int, priority: float, origins: _Origins) -> bool:
        """Move a chunk to the best tier where it beats the lowest; returns whether it moved."""
        victims = self._victims(_DEVICE, int(self._num_pages[chunk]), priority)
        if victims is None:
            on_ssd = self._tier_of[chunk] == _SSD
            return on_ssd and self._place_on_host(chunk, priority, origins)
        for victim, _ in victims:
            self._remember(victim, origins)
            self._release(victim)
        self._remember(chunk, origins)
        if self._tier_of[chunk] != _SSD:
            self._release(chunk)
        self._occupy(chunk, _DEVICE, priority)
        for victim, worth in reversed(victims):
            self._place_on_host(victim, worth, origins)
        return True

    def _place_on_host(self, chunk: int, priority: float, origins: _Origins) -> bool:
        victims = self._victims(_HOST, int(self._num_pages[chunk]), priority)
        if victims is None:
            return False
        for victim, _ in victims:
            self._remember(victim, origins)
            self._release(victim)
        self._remember(chunk, origins)
        self._occupy(chunk, _HOST, priority)
        return True

    def _victims(
        self, tier: int, num_pages: int, priority: float
    ) -> list[tuple[int, float]] | None:
        """Members to displace so that `num_pages` are free, lowest first; None if one is better."""
        free = len(self._free[tier])
        if free >= num_pages:
            return []
        if self.capacity[tier] < num_pages:
            return None
        heap, priorities = self._heaps[tier], self._rule.priorities.data
        victims: dict[int, float] = {}
        while free < num_pages:
            lowest = heap.lowest(priorities)
            if lowest is None or lowest[0] >= priority:
                for victim, worth in victims.items():
                    heap.push(victim, worth)
                return None
            heap.pop()
            worth, victim = lowest
            # A member may have several entries.
            if victim not in victims:
                victims[victim] = worth
                free += int(self._num_pages[victim])
        return list(victims.items())

    def _remember(self, chunk: int, origins: _Origins) -> None:
        if chunk not in origins:
            origins[chunk] = (self._tier_of[chunk], self._own_pages.get(chunk, []))

    def _moves(self, origins: _Origins) -> list[Move]:
        moves = []
        for chunk, (source, pages) in origins.items():
            target = self._tier_of[chunk]
            if target != source:
                self._moved[3 * source + target] += 1
            now = self._own_pages.get(chunk, [])
            if target != _SSD and (target != source or now != pages):
                moves.append(Move(chunk, source, pages, target, now))
        return moves

    def _occupy(self, chunk: int, tier: int, priority: float) -> None:
        count = int(self._num_pages[chunk])
        self._own_pages[chunk] = self._pages[chunk, :count] = self._free[tier].take(count)
        self._tier_of[chunk] = tier
        self._counts[tier] += 1
        self._heaps[tier].push(chunk, priority)

    def _release(self, chunk: int) -> None:
        tier = self._tier_of[chunk]
        self._free[tier].give(self._own_pages.pop(chunk))
        self._counts[tier] -= 1
        self._tier_of[chunk] = _SSD

    def _member_test(self, tier: int) -> Callable[[int], bool]:
        number = int(tier)
        return lambda chunk: self._tier_of[chunk] == number

    def _take_range(self, size: int) -> int:
        for position, (base, length) in enumerate(self._gaps):
            if length >= size:
                self._gaps[position] = (base + size, length - size)
                if length == size:
                    del self._gaps[position]
                return base
        self._grow(max(len(self._tiers) * 5 // 4, len(self._tiers) + size))
        return self._take_range(size)

    def _give_range(self, base: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._gaps, (base, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._gaps = merged

    def _grow(self, size: int) -> None:
        old = len(self._tiers)
        self._tiers = np.concatenate([self._tiers, np.zeros(size - old, np.uint8)])
        self._tier_of = self._tiers.data
        self._pages = np.concatenate([self._pages, np.zeros((size - old, self._width), np.int32)])
        self._num_pages = np.concatenate([self._num_pages, np.zeros(size - old, np.uint16)])
        self._rule.resize(size)
        for heap in self._heaps.values():
            heap.resize(size)
        self._give_range(old, size - old)

    def check_integrity(self) -> None:
        """Check that pages, tiers and heaps agree.

        Raises:
            AssertionError: they do not, which is a bug.
        """
        for tier in CACHES:
            members = np.flatnonzero(self._tiers == tier)
            assert len(members) == self._counts[tier]
            held = []
            for chunk in members.tolist():
                own = self._own_pages[chunk]
                assert self._pages[chunk, : self._num_pages[chunk]].tolist() == own
                held += own
            self._free[tier].check_integrity(held)
            self._heaps[tier].check_integrity(members.tolist(), self._rule.priorities)
        free = np.zeros(len(self._tiers), np.bool_)
        for base, length in self._gaps:
            assert not free[base : base + length].any()
            free[base : base + length] = True
        assert not self._tiers[free].any(), "a chunk without an owner is cached"
        assert len(self._own_pages) == sum(self._counts.values())
        assert not self._rule.priorities[free].any()
