"""How requests reuse stored text that is no prefix: what comes into slots."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable
from impress_sglang.management.policies import LoadOptions
from impress_sglang.precision.codec import GROUP_TOKENS, LEVELS, code_keys, code_values
from impress_sglang.precision.codec import restore as restore_codes
from impress_sglang.serving.paper import blended_loading
from impress_sglang.serving.paper.blend_plan import BlendPlan, Kind, apart
from impress_sglang.storage.layout import KVShape
from impress_sglang.timeline import NO_TIMELINE
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.slots import LayerSlots
from tests.unit import blending_desk
from tests.unit.blending_desk import ROTATION, SHAPE, Desk, texts
from tests.unit.kv_factory import SequenceKVs
from tests.unit.spying import calls_of
from tests.unit.store_factory import Workbench

bench = blending_desk.bench


def restore(desk: Desk, plan: BlendPlan, shape: KVShape) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of each layer of a prefix, NaN where nothing is stored."""
    loading = desk.loading(plan)
    slots = torch.randperm(plan.k, generator=torch.Generator().manual_seed(1))
    layers = range(shape.num_layers)
    size = plan.k, shape.num_kv_heads, 8
    keys = [torch.full(size, math.nan) for _ in layers]
    values = [torch.full(size, math.nan) for _ in layers]
    try:
        for number, block in enumerate(loading.blocks):
            loading.begin_block(number)
            for layer in layers:
                own = slots[block.start - plan.resident_len : block.stop - plan.resident_len]
                pools = LayerSlots.of(keys[layer], values[layer])
                loading.restore(number, layer, pools, own, LoadStats())
            loading.end_block(number)
    finally:
        assert len(loading.close()) == sum(len(block.groups) for block in loading.blocks)
    return [own[slots] for own in keys], [own[slots] for own in values]


def rounded(tokens: list[int], layer: int, part: slice, bits: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some tokens of a segment in so many bits."""
    own = SequenceKVs(SHAPE, "", tuple(tokens))
    codes = code_keys(own.keys(layer)), code_values(own.values(layer))
    return restore_codes(codes[0], bits)[part], restore_codes(codes[1], bits)[part]


@pytest.mark.parametrize("block", [10_000, 128, 100])
@pytest.mark.parametrize(("resident", "bits"), [(0, 6), (60, 6), (0, 8)])
def test_what_comes_into_slots(bench: Workbench, block: int, resident: int, bits: int) -> None:
    """Keys as they would have been at the new place, values as they were, whoever computed them."""
    desk = Desk(bench, block=block, base_error=0.0)
    first, second = texts(0, 1, 2), texts(3, 2)
    bench.put(desk.store, first)
    bench.put(desk.store, second)
    prompt = [*texts(2), 5, *texts(3), 6, 7, *texts(1, 0)]
    plan = desk.planned(prompt, resident, wanted=LoadOptions(bits=bits, blend=0.0))
    assert plan.resident_len == resident

    keys, values = restore(desk, plan, SHAPE)

    for layer in range(SHAPE.num_layers):
        stored: list[tuple[Tensor, Tensor]] = []
        for number in range(4):
            whole, start = (second, 0) if number == 3 else (first, [0, 200, 401][number])
            part = slice(start, start + 200 + number)
            stored.append(rounded(whole, layer, part, bits))
        # Document 2 is stored twice; the run that was found says which it is.
        if plan.runs[0].span.segment.info.num_tokens == len(second):
            stored[2] = rounded(second, layer, slice(203, None), bits)
        place = 0
        for number, gap in ((2, 1), (3, 2), (1, 0), (0, 0)):
            low, high = max(place, resident), place + 200 + number
            at, of = slice(low - resident, high - resident), slice(low - place, high - place)
            assert torch.allclose(values[layer][at], stored[number][1][of], atol=1e-4)
            run = next(run for run in plan.runs if run.start <= low < run.stop)
            old = torch.arange(low, high) - run.shift
            turns = ROTATION.turns(old, torch.arange(low, high))
            expected = ROTATION.move(stored[number][0][of], turns)
            assert torch.allclose(keys[layer][at], expected, atol=1e-3)
            place = high + gap
        assert keys[layer].isnan().any(2).any(1).sum() == 3


@pytest.mark.parametrize("bits", [6.0, 8.0])
def test_all_planes_that_are_wanted_are_read_ahead(bench: Workbench, bits: float) -> None:
    desk = Desk(bench, (0, 1, 2), base_error=0.0)
    plan = desk.planned(texts(2, 1, 0), wanted=LoadOptions(bits=bits, blend=0.0))
    source = plan.open_source(desk.store, NO_TIMELINE)
    assert isinstance(source, CodedSource)
    span = source.spans[0]
    units = span.wanted_units(0, source.planes)
    assert set(units[:, 0]) == set(range(plan.planes)) and LEVELS[plan.planes] == bits
    assert list(span.wanted_chunks(0, source.planes)) == [*span.pages, *span.unit_chunks(units)]
    desk.store.close_source(source)


def test_a_document_that_is_asked_for_twice(bench: Workbench) -> None:
    desk = Desk(bench, (0, 1))
    asked, wanted = [3, *texts(1), 4, *texts(1), 5, *texts(1)], LoadOptions(bits=8, blend=0.0)
    plan = desk.planned(asked, wanted=wanted)
    (block,) = plan.blocks
    assert [len(group) for group in block.groups] == [1, 1, 1]
    _, values = restore(desk, plan, SHAPE)
    _, own = rounded(texts(0, 1), 1, slice(200, None), 8)
    for start in (1, 203, 405):
        assert torch.allclose(values[1][start : start + 201], own, atol=1e-4)


def test_of_many_runs_of_a_segment_it_is_looked_at_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(bench, (0, 1))
    plan = desk.planned([4, *texts(1), 5, *texts(0), 6, *texts(1)])
    assert len(plan.runs) == 3
    expected = [desk.store.forecast.coded_bytes([span]).expected(1) for span in plan.spans]
    looked = calls_of(monkeypatch, desk.store.versions, "code_tiers")
    found = desk.store.forecast.coded_bytes(plan.spans).expected(1)
    assert found == pytest.approx(sum(expected)) and len(looked) == 1


def test_runs_of_a_group_have_no_page_in_common(bench: Workbench) -> None:
    desk = Desk(bench, (0, 1, 2, 3))
    plan = desk.planned([4, *texts(3), 4, *texts(2), 4, *texts(1), 4, *texts(0)])
    groups = apart(plan.runs)
    assert sorted(run.start for group in groups for run in group) == [1, 205, 408, 610]
    layout = plan.runs[0].span.segment.info.layout().codes
    assert layout is not None
    size, meetings = layout.page_groups * GROUP_TOKENS, 0
    for one, other in itertools.combinations(plan.runs, 2):
        first, second = sorted((one.span, other.span), key=lambda span: span.start)
        meet = (first.stop - 1) // size == second.start // size
        meetings += meet
        assert not meet or not any(one in group and other in group for group in groups)
    assert meetings, "neighbours in the segment share the page in which they meet"


def two_segments(bench: Workbench, **options: Any) -> tuple[Desk, BlendPlan]:
    """A prompt of documents 1 and 0, which stand in segments of their own."""
    desk = Desk(bench, (0,), (1,), **options)
    return desk, desk.planned([4, *texts(1), 5, *texts(0)])


def test_what_cannot_be_opened_is_given_back(bench: Workbench) -> None:
    """What was opened before is closed, and the segment that is bad is named."""
    desk, plan = two_segments(bench)
    bad = plan.runs[1].span.segment.segment_id
    bench.file_of(bad).unlink()
    with pytest.raises(PrefixUnreadable) as caught:
        desk.loading(plan)
    assert caught.value.segment_id == bad
    desk.store.report(caught.value)


def test_at_most_one_block_is_open_ahead(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, plan = two_segments(bench, block=50, readahead=1.0)
    opened = calls_of(monkeypatch, blended_loading, "open_group")
    closed = calls_of(monkeypatch, desk.store, "close_source")
    loading = desk.loading(plan)
    assert (len(opened), len(closed), len(loading.blocks)) == (1, 0, 9)
    for number in range(9):
        loading.begin_block(number)
        open_now = len(opened) - len(closed)
        assert open_now <= 4, "two blocks, each of which may have both documents"
        loading.end_block(number)
    assert len(opened) == len(closed)
    loading.close()


def test_what_is_not_needed_yet_may_be_gone(bench: Workbench) -> None:
    """A block is blended although the next one cannot be opened, and that says so when it comes."""
    desk, plan = two_segments(bench, block=100, readahead=1.0)
    bad = plan.runs[1].span.segment.segment_id
    bench.file_of(bad).unlink()
    loading = desk.loading(plan)
    for number in range(2):
        loading.begin_block(number)
        loading.end_block(number)
    with pytest.raises(SegmentUnreadable) as caught:
        loading.begin_block(2)
    assert caught.value.segment_id == bad
    assert loading.compute_instead(2, caught.value) and loading.reused == 186
    loading.close()


def test_what_cannot_be_read_is_computed_and_the_rest_reused(bench: Workbench) -> None:
    desk, plan = two_segments(bench, block=100)
    bad, good = (run.span.segment.segment_id for run in plan.runs)
    loading = desk.loading(plan)
    error = SegmentUnreadable(bad, "a test")
    assert not loading.compute_instead(3, error), "it is in none of these"
    assert loading.compute_instead(0, error) and loading.reused == 200
    assert (loading.kinds[:202] == Kind.COMPUTED).all() and plan.reused == 386
    assert [len(block.groups) for block in loading.blocks] == [0, 0, 1, 1, 1]
    # Nobody finds it before a second look, whatever was found before.
    assert not plan.runs[0].span.segment.ready
    again = desk.planned([4, *texts(1), 5, *texts(0)], notes=plan.notes)
    assert {run.span.segment.segment_id for run in again.runs} == {good}
    assert not loading.compute_instead(2, SegmentUnreadable(good, "a test")), "nothing is left"
    loading.close()


def test_what_is_read_ahead_is_a_part(bench: Workbench) -> None:
    """A queue that asks for the rest must not hear that nothing is left."""
    _, plan = two_segments(bench, block=100)
    read: Any = SimpleNamespace(unread=0.25, num_tokens=99)
    assert plan.unread(read) == pytest.approx(1 - 0.75 * 99 / 401)
