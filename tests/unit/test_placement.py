"""Where chunks stand after an access: scenarios, and models; ids, and tables that grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    def __init__(self, device: int, host: int, sizes: Sequence[int], width: int = 4) -> None:
        self.rule = GivenPriorities()
        self.placement = Placement(
            self.rule, device_pages=device, host_pages=host, max_chunk_pages=width
        )
        self.base = self.placement.attach(np.array(sizes, np.uint16))
        assert self.base == 0

    def access(self, worths: dict[int, float]) -> Access:
        found = self.placement.access(
            np.array(list(worths), np.int64), np.array(list(worths.values()))
        )
        check_placement(self.placement)
        return found

    def fill(self, *worths: float) -> None:
        """Access chunks 0, 1, 2, ... one after another."""
        for chunk, worth in enumerate(worths):
            self.access({chunk: worth})

    def on(self, tier: Tier) -> set[int]:
        return set(np.flatnonzero(self.placement._caches.tiers == tier).tolist())

    @property
    def stand(self) -> tuple[set[int], set[int]]:
        return self.on(DEVICE), self.on(HOST)


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


def equal_chunks(device: int, host: int, count: int = 8) -> Bench:
    return Bench(device, host, [1] * count)


@pytest.mark.parametrize(("chunk", "worth"), [(4, 4.0), (4, 2.0), (3, 4.0)])
def test_an_equal_priority_does_not_beat(chunk: int, worth: float) -> None:
    bench = equal_chunks(2, 2)
    bench.fill(5, 4, 3, 2)

    bench.access({chunk: worth})

    assert 1 in bench.on(DEVICE) and chunk not in bench.on(DEVICE)
    assert worth > 2 or 3 in bench.on(HOST)


def expect(bench: Bench, turns: dict[int, int]) -> None:
    for chunk, turn in turns.items():
        bench.placement.expect(np.array([chunk]), np.array([turn]))
    check_placement(bench.placement)


def test_an_id_that_is_given_to_another_chunk_is_not_awaited() -> None:
    bench = equal_chunks(1, 0)
    expect(bench, {0: 0})
    bench.access({0: 5.0})
    size = len(bench.placement._caches.tiers)
    bench.placement.detach(0, 8)
    assert bench.placement.attach(np.ones(8, np.uint16)) == 0
    assert not bench.rule._tables[0].any(), "nor is it worth what that was"
    bench.fill(1, 2)
    assert bench.stand == ({1}, set()) and len(bench.placement._caches.tiers) == size


def test_what_left_a_tier_last_had_this_score() -> None:
    bench = equal_chunks(1, 1)
    bench.fill(2, 1)
    assert bench.placement.evicted_scores == {}, "both had room"
    bench.access({2: 1.5})
    assert bench.placement.evicted_scores == {HOST: 1.0}
    bench.access({3: 3.0})  # 0 leaves the device for it, and 2 leaves the host for 0
    assert bench.placement.evicted_scores == {HOST: 1.5, DEVICE: 2.0}
    bench.access({4: 0.5})
    bench.placement.drop(np.arange(4))
    assert bench.placement.evicted_scores == {HOST: 1.5, DEVICE: 2.0}, "nobody made room"


Damage = Callable[[Placement], object]


def corrupt(values: np.ndarray, at: object, value: object) -> None:
    values[at] = value


DAMAGE: dict[str, Damage] = {
    "a chunk in another tier": lambda p: corrupt(p._caches.tiers, 0, HOST),
    "a chunk without an owner": lambda p: corrupt(p._caches.tiers, 900, HOST),
    "two chunks in one page": lambda p: corrupt(p._caches.first, 0, p._caches.first[1]),
    "a wrong count": lambda p: corrupt(p._caches.heaps.sizes, 0, 5),
    "a page free twice": lambda p: corrupt(p._caches.following, (0, 1), 1),
    "an entry lost": lambda p: corrupt(
        p._caches.heaps.members, (1, 1), p._caches.heaps.members[1, 2]
    ),
    "a place that is not its own": lambda p: corrupt(
        p._caches.heaps.places, 0, p._caches.heaps.places[1]
    ),
    "heaps in no order": lambda p: corrupt(p._caches.heaps.noted, (1, 2), -1),
    "a priority that fell": lambda p: corrupt(p._rule.priorities, 0, UNIT // 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed(damage: str) -> None:
    bench = equal_chunks(3, 3)
    bench.fill(9, 8, 7, 6)
    check_placement(bench.placement)

    DAMAGE[damage](bench.placement)

    with pytest.raises(AssertionError):
        check_placement(bench.placement)


WIDTH = 3
# Rarely none, for nothing moves there.
CAPACITIES = st.sampled_from([8, 6, 5, 3, 0])
SIZES = st.lists(st.integers(1, WIDTH + 1), min_size=1, max_size=6)


class SortedModel:
    """Chunks by name, with no heap, no pages and no ids."""

    def __init__(self, device: int, host: int) -> None:
        self.capacity = {Tier.DEVICE: device, Tier.HOST: host}
        self.members: dict[Tier, set[str]] = {Tier.DEVICE: set(), Tier.HOST: set()}
        self.sizes: dict[str, int] = {}
        self.worth: dict[str, float] = {}

    def tier(self, name: str) -> Tier:
        return next((tier for tier in CACHES if name in self.members[tier]), Tier.SSD)

    def free(self, tier: Tier) -> int:
        return self.capacity[tier] - sum(self.sizes[name] for name in self.members[tier])

    def remove(self, name: str) -> None:
        for members in self.members.values():
            members.discard(name)

    def access(self, worths: dict[str, float]) -> None:
        self.worth.update(worths)
        found = {name: self.tier(name) for name in worths}
        for name in sorted(worths, key=lambda name: -worths[name]):
            if found[name] == Tier.DEVICE or self.sizes[name] > WIDTH:
                continue
            displaced = self.displaced_by(name, Tier.DEVICE)
            if displaced is not None:
                self.enter(name, Tier.DEVICE, displaced)
                for victim in sorted(displaced, key=lambda v: -self.worth[v]):
                    self.enter_host(victim)
            elif self.tier(name) == Tier.SSD:
                self.enter_host(name)

    def enter_host(self, name: str) -> None:
        displaced = self.displaced_by(name, Tier.HOST)
        if displaced is not None:
            self.enter(name, Tier.HOST, displaced)

    def enter(self, name: str, tier: Tier, displaced: list[str]) -> None:
        for gone in (*displaced, name):
            self.remove(gone)
        self.members[tier].add(name)

    def displaced_by(self, name: str, tier: Tier) -> list[str] | None:
        """The lowest members that make enough room; None if one of them is not lower."""
        displaced: list[str] = []
        room = self.free(tier)
        for member in sorted(self.members[tier], key=self.worth.__getitem__):
            if room >= self.sizes[name]:
                break
            if self.worth[member] >= self.worth[name]:
                return None
            displaced.append(member)
            room += self.sizes[member]
        return displaced if room >= self.sizes[name] else None


class PlacementMachine(RuleBasedStateMachine):
    @initialize(device=CAPACITIES, host=CAPACITIES)
    def start(self, device: int, host: int) -> None:
        self.rule = GivenPriorities()
        self.placement = Placement(
            self.rule, device_pages=device, host_pages=host, max_chunk_pages=WIDTH
        )
        self.model = SortedModel(device, host)
        self.segments: dict[str, tuple[int, int]] = {}
        self.ids: dict[str, int] = {}
        self.places: dict[str, Place] = {}
        self.worth_count = 0
        self.attach([1, 2, 1])

    def names(self, segment: str) -> list[str]:
        return [f"{segment}.{number}" for number in range(self.segments[segment][1])]

    @rule(sizes=SIZES)
    def attach(self, sizes: list[int]) -> None:
        segment = f"s{len(self.segments)}-{len(self.ids)}-{self.worth_count}"
        self.segments[segment] = (self.placement.attach(np.array(sizes, np.uint16)), len(sizes))
        for number, (name, size) in enumerate(zip(self.names(segment), sizes, strict=True)):
            self.ids[name] = self.segments[segment][0] + number
            self.model.sizes[name] = size
            self.model.worth[name] = 0.0
        assert len(set(self.ids.values())) == len(self.ids), "no id has two owners"

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        segment = data.draw(st.sampled_from(sorted(self.segments)))
        self.placement.detach(*self.segments[segment])
        for name in self.names(segment):
            self.model.remove(name)
            del self.ids[name], self.model.sizes[name], self.model.worth[name]
            self.places.pop(name, None)
        del self.segments[segment]

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def access(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.ids)), min_size=1, unique=True))
        worths = {name: self.draw_worth(data) for name in names}
        before = {name: self.model.tier(name) for name in self.ids}

        found = self.placement.access(
            np.array([self.ids[name] for name in names], np.int64), np.array(list(worths.values()))
        )
        self.model.access(worths)

        self.check_access(names, before, found)

    def draw_worth(self, data: st.DataObject) -> float:
        """Distinct priorities: for equal ones the choice is open."""
        self.worth_count += 1
        return data.draw(st.integers(1, 30)) + self.worth_count * 1e-6

    def check_access(self, names: list[str], before: dict[str, Tier], found: Access) -> None:
        moved = moves_of(found)
        ends = np.cumsum([self.model.sizes[name] for name in names])
        for number, name in enumerate(names):
            assert found.tiers[number] == before[name]
            if before[name] != Tier.SSD:
                pages = found.pages[ends[number] - self.model.sizes[name] : ends[number]]
                assert (before[name], tuple(pages.tolist())) == self.places[name]
            assert found.kept[number] == (
                before[name] == Tier.SSD and self.model.tier(name) != Tier.SSD
            )
        for name in self.ids:
            now = self.model.tier(name)
            if (move := moved.pop(self.ids[name], None)) is not None:
                place, self.places[name] = self.places.get(name), move[1]
                assert (move[0][0], move[1][0]) == (before[name], now) and now != Tier.SSD
                assert now != Tier.DEVICE or before[name] != Tier.DEVICE
                assert before[name] == Tier.SSD or move[0] == place
                assert len(move[1][1]) == self.model.sizes[name]
            elif now == Tier.SSD:
                self.places.pop(name, None)
            else:
                assert before[name] == now, "no chunk changes its place without a move"
        assert not moved

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.ids)), unique=True))
        self.placement.drop(np.array([self.ids[name] for name in names], np.int64))
        for name in names:
            self.model.remove(name)
            self.places.pop(name, None)

    @invariant()
    def same_chunks_in_the_same_caches(self) -> None:
        check_placement(self.placement)
        for tier in CACHES:
            members = self.model.members[tier]
            assert {name for name, place in self.places.items() if place[0] == tier} == members
            assert self.placement.cached_chunks(tier) == len(members)
            assert self.placement.used_pages(tier) == sum(map(self.model.sizes.get, members))  # type: ignore[arg-type]
            pages = [page for name in members for page in self.places[name][1]]
            assert len(set(pages)) == len(pages)
            assert all(0 <= page < self.placement.capacity[tier] for page in pages)


TestPlacement = PlacementMachine.TestCase


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.float64])
def test_a_table_grows_where_it_is(dtype: type[np.generic]) -> None:
    shorter = grown(np.zeros(0, dtype), 10)
    shorter[:] = 3

    longer = grown(shorter, 1_000_000)

    assert longer.dtype == dtype and len(longer) == 1_000_000
    assert longer.ctypes.data == shorter.ctypes.data
    assert longer[:10].tolist() == [3] * 10 and not longer[10:].any()
    longer[2] = 5
    assert shorter[2] == 5, "they are the same entries"


class Numbers:
    """Which numbers are given out, one by one."""

    def __init__(self) -> None:
        self.taken: set[int] = set()

    def take(self, size: int) -> int:
        base = 0
        while self.taken & set(range(base, base + size)):
            base += 1
        self.taken |= set(range(base, base + size))
        return base


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=60), st.data())
def test_the_lowest_range_that_fits_is_taken(
    steps: list[tuple[bool, int]], data: st.DataObject
) -> None:
    ids, model, ranges = IdRanges(), Numbers(), list[tuple[int, int]]()
    for takes, size in steps:
        if takes or not ranges:
            base = ids.take(size)
            assert base == model.take(size)
            ranges.append((base, size))
        else:
            base, size = ranges.pop(data.draw(st.integers(0, len(ranges) - 1)))
            ids.give(base, size)
            model.taken -= set(range(base, base + size))
        assert set(np.flatnonzero(owned_ids(ids, 400)).tolist()) == model.taken
        # As few gaps as possible.
        assert (ids.gaps[:-1, 1] < ids.gaps[1:, 0]).all()
