"""On how many approximations the KVs in slots rest: against a dictionary of slots."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from impress_sglang.plugin.provenance import Provenance

SLOTS = 12


def slots_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_depths_have_an_end_and_stay_depths() -> None:
    provenance = Provenance(SLOTS, torch.device("cpu"))
    provenance.mark(slots_of(0), 1000)
    provenance.mark_computed(slots_of(0), slots_of(1))
    assert provenance.depth(slots_of(1)) == provenance.depth(slots_of(0)) == 63
    assert provenance.loaded_before(slots_of(0, 1)) == 1


class ProvenanceMachine(RuleBasedStateMachine):
    """Paths of a tree whose slots are given away and taken again."""

    @initialize()
    def start(self) -> None:
        self.provenance = Provenance(SLOTS, torch.device("cpu"))
        # By slot: its depth, and whether it was loaded.
        self.slots: dict[int, tuple[int, bool]] = {}
        self.paths: list[list[int]] = []

    def free(self) -> list[int]:
        return [slot for slot in range(SLOTS) if slot not in self.slots]

    def draw(self, data: st.DataObject) -> tuple[list[int], list[int]]:
        """A path, or the root, and slots that are new behind it."""
        above = data.draw(st.sampled_from([[], *self.paths]))
        count = data.draw(st.integers(1, min(4, len(self.free()))))
        slots = data.draw(st.permutations(self.free()))[:count]
        self.paths.append([*above, *slots])
        return above, slots

    @precondition(lambda self: self.free())
    @rule(data=st.data(), depth=st.integers(0, 3))
    def load(self, data: st.DataObject, depth: int) -> None:
        _, slots = self.draw(data)
        self.provenance.mark(slots_of(*slots), depth)
        self.slots.update(dict.fromkeys(slots, (depth, True)))

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        above, slots = self.draw(data)
        self.provenance.mark_computed(slots_of(*above), slots_of(*slots))
        depth = max((self.slots[slot][0] for slot in above), default=0)
        self.slots.update(dict.fromkeys(slots, (depth, False)))

    @precondition(lambda self: self.paths)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        path = self.paths.pop(data.draw(st.integers(0, len(self.paths) - 1)))
        used = {slot for path in self.paths for slot in path}
        for slot in set(path) - used:
            del self.slots[slot]

    @rule()
    def flush(self) -> None:
        self.provenance.clear()
        self.slots.clear()
        self.paths.clear()

    @invariant()
    def same(self) -> None:
        for path in self.paths:
            marks = [self.slots[slot] for slot in path]
            assert self.provenance.depth(slots_of(*path)) == max(depth for depth, _ in marks)
            loaded = max((n for n, (_, is_loaded) in enumerate(marks, 1) if is_loaded), default=0)
            assert self.provenance.loaded_before(slots_of(*path)) == loaded


TestProvenance = ProvenanceMachine.TestCase
