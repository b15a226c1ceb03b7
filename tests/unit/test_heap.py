"""The heap of a tier against a plain minimum over its members."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from impress_sglang.tiers.heap import LowestFirst

SIZE = 12
CHUNKS = st.integers(0, SIZE - 1)
# Few values, so that some are equal.
PRIORITIES = st.integers(1, 9).map(float)


class HeapMachine(RuleBasedStateMachine):
    """Members come and go and their priorities move, as `Placement` moves them."""

    @initialize()
    def start(self) -> None:
        self.members: set[int] = set()
        self.priorities = np.arange(1.0, SIZE + 1)
        self.heap = LowestFirst(self.members.__contains__)
        self.heap.resize(SIZE)

    @rule(chunk=CHUNKS, priority=PRIORITIES)
    def add_or_move(self, chunk: int, priority: float) -> None:
        """What may be a fall is told; a chunk may also change while it is no member."""
        self.priorities[chunk] = priority
        if chunk in self.members:
            self.heap.note_falls(np.array([chunk]), np.ones(1, np.uint8), 1, self.priorities)

    @rule(chunk=CHUNKS)
    def add(self, chunk: int) -> None:
        if chunk not in self.members:
            self.members.add(chunk)
            self.heap.push(chunk, float(self.priorities[chunk]))

    @rule(chunk=CHUNKS, rise=PRIORITIES)
    def raise_priority(self, chunk: int, rise: float) -> None:
        self.priorities[chunk] += rise

    @rule(chunk=CHUNKS)
    def remove(self, chunk: int) -> None:
        """A removal is never told."""
        self.members.discard(chunk)

    @precondition(lambda self: self.members)
    @rule()
    def take_the_lowest(self) -> None:
        found = self.heap.lowest(self.priorities)
        assert found is not None
        self.heap.pop()
        self.members.remove(found[1])

    @precondition(lambda self: self.members)
    @rule()
    def take_the_lowest_and_give_it_back(self) -> None:
        found = self.heap.lowest(self.priorities)
        assert found is not None
        self.heap.pop()
        self.heap.push(found[1], found[0])

    @rule(factor=st.sampled_from([0.5, 2.0**-300, 3.0]))
    def scale(self, factor: float) -> None:
        if self.priorities.min() * factor < 1e-200 or self.priorities.max() * factor > 1e200:
            factor = 1.0 / self.priorities.min()
        self.priorities *= factor
        self.heap.scale(factor)

    @rule()
    def compact(self) -> None:
        self.heap.compact(np.array(sorted(self.members), np.int64), self.priorities)

    @invariant()
    def finds_the_lowest(self) -> None:
        if not hasattr(self, "heap"):
            return
        self.heap.check_integrity(self.members, self.priorities)
        found = self.heap.lowest(self.priorities)
        if found is None:
            assert not self.members
            return
        priority, chunk = found
        assert chunk in self.members
        assert priority == self.priorities[chunk]
        assert priority == min(self.priorities[list(self.members)])
        assert self.heap.lowest(self.priorities) == found, "it stays"
        self.heap.check_integrity(self.members, self.priorities)


TestHeap = HeapMachine.TestCase


def heap_of(*priorities: float) -> tuple[LowestFirst, set[int], Any]:
    members = set(range(len(priorities)))
    heap = LowestFirst(members.__contains__)
    heap.resize(len(priorities) + 1)
    for chunk, priority in enumerate(priorities):
        heap.push(chunk, priority)
    return heap, members, np.array(priorities)


def test_an_empty_heap_has_no_lowest() -> None:
    heap, _, priorities = heap_of()

    assert heap.lowest(priorities) is None
    assert len(heap) == 0


def test_entries_of_chunks_that_left_go_when_they_come_up() -> None:
    heap, members, priorities = heap_of(1.0, 2.0, 3.0)
    members -= {0, 1}

    assert len(heap) == 3
    assert heap.lowest(priorities) == (3.0, 2)
    assert len(heap) == 1


def test_members_come_out_in_order() -> None:
    heap, members, priorities = heap_of(5.0, 1.0, 4.0, 2.0, 3.0)
    found = []
    while (lowest := heap.lowest(priorities)) is not None:
        heap.pop()
        members.remove(lowest[1])
        found.append(lowest[0])

    assert found == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_compacting_leaves_one_entry_per_member_when_most_are_out_of_date() -> None:
    heap, members, priorities = heap_of(*range(1, 101))
    kept = np.array([3, 50, 99])
    members.intersection_update(kept.tolist())

    heap.compact(kept, priorities)

    assert len(heap) == 3
    assert heap.lowest(priorities) == (4.0, 3)


@pytest.mark.parametrize("noted", [None, 2.5])
def test_a_member_without_an_entry_at_or_below_its_priority_is_noticed(
    noted: float | None,
) -> None:
    heap, members, priorities = heap_of(1.0, 2.0)
    members.add(2)
    if noted is not None:
        heap.push(2, noted)
    priorities = np.append(priorities, 2.4)

    with pytest.raises(AssertionError):
        heap.check_integrity(members, priorities)


def test_a_priority_that_fell_untold_is_noticed() -> None:
    heap, members, priorities = heap_of(1.0, 2.0)
    priorities[1] = 1.5

    with pytest.raises(AssertionError):
        heap.check_integrity(members, priorities)


def test_a_fall_adds_an_entry_only_below_what_is_noted() -> None:
    """Priorities that rise and fall a little, as scores do, leave the heap as it is."""
    heap, _, priorities = heap_of(1.0, 2.0, 3.0)
    everything = np.arange(3)
    priorities += 5.0
    heap.note_falls(everything, np.ones(3, np.uint8), 1, priorities)
    priorities -= 1.0
    heap.note_falls(everything, np.ones(3, np.uint8), 1, priorities)
    assert len(heap) == 3

    priorities[2] = 0.5
    heap.note_falls(everything, np.ones(3, np.uint8), 1, priorities)

    assert len(heap) == 4
    assert heap.lowest(priorities) == (0.5, 2)
