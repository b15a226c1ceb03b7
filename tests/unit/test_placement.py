"""Where chunks stand after an access: scenarios, and models; ids, and tables that grow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from impress_sglang.loops.types import Floats
from impress_sglang.tiers.placement import CACHES, Access, IdRanges, Placement, Tier
from impress_sglang.tiers.rules import Ids, ReplacementRule, grown
from tests.unit.store_checks import check_placement, owned_ids

HOST, DEVICE = Tier.HOST, Tier.DEVICE
# Of a share that is 1.
UNIT = 2**32


class GivenPriorities(ReplacementRule):
    """A rule whose priority is the share of the last access: a test says what a chunk is worth."""

    def __init__(self) -> None:
        super().__init__(np.int64)

    def score(self, chunk: int) -> float:
        return float(self.priorities[chunk]) / UNIT

    def _count(self, ids: Ids, shares: Floats) -> None:
        self._tables[0][ids] = shares * UNIT


class Bench:
    """Eight chunks of a page each."""

    def __init__(self, device: int, host: int) -> None:
        self.rule = GivenPriorities()
        self.placement = Placement(self.rule, device, host, max_chunk_pages=1)
        assert self.placement.attach(np.ones(8, np.uint16)) == 0

    def access(self, chunk: int, worth: float) -> None:
        self.placement.access(np.array([chunk]), np.array([worth]))
        check_placement(self.placement)

    def fill(self, *worths: float) -> None:
        """Access chunks 0, 1, 2, ... one after another."""
        for chunk, worth in enumerate(worths):
            self.access(chunk, worth)

    def on(self, tier: Tier) -> list[int]:
        return np.flatnonzero(self.placement.tiers(0, 8) == tier).tolist()


Place = tuple[Tier, tuple[int, ...]]


def moves_of(access: Access) -> dict[int, tuple[Place, Place]]:
    """By chunk, its tier and pages before the access, and now."""
    moves, found, end = access.moves, dict[int, tuple[Place, Place]](), 0
    columns = (moves.chunks, moves.counts, moves.sources, moves.targets)
    for chunk, count, source, target in zip(*(column.tolist() for column in columns), strict=True):
        part = slice(end, end := end + count)
        pages, now = (tuple(ids[part].tolist()) for ids in (moves.source_pages, moves.target_pages))
        assert source or pages == tuple(range(count)), "from SSD comes all of it"
        assert chunk not in found, "one move for a chunk"
        found[chunk] = (Tier(source), pages), (Tier(target), now)
    assert end == len(moves.source_pages) == len(moves.target_pages)
    return found


@pytest.mark.parametrize(("chunk", "worth"), [(4, 4.0), (4, 2.0), (3, 4.0)])
def test_an_equal_priority_does_not_beat(chunk: int, worth: float) -> None:
    bench = Bench(2, 2)
    bench.fill(5, 4, 3, 2)

    bench.access(chunk, worth)

    assert bench.on(DEVICE) == [0, 1]
    assert worth > 2 or 3 in bench.on(HOST)


def test_an_id_that_is_given_to_another_chunk_is_not_awaited() -> None:
    bench = Bench(1, 0)
    bench.placement.expect(np.array([0]), np.array([0]))
    bench.access(0, 5.0)
    size = len(bench.placement._caches.tiers)
    bench.placement.detach(0, 8)
    assert bench.placement.attach(np.ones(8, np.uint16)) == 0
    assert not bench.rule._tables[0].any(), "nor is it worth what that was"
    bench.fill(1, 2)
    assert bench.on(DEVICE) == [1] and len(bench.placement._caches.tiers) == size


def test_what_left_a_tier_last_had_this_score() -> None:
    bench = Bench(1, 1)
    bench.fill(2, 1)
    assert bench.placement.evicted_scores == {}, "both had room"
    bench.access(2, 1.5)
    assert bench.placement.evicted_scores == {HOST: 1.0}
    bench.access(3, 3.0)  # 0 leaves the device for it, and 2 leaves the host for 0
    assert bench.placement.evicted_scores == {HOST: 1.5, DEVICE: 2.0}
    bench.access(4, 0.5)
    bench.placement.drop(np.arange(4))
    assert bench.placement.evicted_scores == {HOST: 1.5, DEVICE: 2.0}, "nobody made room"


# A table of the caches, which of its entries, and what is there in place of the right number.
DAMAGE: dict[str, tuple[str, Any, Any]] = {
    "a chunk in another tier": ("tiers", 0, HOST),
    "a chunk without an owner": ("tiers", 900, HOST),
    "two chunks in one page": ("first", 0, 1),
    "a wrong count": ("heaps.sizes", 0, 5),
    "a page free twice": ("following", (0, 1), 1),
    "an entry lost": ("heaps.members", (1, 1), 1),
    "a place that is not its own": ("heaps.places", 0, 1),
    "heaps in no order": ("heaps.noted", (1, 2), -1),
    "a priority that fell": ("heaps.priorities", 0, UNIT // 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed(damage: str) -> None:
    bench = Bench(3, 3)
    bench.fill(9, 8, 7, 6)
    table, at, value = DAMAGE[damage]
    entries = attrgetter(table)(bench.placement._caches)
    assert entries[at] != value

    entries[at] = value

    with pytest.raises(AssertionError):
        check_placement(bench.placement)


WIDTH = 3
# Rarely none, for nothing moves there.
CAPACITIES = st.sampled_from([8, 6, 5, 3, 0])
SIZES = st.lists(st.integers(1, WIDTH + 1), min_size=1, max_size=6)


class SortedModel:
    """The same with no heap and no pages."""

    def __init__(self, device: int, host: int) -> None:
        self.capacity = {Tier.DEVICE: device, Tier.HOST: host}
        self.members: dict[Tier, set[int]] = {Tier.DEVICE: set(), Tier.HOST: set()}
        self.sizes: dict[int, int] = {}
        self.worth: dict[int, float] = {}

    def tier(self, chunk: int) -> Tier:
        return next((tier for tier in CACHES if chunk in self.members[tier]), Tier.SSD)

    def used(self, tier: Tier) -> int:
        return sum(self.sizes[chunk] for chunk in self.members[tier])

    def remove(self, chunks: Iterable[int]) -> None:
        for members in self.members.values():
            members.difference_update(chunks)

    def access(self, worths: dict[int, float]) -> None:
        self.worth.update(worths)
        found = {chunk: self.tier(chunk) for chunk in worths}
        for chunk in sorted(worths, key=lambda chunk: -worths[chunk]):
            if found[chunk] == Tier.DEVICE or self.sizes[chunk] > WIDTH:
                continue
            displaced = self.enter(chunk, Tier.DEVICE)
            if displaced is not None:
                for victim in reversed(displaced):
                    self.enter(victim, Tier.HOST)
            elif self.tier(chunk) == Tier.SSD:
                self.enter(chunk, Tier.HOST)

    def enter(self, chunk: int, tier: Tier) -> list[int] | None:
        """It displaces the lowest members that make enough room; None if one is not lower."""
        displaced: list[int] = []
        room = self.capacity[tier] - self.used(tier)
        for member in sorted(self.members[tier], key=self.worth.__getitem__):
            if room >= self.sizes[chunk]:
                break
            if self.worth[member] >= self.worth[chunk]:
                return None
            displaced.append(member)
            room += self.sizes[member]
        if room < self.sizes[chunk]:
            return None
        self.remove([*displaced, chunk])
        self.members[tier].add(chunk)
        return displaced


class PlacementMachine(RuleBasedStateMachine):
    @initialize(device=CAPACITIES, host=CAPACITIES)
    def start(self, device: int, host: int) -> None:
        self.placement = Placement(GivenPriorities(), device, host, max_chunk_pages=WIDTH)
        self.model = SortedModel(device, host)
        self.segments = set[range]()
        self.places: dict[int, Place] = {}
        self.worth_count = 0
        self.attach([1, 2, 1])

    @rule(sizes=SIZES)
    def attach(self, sizes: list[int]) -> None:
        base = self.placement.attach(np.array(sizes, np.uint16))
        segment = range(base, base + len(sizes))
        assert self.model.sizes.keys().isdisjoint(segment), "no id has two owners"
        self.segments.add(segment)
        self.model.sizes.update(zip(segment, sizes, strict=True))
        self.model.worth.update(dict.fromkeys(segment, 0.0))

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(sorted(self.segments, key=lambda s: s.start)))
        self.placement.detach(segment.start, len(segment))
        self.segments.remove(segment)
        self.forget(segment)
        for chunk in segment:
            del self.model.sizes[chunk], self.model.worth[chunk]

    def forget(self, chunks: Iterable[int]) -> None:
        """They are in no cache."""
        self.model.remove(chunks)
        for chunk in chunks:
            self.places.pop(chunk, None)

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def access(self, data: st.DataObject) -> None:
        chunks = data.draw(
            st.lists(st.sampled_from(sorted(self.model.sizes)), min_size=1, unique=True)
        )
        worths = {chunk: self.draw_worth(data) for chunk in chunks}
        before = {chunk: self.model.tier(chunk) for chunk in self.model.sizes}

        found = self.placement.access(np.array(chunks), np.array(list(worths.values())))
        self.model.access(worths)

        self.check_access(chunks, before, found)

    def draw_worth(self, data: st.DataObject) -> float:
        """Distinct priorities: for equal ones the choice is open."""
        self.worth_count += 1
        return data.draw(st.integers(1, 30)) + self.worth_count * 1e-6

    def check_access(self, chunks: list[int], before: dict[int, Tier], found: Access) -> None:
        moved, page = moves_of(found), 0
        for number, chunk in enumerate(chunks):
            place, end = before[chunk], page + self.model.sizes[chunk]
            assert found.tiers[number] == place
            if place != Tier.SSD:
                assert (place, tuple(found.pages[page:end].tolist())) == self.places[chunk]
            kept = place == Tier.SSD and self.model.tier(chunk) != Tier.SSD
            assert found.kept[number] == kept
            page = end
        for chunk, was in before.items():
            now = self.model.tier(chunk)
            if (move := moved.pop(chunk, None)) is not None:
                place, self.places[chunk] = self.places.get(chunk), move[1]
                assert (move[0][0], move[1][0]) == (was, now) and now != Tier.SSD
                assert now != Tier.DEVICE or was != Tier.DEVICE
                assert was == Tier.SSD or move[0] == place
                assert len(move[1][1]) == self.model.sizes[chunk]
            elif now == Tier.SSD:
                self.places.pop(chunk, None)
            else:
                assert was == now, "no chunk changes its place without a move"
        assert not moved

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        chunks = data.draw(st.lists(st.sampled_from(sorted(self.model.sizes)), unique=True))
        self.placement.drop(np.array(chunks, np.int64))
        self.forget(chunks)

    @invariant()
    def same_chunks_in_the_same_caches(self) -> None:
        check_placement(self.placement)
        for tier in CACHES:
            members = self.model.members[tier]
            assert {chunk for chunk, place in self.places.items() if place[0] == tier} == members
            assert self.placement.cached_chunks(tier) == len(members)
            assert self.placement.used_pages(tier) == self.model.used(tier)
            pages = [page for chunk in members for page in self.places[chunk][1]]
            assert len(set(pages)) == len(pages)
            assert all(0 <= page < self.placement.capacity[tier] for page in pages)


TestPlacement = PlacementMachine.TestCase


@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_a_table_grows_where_it_is(dtype: type[np.generic]) -> None:
    shorter = grown(np.zeros(0, dtype), 10)
    shorter[:] = 3

    longer = grown(shorter, 1_000_000)

    assert longer.dtype == dtype and len(longer) == 1_000_000
    assert longer[:10].tolist() == [3] * 10 and not longer[10:].any()
    longer[2] = 5
    assert shorter[2] == 5, "they are the same entries"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=60), st.data())
def test_the_lowest_range_that_fits_is_taken(
    steps: list[tuple[bool, int]], data: st.DataObject
) -> None:
    ids, taken, ranges = IdRanges(), set[int](), list[range]()
    for takes, size in steps:
        if takes or not ranges:
            free = (range(base, base + size) for base in itertools.count())
            ranges.append(next(numbers for numbers in free if not taken & {*numbers}))
            assert ids.take(size) == ranges[-1].start
            taken |= {*ranges[-1]}
        else:
            gone = ranges.pop(data.draw(st.integers(0, len(ranges) - 1)))
            ids.put_back(gone.start, len(gone))
            taken -= {*gone}
        assert set(np.flatnonzero(owned_ids(ids, 400)).tolist()) == taken
        # As few gaps as possible.
        assert (ids.gaps[:-1, 1] < ids.gaps[1:, 0]).all()
