"""The heaps of a placement against a plain set that is searched."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from impress_sglang.loops import heaps
from impress_sglang.loops.heaps import Heaps

CHUNKS = 12
HOST, DEVICE = 1, 2


class HeapMachine(RuleBasedStateMachine):
    """Priorities live outside: they rise untold, and fall with `note_falls`."""

    def __init__(self) -> None:
        super().__init__()
        self.tiers = np.zeros(CHUNKS, np.uint8)
        members, noted = np.zeros((2, 2, 1 + CHUNKS), np.int64)
        self.heaps = Heaps(
            members,
            noted,
            sizes=np.zeros(2, np.int64),
            places=np.zeros(CHUNKS, np.int32),
            priorities=np.zeros(CHUNKS, np.int64),
        )

    def members(self, tier: int) -> list[int]:
        return np.flatnonzero(self.tiers == tier).tolist()

    @rule(chunk=st.integers(0, CHUNKS - 1), tier=st.sampled_from([HOST, DEVICE]))
    def enter(self, chunk: int, tier: int) -> None:
        if not self.tiers[chunk]:
            self.tiers[chunk] = tier
            heaps.enter(self.heaps, tier - 1, chunk)

    @precondition(lambda self: self.tiers.any())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(np.flatnonzero(self.tiers).tolist()))
        heaps.leave(self.heaps, self.tiers[chunk] - 1, chunk)
        self.tiers[chunk] = 0

    @precondition(lambda self: self.tiers.any())
    @rule(data=st.data(), tier=st.sampled_from([HOST, DEVICE]))
    def leave_together(self, data: st.DataObject, tier: int) -> None:
        leaving = [own for own in self.members(tier) if data.draw(st.booleans())]
        self.heaps.places[leaving] = self.tiers[leaving] = 0
        heaps.leave_marked(self.heaps, tier - 1)

    @rule(worths=st.dictionaries(st.integers(0, CHUNKS - 1), st.integers(0, 9), min_size=1))
    def change(self, worths: dict[int, int]) -> None:
        ids = np.array(list(worths))
        self.heaps.priorities[ids] = list(worths.values())
        heaps.note_falls(self.heaps, ids, self.tiers[ids])

    @invariant()
    def the_lowest_is_found(self) -> None:
        for tier in (HOST, DEVICE):
            members = self.members(tier)
            found = heaps.lowest(self.heaps, tier - 1)
            assert self.heaps.sizes[tier - 1] == len(members)
            expected = min(members, key=lambda own: (self.heaps.priorities[own], own), default=-1)
            assert found == expected

    @invariant()
    def what_is_noted_is_no_more_than_the_priority(self) -> None:
        own = np.flatnonzero(self.tiers)
        row = self.tiers[own] - 1, self.heaps.places[own]
        assert np.array_equal(self.heaps.members[row], own)
        assert (self.heaps.noted[row] <= self.heaps.priorities[own]).all()
        assert not self.heaps.places[self.tiers == 0].any()


TestHeap = HeapMachine.TestCase
