"""How requests reuse stored text that is no prefix: what is planned, and what comes into slots."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.attention.rotation import KeyRotation
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable
from impress_sglang.loops import windows
from impress_sglang.management.policies import LoadOptions, make_policy
from impress_sglang.management.versions import Version
from impress_sglang.precision.codec import GROUP_TOKENS, code_keys, code_values
from impress_sglang.precision.codec import restore as restore_codes
from impress_sglang.serving import blended_loading
from impress_sglang.serving.blend_plan import BlendNotes, BlendPlan, Kind, apart
from impress_sglang.serving.blended_loading import BlendedLoading
from impress_sglang.serving.blending import (
    ANSWER_SECONDS,
    ANSWER_SHARE,
    MEASURE_SECONDS,
    Blending,
    fits,
)
from impress_sglang.serving.estimate import Estimate, Estimator
from impress_sglang.serving.why import Reason
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.timeline import NO_TIMELINE
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.precise import ALLOCATIONS, PreciseLoader
from impress_sglang.transfer.slots import LayerSlots
from tests.unit.kv_factory import SequenceKVs, as_tokens, make_shape
from tests.unit.store_factory import DEFAULTS, Workbench, lose

SHAPE = make_shape(probe=(), coded=True)
OPTIONS: dict[str, Any] = {
    "policy": "impress",
    "retention": 1.0,
    "blend": 0.0,
    "blend_min_tokens": 100,
    "blend_select": "first",
    "load": "always",
}
APPROXIMATE = LoadOptions(bits=5.0, blend=0.0)
DOCUMENTS = [
    np.random.default_rng(seed).integers(0, 1000, 200 + seed).tolist() for seed in range(4)
]


def texts(*numbers: int) -> list[int]:
    return [token for number in numbers for token in DOCUMENTS[number]]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    bench = Workbench(tmp_path / "kv", SHAPE)
    yield bench
    bench.close_all()


class Desk:
    """A store, and what plans with it."""

    def __init__(self, bench: Workbench, page_size: int = 1, block: int = 10_000, **options: Any):
        options = OPTIONS | options
        self.config = ImpressConfig(ssd_dir=str(bench.root), **(DEFAULTS | options))
        self.store = bench.open(**options)
        self.estimator = Estimator(64)
        served: Any = type("Served", (), {"store": self.store})()
        self.blending = Blending(
            self.config,
            SHAPE,
            make_policy(self.config),
            served,
            self.estimator,
            page_size,
            block,
        )

    def plan(
        self,
        tokens: Sequence[int],
        resident: int = 0,
        namespace: str = "",
        wanted: LoadOptions = APPROXIMATE,
        usual: Any = None,
        notes: BlendNotes | None = None,
    ) -> BlendPlan | None:
        notes = notes or BlendNotes()
        return self.blending.plan(namespace, as_tokens(tokens), resident, usual, wanted, notes)


def kinds_of(plan: BlendPlan | None) -> str:
    """One letter for each token and its kind."""
    assert plan is not None
    return "".join("kcr"[kind] for kind in plan.kinds)


def test_documents_in_another_order(bench: Workbench) -> None:
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1, 2))

    plan = desk.plan([*texts(2), 5, 6, *texts(0), 7, 8, 9])

    assert kinds_of(plan) == 16 * "c" + 186 * "r" + 2 * "c" + 200 * "r"
    assert plan is not None and plan.reused == 386 and plan.stop == plan.k == 404
    assert plan.work.new == 4 and plan.quality != EXACT and not plan.match.spans
    assert [(run.start, run.stop, run.shift) for run in plan.runs] == [
        (0, 202, -401),
        (204, 404, 204),
    ]


def test_a_prefix_stays_exact_and_is_a_head(bench: Workbench) -> None:
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1, 2))
    plan = desk.plan(texts(0, 2, 1))
    assert kinds_of(plan) == 200 * "k" + 403 * "r"
    assert plan is not None and [run.shift for run in plan.runs] == [0, -201, 202]


def test_behind_what_was_blended_before_only_the_rest_is(bench: Workbench) -> None:
    """Its own text is no run for anybody, and who computes more again begins anew."""
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1, 2))
    bench.put(desk.store, texts(3, 2, 1), quality=Quality(2, 1.0, 5.0, 0.5))
    plan = desk.plan(texts(3, 2, 1, 0), wanted=LoadOptions(bits=5.0, blend=0.25))
    assert kinds_of(plan) == 606 * "k" + 50 * "c" + 150 * "r"
    assert plan is not None and plan.blended == plan.reused + 50 == 200
    assert plan.quality == Quality(3, 1.0, 5.0, 0.25)
    assert desk.plan(texts(3, 2, 1), wanted=LoadOptions(bits=5.0, blend=0.25)) is None
    plan = desk.plan(texts(3, 2, 1, 0), wanted=LoadOptions(bits=5.0, blend=0.75))
    assert plan is not None and kinds_of(plan).startswith(203 * "c" + 152 * "c" + 50 * "r")
    assert plan.quality == Quality(1, 1.0, 6.0, 0.75)
    assert desk.plan([7, *texts(3)]) is None, "what was blended is no donor"


def test_what_is_resident_is_not_read(bench: Workbench) -> None:
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1, 2))
    assert kinds_of(desk.plan(texts(0, 2, 1), resident=150)) == 50 * "k" + 403 * "r"
    assert kinds_of(desk.plan(texts(3, 2), resident=204)) == "r" * 201
    # Of a prefix that only SGLang's tree has there is nothing to find.
    assert desk.plan(texts(3), resident=100) is None


def test_cut_conversations_are_found_shifted(bench: Workbench) -> None:
    """Their head is computed: the first 16 tokens that remain."""
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1, 2))
    plan = desk.plan([*texts(0, 1, 2)[300:], 1, 2])
    assert kinds_of(plan) == 16 * "c" + 287 * "r"
    assert plan is not None and {run.shift for run in plan.runs} == {-300}


def test_too_little_is_not_worth_it(bench: Workbench) -> None:
    desk = Desk(bench, blend_min_tokens=201)
    bench.put(desk.store, texts(0, 1, 2))
    assert desk.plan([4, *texts(0)]) is None
    assert desk.plan([4, *texts(1)]) is not None
    # Nor is what the request has anyway.
    assert desk.plan(texts(0, 1, 2)) is None
    usual: Any = type("Usual", (), {"stop": 100})()
    assert desk.plan([4, *texts(1)], usual=usual) is None


@pytest.mark.parametrize(
    "wanted",
    [
        LoadOptions(blend=0.0),
        LoadOptions(bits=5.0, blend=1.0),
        LoadOptions(bits=5.0, blend="off"),
    ],
)
def test_who_never_blends(bench: Workbench, wanted: LoadOptions) -> None:
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1))
    assert desk.plan(texts(1, 0), wanted=wanted) is None
    assert desk.plan(texts(1, 0)) is not None
    assert desk.plan(texts(1, 0), namespace="other") is None
    desk.blending.refusal = "a test"
    assert desk.plan(texts(1, 0)) is None


def test_nothing_is_indexed_without_the_option(bench: Workbench) -> None:
    desk = Desk(bench, blend="off")
    bench.put(desk.store, texts(0, 1))
    assert desk.store.tree.content is None and desk.plan(texts(1, 0)) is None


def test_the_index_is_there_after_a_restart_and_follows_evictions(bench: Workbench) -> None:
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1))
    bench.put(desk.store, texts(0, 1, 2))
    bench.put(desk.store, texts(3))
    bench.close(desk.store)
    desk = Desk(bench)
    content = desk.store.tree.content
    assert content is not None
    content.check_integrity()
    assert kinds_of(desk.plan([1, *texts(2), 1, *texts(3)]))[16:].count("r") == 390
    for segment in list(desk.store.tree.segments()):
        if segment.info.prefix_len:
            lose(bench, desk.store, segment.segment_id, gone=True)
    content.check_integrity()
    assert kinds_of(desk.plan([1, *texts(2), 1, *texts(3)])).count("r") == 203


@pytest.mark.parametrize("page_size", [4, 64])
def test_whole_pages(bench: Workbench, page_size: int) -> None:
    desk = Desk(bench, page_size)
    bench.put(desk.store, texts(0, 1, 2))
    plan = desk.plan([*texts(2), 5, *texts(0)])
    assert plan is not None
    assert plan.stop == 403 // page_size * page_size == plan.runs[-1].stop
    assert all(not block.start % page_size for block in plan.blocks)


@pytest.mark.parametrize("select", ["first", "random", "deviation"])
def test_which_tokens_are_computed_again(bench: Workbench, select: str) -> None:
    desk = Desk(bench, blend_select=select)
    bench.put(desk.store, texts(0, 1, 2))
    plan = desk.plan(texts(0, 2, 1), wanted=LoadOptions(bits=5.0, blend=0.25))
    assert plan is not None
    kinds = plan.kinds[200:]
    assert plan.quality == Quality(1, 1.0, 6.0, 0.25) and plan.blended == 403
    if select == "deviation":
        assert plan.share == 0.25 and (kinds == Kind.REUSED).all()
        return
    computed = np.flatnonzero(kinds == Kind.COMPUTED).tolist()
    assert plan.share == 0.0 and len(computed) == 100
    first = [*range(50), *range(202, 252)]
    assert (computed == first) == (select == "first")
    assert len([own for own in computed if own < 202]) == 50


def test_auto_computes_what_hides_behind_reading(bench: Workbench) -> None:
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1, 2))
    wanted = LoadOptions(bits=5.0, blend="auto")

    def computed(seconds: float) -> int:
        forecast: Any = desk.store.forecast
        forecast.seconds_to_read = lambda num_bytes: seconds
        return kinds_of(desk.plan(texts(0, 2, 1), wanted=wanted)).count("c")

    # Without any pass nothing is known: as little as there is.
    assert computed(1.0) == 60
    for _ in range(8):
        desk.estimator.note_forward(1000, 500_500.0, 1.0)
    shares = [computed(seconds) for seconds in (0.0, 0.05, 0.1, 0.2, 0.3, 5.0)]
    assert shares == sorted(shares) and shares[0] == 60 and shares[-1] > 250


def test_computing_all_is_chosen_where_it_is_faster(bench: Workbench) -> None:
    desk = Desk(bench, load="faster")
    bench.put(desk.store, texts(0, 1, 2))
    for _ in range(8):
        desk.estimator.note_forward(1000, 500_500.0, 1.0)
    forecast: Any = desk.store.forecast
    forecast.seconds_to_read = lambda num_bytes: 100.0
    assert desk.plan(texts(0, 2, 1)) is None
    forecast.seconds_to_read = lambda num_bytes: 0.0
    assert desk.plan(texts(0, 2, 1)) is not None


def test_what_would_be_used_else_may_be_faster(bench: Workbench) -> None:
    desk = Desk(bench, load="faster")
    bench.put(desk.store, texts(0, 1, 2))
    forecast: Any = desk.store.forecast
    forecast.seconds_to_read = lambda num_bytes: 0.1
    desk.estimator.note_forward(1000, 500_500.0, 1.0)
    blended = desk.plan(texts(0, 2, 1))
    assert blended is not None and blended.estimate.load is not None
    for factor, expected in ((0.9, False), (1.1, True)):
        estimate = Estimate(1.0, 0.0, factor * blended.estimate.load, 10.0)
        usual = SimpleNamespace(stop=0, estimate=estimate)
        assert (desk.plan(texts(0, 2, 1), usual=usual) is not None) == expected


def test_nobody_blends_for_longer_than_others_may_wait(bench: Workbench) -> None:
    """Nor do requests of one pass together."""
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1, 2))
    unknown = desk.plan(texts(0, 2, 1))
    assert unknown is not None and unknown.estimate.compute is None
    short = dataclasses.replace(unknown, estimate=Estimate(1.0, 0.0, 0.4 * 5.0, 100.0))
    loader = PreciseLoader(SHAPE, ALLOCATIONS["even"])
    first, second, other = loadings = [
        BlendedLoading(loader, desk.store, plan, ROTATION, NO_TIMELINE)
        for plan in (short, short, unknown)
    ]
    assert fits(short, [first, object()], 5.0) and not fits(short, [first, second], 5.0)
    assert fits(unknown, [], 5.0) and not fits(unknown, [first], 5.0)
    assert fits(short, [first, second], 6.1) and not fits(short, [other], 6.1)
    for own in loadings:
        own.blended = True
        own.close()
    assert fits(short, loadings, 5.0)
    for _ in range(20):
        desk.estimator.note_forward(1000, 500_500.0, 1e6)
    assert desk.plan(texts(0, 2, 1)) is None


def test_others_wait_for_reads_as_well(bench: Workbench) -> None:
    desk, notes = Desk(bench, blend_seconds=7.0), BlendNotes()
    bench.put(desk.store, texts(0, 1, 2))
    desk.estimator.note_forward(1000, 500_500.0, 0.1)
    forecast: Any = desk.store.forecast
    forecast.seconds_to_read = lambda num_bytes: 0.9 * 7.0
    assert desk.plan(texts(0, 2, 1)) is not None
    forecast.seconds_to_read = lambda num_bytes: 1.1 * 7.0
    assert desk.plan(texts(0, 2, 1), notes=notes) is None
    assert notes.why == (Reason.BLEND_TOO_LONG, "7.7 of 7 s")


def table(rows: int) -> Tensor:
    angles = torch.arange(rows)[:, None] * 50.0 ** (-torch.arange(0, 8, 2) / 8)
    return torch.cat([angles.cos(), angles.sin()], -1)


ROTATION = KeyRotation(table, halves=True)


def restore(desk: Desk, plan: BlendPlan, shape: KVShape) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of each layer of a prefix, NaN where nothing is stored."""
    loader = PreciseLoader(shape, ALLOCATIONS["even"])
    loading = BlendedLoading(loader, desk.store, plan, ROTATION, NO_TIMELINE)
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
    plan = desk.plan(prompt, resident, wanted=LoadOptions(bits=bits, blend=0.0))
    assert plan is not None and plan.resident_len == resident

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


@pytest.mark.parametrize(("bits", "later"), [(6.0, False), (7.0, True), (8.0, False)])
def test_the_planes_that_all_units_get_are_certain(
    bench: Workbench, bits: float, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they are read ahead, and with the base."""
    asked: list[int] = []
    read_units = CodedSource.read_units

    def read(self: CodedSource, layer: int, number: int, raised: Tensor) -> Tensor:
        asked.append(layer)
        return read_units(self, layer, number, raised)

    monkeypatch.setattr(CodedSource, "read_units", read)
    desk = Desk(bench, base_error=0.0)
    bench.put(desk.store, texts(0, 1, 2))
    plan = desk.plan(texts(2, 1, 0), wanted=LoadOptions(bits=bits, blend=0.0))
    assert plan is not None
    restore(desk, plan, SHAPE)
    assert bool(asked) == later
    source = plan.open_source(desk.store, NO_TIMELINE)
    assert isinstance(source, CodedSource)
    span = source.spans[0]
    units = span.floor_units(0)
    assert set(units[:, 0]) == set(range(plan.planes)) and plan.planes == (bits - 4) // 2
    assert list(span.certain_chunks(0)) == [*span.pages, *span.unit_chunks(units)]
    desk.store.close_source(source)


def test_a_document_that_is_asked_for_twice(bench: Workbench) -> None:
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1))
    asked, wanted = [3, *texts(1), 4, *texts(1), 5, *texts(1)], LoadOptions(bits=8, blend=0.0)
    plan = desk.plan(asked, wanted=wanted)
    assert plan is not None
    (block,) = plan.blocks
    assert [len(group) for group in block.groups] == [1, 1, 1]
    _, values = restore(desk, plan, SHAPE)
    _, own = rounded(texts(0, 1), 1, slice(200, None), 8)
    for start in (1, 203, 405):
        assert torch.allclose(values[1][start : start + 201], own, atol=1e-4)


def test_of_many_runs_of_a_segment_it_is_looked_at_once(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1))
    plan = desk.plan([4, *texts(1), 5, *texts(0), 6, *texts(1)])
    assert plan is not None and len(plan.runs) == 3
    expected = [desk.store.forecast.coded_bytes([span]).expected(6.0) for span in plan.spans]
    versions, looked = desk.store.versions, [0]
    tiers = versions.code_tiers

    def counted(version: Version) -> Any:
        looked[0] += 1
        return tiers(version)

    monkeypatch.setattr(versions, "code_tiers", counted)
    found = desk.store.forecast.coded_bytes(plan.spans).expected(6.0)
    assert found == pytest.approx(sum(expected)) and looked == [1]


def test_runs_of_a_group_have_no_page_in_common(bench: Workbench) -> None:
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1, 2, 3))
    plan = desk.plan([4, *texts(3), 4, *texts(2), 4, *texts(1), 4, *texts(0)])
    assert plan is not None
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


def test_what_cannot_be_opened_is_given_back(bench: Workbench) -> None:
    """What was opened before is closed, and the segment that is bad is named."""
    desk = Desk(bench)
    bench.put(desk.store, texts(0))
    bench.put(desk.store, texts(1))
    plan = desk.plan([4, *texts(1), 5, *texts(0)])
    assert plan is not None
    bad = plan.runs[1].span.segment.segment_id
    bench.file_of(bad).unlink()
    loader = PreciseLoader(SHAPE, ALLOCATIONS["even"])
    with pytest.raises(PrefixUnreadable) as caught:
        BlendedLoading(loader, desk.store, plan, ROTATION, NO_TIMELINE)
    assert caught.value.segment_id == bad
    desk.store.report(caught.value)


def two_segments(desk: Desk, bench: Workbench) -> BlendPlan:
    """A prompt of documents 1 and 0, which stand in segments of their own."""
    bench.put(desk.store, texts(0))
    bench.put(desk.store, texts(1))
    plan = desk.plan([4, *texts(1), 5, *texts(0)])
    assert plan is not None
    return plan


def opening(desk: Desk, plan: BlendPlan, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """What loads a plan, and how many sources it has opened, and not closed."""
    open_now, loader = [0], PreciseLoader(SHAPE, ALLOCATIONS["even"])
    opens, closes = blended_loading.open_group, desk.store.close_source

    def opened(*arguments: Any) -> Any:
        open_now[0] += 1
        return opens(*arguments)

    def closed(source: Any) -> None:
        open_now[0] -= 1
        closes(source)

    monkeypatch.setattr(blended_loading, "open_group", opened)
    monkeypatch.setattr(desk.store, "close_source", closed)
    return BlendedLoading(loader, desk.store, plan, ROTATION, NO_TIMELINE), open_now


def test_at_most_one_block_is_open_ahead(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(bench, block=50, readahead=1.0)
    loading, open_now = opening(desk, two_segments(desk, bench), monkeypatch)
    assert open_now == [1] and len(loading.blocks) == 9
    for number in range(9):
        loading.begin_block(number)
        assert open_now[0] <= 4, "two blocks, each of which may have both documents"
        loading.end_block(number)
    assert open_now == [0]
    loading.close()


def test_what_is_not_needed_yet_may_be_gone(bench: Workbench) -> None:
    """A block is blended although the next one cannot be opened, and that says so when it comes."""
    desk = Desk(bench, block=100, readahead=1.0)
    plan = two_segments(desk, bench)
    bad = plan.runs[1].span.segment.segment_id
    bench.file_of(bad).unlink()
    loader = PreciseLoader(SHAPE, ALLOCATIONS["even"])
    loading = BlendedLoading(loader, desk.store, plan, ROTATION, NO_TIMELINE)
    for number in range(2):
        loading.begin_block(number)
        loading.end_block(number)
    with pytest.raises(SegmentUnreadable) as caught:
        loading.begin_block(2)
    assert caught.value.segment_id == bad
    assert loading.compute_instead(2, caught.value) and loading.reused == 186
    loading.close()


def test_of_groups_the_largest_must_fit(bench: Workbench) -> None:
    """They are read one after the other."""
    desk, notes = Desk(bench), BlendNotes()
    bench.put(desk.store, texts(0, 1))
    forecast: Any = desk.store.forecast
    forecast.can_read = lambda spans, in_codes: len(spans) == 1
    assert desk.plan([3, *texts(1), 4, *texts(1), 5, *texts(1)]) is not None
    bench.put(desk.store, texts(2))
    assert desk.plan([3, *texts(1), 4, *texts(2)], notes=notes) is None
    assert notes.why == (Reason.NO_BUFFERS, "")


def test_what_cannot_be_read_is_computed_and_the_rest_reused(bench: Workbench) -> None:
    desk = Desk(bench, block=100)
    plan = two_segments(desk, bench)
    bad, good = (run.span.segment.segment_id for run in plan.runs)
    loader = PreciseLoader(SHAPE, ALLOCATIONS["even"])
    loading = BlendedLoading(loader, desk.store, plan, ROTATION, NO_TIMELINE)
    error = SegmentUnreadable(bad, "a test")
    assert not loading.compute_instead(3, error), "it is in none of these"
    assert loading.compute_instead(0, error) and loading.reused == 200
    assert (loading.kinds[:202] == Kind.COMPUTED).all() and plan.reused == 386
    assert [len(block.groups) for block in loading.blocks] == [0, 0, 1, 1, 1]
    # Nobody finds it before a second look, whatever was found before.
    assert not plan.runs[0].span.segment.ready
    again = desk.plan([4, *texts(1), 5, *texts(0)], notes=plan.notes)
    assert again is not None and {run.span.segment.segment_id for run in again.runs} == {good}
    assert not loading.compute_instead(2, SegmentUnreadable(good, "a test")), "nothing is left"
    loading.close()


def test_a_prompt_is_scanned_once(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once a second, whatever is written; weighed too where something else is asked."""
    desk, notes, now = Desk(bench), BlendNotes(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    bench.put(desk.store, texts(0, 1))
    first = desk.plan(texts(1, 0), notes=notes)
    monkeypatch.setattr(windows, "find_window", None)
    assert first is not None and desk.plan(texts(1, 0), notes=notes) is first
    usual: Any = type("Usual", (), {"stop": 300})()
    assert desk.plan(texts(1, 0), notes=notes, usual=usual) is not first
    assert desk.plan(texts(1, 0), notes=notes) is not None
    now[0] += ANSWER_SECONDS
    again = desk.plan(texts(1, 0), notes=notes)
    assert again is not None and again is not first and again.same_tokens(first)
    for number in (2, 3):
        bench.put(desk.store, texts(number))
        assert desk.plan(texts(1, 0), notes=notes) is again
    now[0] += ANSWER_SECONDS
    monkeypatch.setattr(windows, "find_window", lambda *_: (-1, -1))
    assert desk.plan(texts(1, 0), notes=notes) is None


def test_where_many_wait_few_are_weighed_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, waiting, now = Desk(bench), [BlendNotes() for _ in range(4)], [0.0]
    bench.put(desk.store, texts(0, 1))
    forecast: Any = desk.store.forecast

    def slow(num_bytes: float) -> float:
        now[0] += 5 * ANSWER_SECONDS * ANSWER_SHARE
        return 0.0

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(forecast, "seconds_to_read", slow)
    first = [desk.plan(texts(1, 0), notes=notes) for notes in waiting]
    assert None not in first and now[0] == pytest.approx(0.2 * ANSWER_SECONDS)

    def weighed() -> list[bool]:
        found = [desk.plan(texts(1, 0), notes=notes) for notes in waiting]
        return [own is not before for own, before in zip(found, first, strict=True)]

    now[0] += 4 * ANSWER_SECONDS
    assert weighed() == [False] * 4
    now[0] += ANSWER_SECONDS
    assert weighed() == [True, False, False, False]


def test_who_could_not_open_a_blend_does_without(bench: Workbench) -> None:
    desk, notes = Desk(bench), BlendNotes()
    bench.put(desk.store, texts(0, 1))
    notes.decline()
    assert desk.plan(texts(1, 0), notes=notes) is None
    assert notes.why == (Reason.NOT_OPENED, "")


def test_why_nobody_blends(bench: Workbench) -> None:
    desk = Desk(bench, load="faster")
    bench.put(desk.store, texts(0, 1, 2))

    def why(tokens: list[int], wanted: LoadOptions = APPROXIMATE) -> str | None:
        notes = BlendNotes()
        assert desk.plan(tokens, wanted=wanted, notes=notes) is None
        return None if notes.why is None else ": ".join(notes.why)

    short = texts(0)[:90]
    assert why(texts(3)) is None and why([4, *short]) == "blend_too_short: 90 of 100 tokens"
    assert why([4, *short], LoadOptions(bits=5.0, blend=1.0)) is None, "it would not have"
    for _ in range(8):
        desk.estimator.note_forward(1000, 500_500.0, 1.0)
    forecast: Any = desk.store.forecast
    forecast.seconds_to_read = lambda num_bytes: 100.0
    assert str(why(texts(0, 2, 1))).startswith("blend_slower: 100000.0 ms and ")
    for _ in range(20):
        desk.estimator.note_forward(1000, 500_500.0, 1e6)
    assert str(why([4, *texts(2)], wanted=LoadOptions(bits=5.0, blend=0.9))).startswith(
        "blend_too_long: "
    )
    desk.blending.refusal = "a test"
    assert why(texts(0, 2, 1)) == "blend_unsupported: a test"


def test_what_blends_take_is_learnt_and_tried_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(bench, load="faster")
    bench.put(desk.store, texts(0, 1, 2))
    forecast: Any = desk.store.forecast
    forecast.seconds_to_read = lambda num_bytes: 0.0
    for _ in range(8):
        desk.estimator.note_forward(1000, 500_500.0, 0.5)
    wanted, now = LoadOptions(bits=5.0, blend=0.5), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def plan(notes: BlendNotes | None = None) -> BlendPlan | None:
        return desk.plan(texts(0, 2, 1), wanted=wanted, notes=notes)

    fast = plan()
    assert fast is not None and fast.estimate.compute is not None
    for _ in range(30):
        desk.estimator.note_blend(fast.work, 201.0, 1.0)
    first, other = BlendNotes(), BlendNotes()
    assert plan(first) is not None, "to see how fast it is"
    assert plan(other) is None and other.why is not None
    assert plan(first) is not None and plan(other) is None
    now[0] += MEASURE_SECONDS
    assert plan(other) is not None and plan(BlendNotes()) is None
    for _ in range(30):
        desk.estimator.note_blend(fast.work, 201.0, 0.01)
    found = plan(BlendNotes())
    assert found is not None and found.estimate.compute is not None
    assert found.estimate.compute < fast.estimate.compute
    # Whoever waits for a blend of a minute does so seldom.
    for _ in range(60):
        desk.estimator.note_blend(fast.work, 201.0, 60.0)
    now[0] += MEASURE_SECONDS
    assert plan(BlendNotes()) is not None
    for seconds, expected in ((5 * MEASURE_SECONDS, False), (20 * MEASURE_SECONDS, True)):
        now[0] += seconds
        assert (plan(notes := BlendNotes()) is not None) == expected
        assert expected or (notes.why or ("",))[0] == Reason.BLEND_TOO_LONG


def test_what_is_read_ahead_is_a_part(bench: Workbench) -> None:
    """A queue that asks for the rest must not hear that nothing is left."""
    desk = Desk(bench, block=100)
    plan = two_segments(desk, bench)
    read: Any = SimpleNamespace(unread=0.25, num_tokens=99)
    assert plan.unread(read) == pytest.approx(1 - 0.75 * 99 / 401)


def test_the_same_blend(bench: Workbench) -> None:
    desk = Desk(bench)
    bench.put(desk.store, texts(0, 1))
    one, other = desk.plan(texts(1, 0)), desk.plan(texts(1, 0))
    third = desk.plan([*texts(1, 0)[:-1], 5])
    assert one is not None and other is not None and third is not None
    assert one.same_tokens(other) and one.same_reads(other) and not one.same_tokens(third)
    source = one.open_source(desk.store, NO_TIMELINE)
    desk.store.close_source(source)
