"""Where chunks stand after an access: each sentence of the paper's 4.4.2 as a scenario."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from impress_sglang.loops.types import Floats
from impress_sglang.tiers.placement import (
    Access,
    Placement,
    Tier,
)
from impress_sglang.tiers.rules import NOBODY, Ids, ReplacementRule

HOST, DEVICE = Tier.HOST, Tier.DEVICE
# Of a share that is 1.
UNIT = 2**32


class GivenPriorities(ReplacementRule):
    """A rule whose priority is the share of the last access: a test says what a chunk is worth."""

    def __init__(self) -> None:
        super().__init__(np.int64)

    def score(self, chunk: int) -> float:
        return float(self.priorities[chunk]) / UNIT

    def _count(self, ids: Ids, shares: Floats) -> Ids:
        self._tables[0][ids] = shares * UNIT
        return self._ranks(ids)


class Bench:
    """A placement, and where its chunks stand."""

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
        self.placement.check_integrity()
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


@dataclasses.dataclass(frozen=True)
class Move:
    """One of the moves of an access."""

    chunk: int
    source: Tier
    source_pages: tuple[int, ...]
    target: Tier
    target_pages: tuple[int, ...]


def each_move(access: Access) -> list[Move]:
    moves = access.moves
    columns = (moves.chunks, moves.counts, moves.sources, moves.targets)
    found = []
    for row, (chunk, count, source, target) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        before = tuple(moves.source_pages[row, :count].tolist()) if source else ()
        now = tuple(moves.target_pages[row, :count].tolist())
        found.append(Move(chunk, Tier(source), before, Tier(target), now))
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
    bench.placement.expect(np.array(list(turns)), np.array(list(turns.values())))
    bench.placement.check_integrity()


def test_what_requests_wait_for_is_displaced_last_and_the_latest_turn_first() -> None:
    bench = equal_chunks(2, 0)
    bench.fill(1, 2)
    expect(bench, {0: 5, 1: 9})
    bench.access({2: 1e9})
    assert bench.stand == ({0, 1}, set()), "nobody waits for 2"
    expect(bench, {3: 7})
    bench.access({3: 1})
    assert bench.stand == ({0, 3}, set())

    expect(bench, {0: NOBODY, 3: NOBODY})
    bench.access({4: 2})

    assert len(bench.on(DEVICE) - {4}) == 1 and 4 in bench.on(DEVICE)


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
    "a page free twice": lambda p: corrupt(p._caches.stacks, (0, 0), p._caches.stacks[0, 1]),
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
    bench.placement.check_integrity()

    DAMAGE[damage](bench.placement)

    with pytest.raises(AssertionError):
        bench.placement.check_integrity()
