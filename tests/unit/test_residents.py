"""Parts of stored segments in slots: who gets them, and when their slots are given back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from impress_sglang.management.residents import ResidentParts
from impress_sglang.management.stored import StoredMatch, StoredSegment, StoredSpan
from impress_sglang.precision.layout import CodeLayout
from impress_sglang.transfer.resident import PartUse, ResidentPart
from tests.unit.kv_factory import make_shape, stored_segment

SHAPE = make_shape(layers=2, key_dim=64, value_dim=64, probe=(), coded=True)
LENGTH = 40


def segment(name: str) -> StoredSegment:
    return stored_segment(name, range(LENGTH), shape=SHAPE)


class Residents:
    """Parts over segments, and slots that are taken and given back."""

    def __init__(self, page_size: int = 1) -> None:
        self.taken: set[int] = set()
        self.parts = ResidentParts(self._free, page_size)
        self._page_size = page_size
        self._next = 0

    def _free(self, slots: Tensor) -> None:
        own = set(slots.tolist())
        assert own <= self.taken, "slots are given back that nobody has"
        pages = {slot // self._page_size for slot in own}
        assert len(own) == len(pages) * self._page_size, "pages are given back as a whole"
        self.taken -= own

    def admit(self, spans: Sequence[StoredSpan], first: int = 0) -> list[PartUse]:
        """Use some spans, from a token of a row on, as a request does when it is admitted."""
        uses = []
        for cover in self.parts.cover(spans, first):
            span, part = cover.span, cover.part
            if part is None:
                slots = torch.arange(self._next, self._next + len(span))
                self._next += len(span)
                self.taken |= set(slots.tolist())
                layout = span.segment.info.layout().codes
                assert isinstance(layout, CodeLayout)
                name = span.segment.segment_id
                part = ResidentPart(
                    name, layout, 2, span.start, span.stop, slots, alone=cover.alone
                )
                self.parts.add(part)
            uses.append(PartUse(part, span.start, span.stop))
        self.parts.use(uses)
        return uses

    @staticmethod
    def load(uses: Sequence[PartUse]) -> None:
        for use in uses:
            use.part.layers_loaded = use.part.num_layers


@pytest.fixture
def residents() -> Residents:
    return Residents()


def ranges(uses: Sequence[PartUse]) -> list[tuple[int, int]]:
    return [(use.start, use.stop) for use in uses]


def test_what_is_between_and_behind_parts_is_loaded(residents: Residents) -> None:
    own = segment("a")
    middle = residents.admit([StoredSpan(own, 10, 20)])
    uses = residents.admit([StoredSpan(own, 5, 30)])
    assert ranges(uses) == [(5, 10), (10, 20), (20, 30)]
    assert uses[1].part is middle[0].part
    again = residents.admit([StoredSpan(own, 8, 22)])
    assert ranges(again) == [(8, 10), (10, 20), (20, 22)]
    assert [use.part for use in again] == [use.part for use in uses]
    assert again[0].slots.tolist() == uses[0].slots.tolist()[3:]


def test_a_loaded_part_stays_until_it_is_evicted(residents: Residents) -> None:
    spans = [StoredSpan(segment(name), 0, 10) for name in "ab"]
    for span in spans:
        uses = residents.admit([span])
        residents.load(uses)
        residents.parts.leave(uses)
    assert (residents.parts.used_tokens, residents.parts.idle_tokens) == (0, 20)
    residents.parts.leave(residents.admit(spans[:1]))
    oldest = residents.parts.oldest()
    assert oldest is not None and oldest.segment_id == "b"
    assert residents.parts.evict(oldest) == 10
    assert len(residents.taken) == residents.parts.idle_tokens == 10


def test_what_requests_wait_for_is_given_up_last(residents: Residents) -> None:
    """Whatever part has these tokens by then: it may be loaded after the request began to wait."""
    own, other = segment("a"), segment("b")
    parts = residents.parts
    for rid in ("first", "second"):
        parts.lookahead.wait(rid, [StoredSpan(own, 5, 8), StoredSpan(own, 8, 20)])
    for span in (StoredSpan(own, 0, 10), StoredSpan(own, 20, 40), StoredSpan(other, 0, 10)):
        uses = residents.admit([span])
        residents.load(uses)
        parts.leave(uses)

    def order() -> list[tuple[str, int]]:
        idle = sorted(parts, key=parts.age)
        assert parts.oldest() is idle[0]
        return [(part.segment_id, part.start) for part in idle]

    assert order() == [("a", 20), ("b", 0), ("a", 0)]
    parts.lookahead.stop_waiting("first")
    parts.check_integrity()
    assert order() == [("a", 20), ("b", 0), ("a", 0)]
    parts.lookahead.wait("second", [StoredSpan(own, 25, 30), StoredSpan(other, 0, 5)])
    assert order() == [("a", 0), ("a", 20), ("b", 0)]
    parts.lookahead.wait("second", [])
    parts.check_integrity()
    assert order() == [("a", 0), ("a", 20), ("b", 0)]
    parts.lookahead.wait("third", [StoredSpan(own, 0, 30)])
    assert order() == [("b", 0), ("a", 0), ("a", 20)]
    parts.lookahead.stop_waiting("nobody")


def test_spans_of_one_segment_are_one(residents: Residents) -> None:
    """A node of the tree that was split, after which both halves are in the same segment."""
    own = segment("a")
    uses = residents.admit([StoredSpan(own, 0, 13), StoredSpan(own, 13, 30)])
    assert ranges(uses) == [(0, 30)]


def test_whole_pages_are_shared() -> None:
    """A page that has tokens of two segments is loaded again, and given back at once."""
    residents = Residents(page_size=4)
    trunk, branch = segment("a"), segment("b")
    long = residents.admit([StoredSpan(trunk, 0, 24)])
    forked = [StoredSpan(trunk, 0, 10), StoredSpan(branch, 0, 14)]
    uses = residents.admit(forked)
    assert ranges(uses) == [(0, 8), (8, 10), (0, 2), (2, 14)]
    assert [use.part.alone for use in uses] == [False, True, True, False]
    assert uses[0].part is long[0].part and len(residents.taken) == 24 + 16
    residents.load([*long, *uses])
    again = residents.admit([*forked[:1], StoredSpan(branch, 0, 6)])
    assert ranges(again) == [(0, 8), (8, 10), (0, 2), (2, 6)]
    assert again[3].part is uses[3].part and again[1].part is not uses[1].part
    residents.load(again)
    residents.parts.leave(again)
    residents.parts.leave(uses)
    assert len(residents.taken) == 24 + 12
    residents.parts.check_integrity()
    residents.parts.leave(long)
    # What is cut off ends with a page, whatever is asked for.
    residents.parts.cut_idle(forked)
    assert sorted(len(part) for part in residents.parts) == [8, 12, 16]


def test_tokens_of_many_segments_in_a_page() -> None:
    residents = Residents(page_size=8)
    lengths = {"a": 3, "b": 2, "c": 10, "d": 9}
    spans = [StoredSpan(segment(name), 0, length) for name, length in lengths.items()]
    uses = residents.admit(spans, first=16)
    assert ranges(uses) == [(0, 3), (0, 2), (0, 10), (0, 1), (1, 9)]
    assert [use.part.alone for use in uses] == [True, True, True, True, False]
    residents.parts.leave(uses)
    assert not residents.taken


def test_a_flush_forgets_all(residents: Residents) -> None:
    uses = residents.admit([StoredSpan(segment("a"), 0, 10)])
    residents.load(uses)
    residents.parts.leave(uses)
    residents.parts.forget_all()
    assert len(residents.taken) == 10, "the pool is emptied as a whole"
    assert not list(residents.parts) and residents.parts.oldest() is None


class Sharing(RuleBasedStateMachine):
    """Requests come and go in any order; slots are neither lost nor given to two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.residents = Residents()
        self.segments = [segment(name) for name in "ab"]
        self.live: list[list[PartUse]] = []

    @rule(number=st.integers(0, 1), a=st.integers(0, LENGTH - 1), b=st.integers(1, LENGTH))
    def admit(self, number: int, a: int, b: int) -> None:
        start, stop = min(a, b - 1), max(a + 1, b)
        uses = self.residents.admit([StoredSpan(self.segments[number], start, stop)])
        assert [t for use in uses for t in range(use.start, use.stop)] == [*range(start, stop)]
        assert not any(use.part.broken for use in uses)
        self.live.append(uses)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.residents.load(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.live) - 1))
        self.residents.parts.leave(self.live.pop(place))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def hide(self, data: st.DataObject) -> None:
        uses = data.draw(st.sampled_from(self.live))
        self.residents.parts.hide(data.draw(st.sampled_from(uses)).part)

    @rule()
    def evict(self) -> None:
        part = self.residents.parts.oldest()
        if part is not None:
            assert not any(use.part is part for uses in self.live for use in uses)
            self.residents.parts.evict(part)

    @invariant()
    def slots_belong_to_one_part_each(self) -> None:
        parts = self.residents.parts
        parts.check_integrity()
        slots = [slot for part in parts for slot in part.slots.tolist()]
        assert len(slots) == len(set(slots)) == len(self.residents.taken)
        assert parts.used_tokens + parts.idle_tokens == len(slots)
        used = {use.part for uses in self.live for use in uses}
        assert used == {part for part in parts if part.users}


class SharingInPages(Sharing):
    """The same where slots are pages, and one segment goes on in the middle of another one."""

    PAGE, FORK = 4, 13

    def __init__(self) -> None:
        super().__init__()
        self.residents = Residents(self.PAGE)

    @rule(number=st.integers(0, 1), a=st.integers(0, LENGTH), b=st.integers(0, LENGTH))
    def admit(self, number: int, a: int, b: int) -> None:
        start, stop = (row // self.PAGE * self.PAGE for row in (min(a, b), max(a, b)))
        if start == stop:
            return
        trunk, branch = self.segments
        forked = StoredSpan(trunk, 0, self.FORK), StoredSpan(branch, 0, LENGTH - self.FORK)
        match = StoredMatch(forked if number else (StoredSpan(trunk, 0, LENGTH),))
        self.residents.parts.cut_idle(match.slice(start, stop), start)
        uses = self.residents.admit(match.slice(start, stop), start)
        slots = torch.cat([use.slots for use in uses])
        assert len(slots) == stop - start
        pages = slots.view(-1, self.PAGE)
        assert (pages == pages[:, :1] + torch.arange(self.PAGE)).all() and not pages[0, 0] % 4
        self.live.append(uses)


for machine in (Sharing, SharingInPages):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSharing = Sharing.TestCase
TestSharingInPages = SharingInPages.TestCase
