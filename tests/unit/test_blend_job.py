"""How requests reuse stored text that is no prefix: what is planned, and what comes into slots."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.blend.job import BlendJob, TokenKind
from impress_sglang.blend.planner import MEASURE_SECONDS, SHARES
from impress_sglang.codes.groups.codec import code_keys, code_values
from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.cost import RequestLengths
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.serving.load_jobs import JobLoader, JobState
from impress_sglang.serving.why import Reason
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.store.policies import LoadOptions
from impress_sglang.transfer.basis_codec import shape_by
from impress_sglang.transfer.codecs import plain_codec
from impress_sglang.transfer.filling import StoredLayers
from impress_sglang.transfer.sources import WholeSource
from tests.unit import blending_desk
from tests.unit.basis_factory import codec_for
from tests.unit.blending_desk import APPROXIMATE, ROTATION, SHAPE, Desk, texts
from tests.unit.coded_factory import restore
from tests.unit.kv_factory import SequenceKVs, make_shape
from tests.unit.store_checks import check_content
from tests.unit.store_factory import Workbench, lose

bench = blending_desk.bench


def kinds_of(plan: BlendJob | None) -> str:
    """One letter for each token and its kind."""
    assert plan is not None
    return "".join("kcr"[kind] for kind in plan.kinds)


def quality_of(plan: BlendJob) -> Quality:
    """Of what is blended, and of what is computed after it."""
    return plan.match.quality.after(plan.estimate.bits, plan.share)


def test_documents_in_another_order(bench: Workbench) -> None:
    desk = Desk(bench, (0, 1, 2))

    plan = desk.plan([*texts(2), 5, 6, *texts(0), 7, 8, 9])

    assert kinds_of(plan) == 16 * "c" + 186 * "r" + 2 * "c" + 200 * "r"
    assert plan is not None and plan.stop == len(plan.kinds) == 404
    assert plan.new == 4 and quality_of(plan) != EXACT and not plan.match.spans
    assert [(run.start, run.stop, run.shift) for run in plan.runs] == [
        (0, 202, -401),
        (204, 404, 204),
    ]


def test_a_prefix_stays_exact_and_is_a_head(bench: Workbench) -> None:
    desk = Desk(bench, (0, 1, 2))
    plan = desk.plan(texts(0, 2, 1))
    assert kinds_of(plan) == 200 * "k" + 403 * "r"
    assert plan is not None and [run.shift for run in plan.runs] == [0, -201, 202]


def test_behind_what_was_blended_before_only_the_rest_is(bench: Workbench) -> None:
    """Its own text is no run for anybody, and who computes more again begins anew."""
    desk = Desk(bench, (0, 1, 2))
    bench.put(desk.store, texts(3, 2, 1), quality=Quality(2, 6.0, 0.5))
    plan = desk.plan(texts(3, 2, 1, 0), wanted=LoadOptions(bits=6.0, blend=0.25))
    assert kinds_of(plan) == 606 * "k" + 200 * "r"
    assert plan is not None and plan.share == 0.25
    assert quality_of(plan) == Quality(3, 6.0, 0.25)
    assert desk.plan(texts(3, 2, 1), wanted=LoadOptions(bits=6.0, blend=0.25)) is None
    plan = desk.planned(texts(3, 2, 1, 0), wanted=LoadOptions(bits=6.0, blend=0.75))
    assert kinds_of(plan).startswith(203 * "c" + 202 * "r")
    assert quality_of(plan) == Quality(1, 6.0, 0.75)
    assert desk.plan([7, *texts(3)]) is None, "what was blended is no donor"


def test_what_is_resident_is_not_read(bench: Workbench) -> None:
    desk = Desk(bench, (0, 1, 2))
    assert kinds_of(desk.plan(texts(0, 2, 1), resident=150)) == 50 * "k" + 403 * "r"
    assert kinds_of(desk.plan(texts(3, 2), resident=204)) == "r" * 201
    # Of a prefix that only SGLang's tree has there is nothing to find.
    assert desk.plan(texts(3), resident=100) is None


def test_too_little_is_not_worth_it(bench: Workbench) -> None:
    desk = Desk(bench, (0, 1, 2), blend_min_tokens=201)
    assert desk.plan([4, *texts(0)]) is None
    assert desk.plan([4, *texts(1)]) is not None
    # Nor is what the request has anyway.
    assert desk.plan(texts(0, 1, 2)) is None
    usual: Any = type("Usual", (), {"stop": 100})()
    assert desk.plan([4, *texts(1)], usual=usual) is None


@pytest.mark.parametrize(
    "wanted",
    [LoadOptions(blend=0.0), LoadOptions(bits=6.0, blend=1.0), LoadOptions(bits=6.0, blend="off")],
)
def test_who_never_blends(bench: Workbench, wanted: LoadOptions) -> None:
    desk = Desk(bench, (0, 1))
    assert desk.plan(texts(1, 0), wanted=wanted) is None
    assert desk.plan(texts(1, 0)) is not None
    assert desk.plan(texts(1, 0), namespace="other") is None
    desk.blending.refusal = "a test"
    assert desk.plan(texts(1, 0)) is None


def test_nothing_is_indexed_without_the_option(bench: Workbench) -> None:
    desk = Desk(bench, (0, 1), blend="off")
    assert desk.store.tree.content is None and desk.plan(texts(1, 0)) is None


def test_the_index_is_there_after_a_restart_and_follows_evictions(bench: Workbench) -> None:
    desk = Desk(bench, (0, 1), (0, 1, 2), (3,))
    bench.close(desk.store)
    desk = Desk(bench)
    content = desk.store.tree.content
    assert content is not None
    check_content(content)
    assert kinds_of(desk.plan([1, *texts(2), 1, *texts(3)]))[16:].count("r") == 390
    for segment in list(desk.store.tree.segments()):
        if segment.info.prefix_len:
            lose(bench, desk.store, segment.segment_id, gone=True)
    check_content(content)
    assert kinds_of(desk.plan([1, *texts(2), 1, *texts(3)])).count("r") == 203


def test_auto_computes_what_hardly_takes_longer_beside_reading(tmp_path: Path) -> None:
    """Of many layers: two compute all in any case."""
    bench = Workbench(tmp_path / "kv", make_shape(layers=20, probe=(), coded=True))
    desk = Desk(bench, (0, 1, 2))
    wanted = LoadOptions(bits=6.0, blend="auto")

    def share(seconds: float) -> float:
        desk.reading_takes(seconds)
        return desk.planned(texts(0, 2, 1), wanted=wanted).share

    # Without any pass nothing is known: as little as there is.
    assert share(1.0) == SHARES[-1]
    desk.passes_take(1.0)
    shares = [share(seconds) for seconds in (0.0, 0.05, 0.1, 0.2, 0.3, 5.0)]
    assert shares == sorted(shares) and shares[0] == SHARES[-1] and shares[-1] == SHARES[0]
    assert len(set(shares)) > 3
    bench.close_all()


def test_nobody_computes_for_longer_than_allowed(bench: Workbench) -> None:
    """However long reading takes, which keeps nobody waiting."""
    desk = Desk(bench, (0, 1, 2), blend_seconds=7.0)
    desk.passes_take(0.1)
    desk.reading_takes(100 * 7.0)
    assert desk.plan(texts(0, 2, 1)) is not None
    desk.passes_take(1e3, times=20)
    wanted = LoadOptions(bits=6.0, blend=0.5)
    assert desk.plan(texts(0, 2, 1), wanted=wanted) is None
    assert desk.why[0] == Reason.BLEND_TOO_LONG and desk.why[1].endswith(" of 7 s")


def test_why_nobody_blends(bench: Workbench) -> None:
    desk = Desk(bench, (0, 1, 2), load="faster")

    def why(tokens: list[int], wanted: LoadOptions = APPROXIMATE) -> str | None:
        assert desk.plan(tokens, wanted=wanted) is None
        return None if desk.why is None else ": ".join(desk.why)

    short = texts(0)[:90]
    assert why(texts(3)) is None and why([4, *short]) == "blend_too_short: 90 of 100 tokens"
    assert why([4, *short], LoadOptions(bits=6.0, blend=1.0)) is None, "it would not have"
    desk.passes_take(1.0)
    desk.reading_takes(100.0)
    assert str(why(texts(0, 2, 1))).startswith("blend_slower: 1000")
    desk.passes_take(1e6, times=20)
    assert str(why([4, *texts(2)], wanted=LoadOptions(bits=6.0, blend=0.9))).startswith(
        "blend_too_long: "
    )
    desk.blending.refusal = "a test"
    assert why(texts(0, 2, 1)) == "blend_unsupported: a test"


def test_what_blends_take_is_learnt_and_tried_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(bench, (0, 1, 2), load="faster")
    desk.reading_takes(0.0)
    desk.passes_take(0.5)
    wanted, now = LoadOptions(bits=6.0, blend=0.5), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def plan() -> BlendJob | None:
        return desk.plan(texts(0, 2, 1), wanted=wanted)

    fast = plan()
    assert fast is not None
    work = RequestLengths(fast.start, len(fast), fast.new)
    for _ in range(30):
        desk.estimator.note_blend(work, 201.0, 1.0)
    assert plan() is not None, "to see how fast it is"
    assert plan() is None and desk.why[0] == Reason.BLEND_SLOWER
    now[0] += MEASURE_SECONDS
    assert plan() is not None and plan() is None
    for _ in range(30):
        desk.estimator.note_blend(work, 201.0, 0.01)
    found = plan()
    assert found is not None and found.estimate.compute < fast.estimate.compute
    # Whoever waits for a blend of a minute does so seldom.
    for _ in range(60):
        desk.estimator.note_blend(work, 201.0, 60.0)
    now[0] += MEASURE_SECONDS
    assert plan() is not None
    now[0] += 5 * MEASURE_SECONDS
    assert plan() is None and desk.why[0] == Reason.BLEND_TOO_LONG
    now[0] += 20 * MEASURE_SECONDS
    assert plan() is not None


def test_a_basis_has_no_other_bits(tmp_path: Path) -> None:
    codec = codec_for(blending_desk.SHAPE)
    bench = Workbench(tmp_path / "kv", shape_by(codec.basis, blending_desk.SHAPE), codec)
    desk = Desk(bench, (0, 1), (2,))
    plan = desk.planned([9, *texts(2, 0, 1)], wanted=LoadOptions(bits=4.0, blend=0.0))
    assert plan.estimate.bits == quality_of(plan).bits == 4.0
    bench.close_all()


def carry_out(job: BlendJob, shape: KVShape = SHAPE) -> tuple[list[Tensor], list[Tensor]]:
    """What the loader's thread fills in: keys and values of each layer, NaN where it does not."""
    assert job.target is not None
    size = len(job), shape.num_kv_heads, 8
    pools = [[torch.full(size, math.nan) for _ in range(shape.num_layers)] for _ in range(2)]
    layers = StoredLayers(lambda layer: (pools[0][layer], pools[1][layer]))
    loader = JobLoader(torch.device("cpu"), layers, plain_codec(shape))
    job.state = JobState.LOADING
    loader.begin(job)
    assert job.done.wait(30)
    assert loader.close(30)
    keys, values = ([layer[job.target] for layer in pool] for pool in pools)
    return keys, values


def rounded(tokens: list[int], layer: int, part: slice, bits: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some tokens of a segment in so many bits."""
    kvs = SequenceKVs(SHAPE, "", tuple(tokens))
    codes = code_keys(kvs.keys(layer), bits), code_values(kvs.values(layer), bits)
    rows = restore(codes[0]), restore(codes[1])
    for found, exact in zip(rows, (kvs.keys(layer), kvs.values(layer)), strict=True):
        found[:SINK_TOKENS] = exact[:SINK_TOKENS]
    return rows[0][part], rows[1][part]


@pytest.mark.parametrize("block", [10_000, 128, 100])
@pytest.mark.parametrize(("resident", "bits"), [(0, 6), (60, 6)])
def test_what_comes_into_slots(bench: Workbench, block: int, resident: int, bits: int) -> None:
    """Keys as they would have been at the new place, values as they were, whoever computed them."""
    desk = Desk(bench, block=block)
    first, second = texts(0, 1, 2), texts(3, 2)
    bench.put(desk.store, first)
    bench.put(desk.store, second)
    prompt = [*texts(2), 5, *texts(3), 6, 7, *texts(1, 0)]
    plan = desk.planned(prompt, resident, wanted=LoadOptions(bits=bits, blend=0.0))
    assert plan.start == resident
    job = desk.job(plan)

    keys, values = carry_out(job)

    assert job.state is JobState.LOADED and job.unread(SHAPE.num_layers) == 0.0
    assert job.reads.chunks_accessed > 0 and job.bits == bits

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


def two_segments(bench: Workbench, **options: Any) -> tuple[Desk, BlendJob]:
    """A prompt of documents 1 and 0, which stand in segments of their own."""
    desk = Desk(bench, (0,), (1,), **options)
    return desk, desk.planned([4, *texts(1), 5, *texts(0)])


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("block", [10_000, 100])
@pytest.mark.parametrize("layer", [None, 0, 1])
def test_a_segment_that_cannot_be_read_is_computed_and_the_rest_reused(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, block: int, bad: int, layer: int | None
) -> None:
    """Gone before it is opened, or damaged where some layers are in slots already."""
    desk, plan = two_segments(bench, block=block, readahead=1.0)
    out, left = (plan.runs[number].span.segment for number in (bad, 1 - bad))
    original = WholeSource.read

    def read(source: WholeSource, number: int) -> Any:
        if number == layer and out.segment_id in source.segment_ids:
            raise SegmentUnreadable(out.segment_id, "a test")
        return original(source, number)

    monkeypatch.setattr(WholeSource, "read", read)
    if layer is None:
        bench.file_of(out.segment_id).unlink()
    job = desk.job(plan)
    carry_out(job)
    assert job.state is JobState.FAILED and isinstance(job.error, SegmentUnreadable)
    assert job.error.segment_id == out.segment_id
    desk.store.report(job.error)
    # Nobody finds it before a second look.
    again = desk.planned([4, *texts(1), 5, *texts(0)])
    assert {run.span.segment for run in again.runs} == {left}
    job = desk.job(again)
    keys, _ = carry_out(job)
    assert job.state is JobState.LOADED and 0 < job.parts[1] <= len(again.runs[0])
    (run,) = again.runs
    assert not keys[0][run.start : run.stop].isnan().any()


def test_a_job_that_is_revoked_is_left(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, plan = two_segments(bench, block=100)
    job = desk.job(plan)
    original, reads = WholeSource.read, [0]

    def read(source: WholeSource, number: int) -> Any:
        reads[0] += 1
        if reads[0] == 3:
            job.revoke()
        return original(source, number)

    monkeypatch.setattr(WholeSource, "read", read)
    carry_out(job)
    assert job.state is JobState.DROPPED and reads[0] == 3


@pytest.mark.parametrize("start", [0, 50, 203, 300])
def test_it_begins_where_its_prefix_ends(bench: Workbench, start: int) -> None:
    """What became resident since it was planned is not read; what is gone is read or computed."""
    desk = Desk(bench, (0, 1, 2))
    plan = desk.planned(texts(0, 2, 1), 203)
    assert plan.start == 203
    kinds, stop = plan.kinds, plan.stop
    plan.begin_at(start)
    assert len(plan.kinds) == len(plan) == stop - start
    # 200 tokens are stored as its prefix; the match was not used for three more.
    before = np.full(203, TokenKind.COMPUTED, np.uint8)
    assert (plan.kinds == np.concatenate([before, kinds])[start:]).all()
    assert all(start <= run.start < run.stop <= stop for run in plan.runs)
    covered = sum(map(len, plan.runs))
    assert covered == np.count_nonzero(plan.kinds != TokenKind.COMPUTED)
