"""How requests reuse stored text that is no prefix: what comes into slots."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.blend.job import BlendJob, Kind
from impress_sglang.codes.groups.codec import code_keys, code_values
from impress_sglang.codes.groups.codec import restore as restore_codes
from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.serving.load_jobs import JobLoader, JobState
from impress_sglang.storage.layout import KVShape
from impress_sglang.store.policies import LoadOptions
from impress_sglang.transfer.sources import WholeSource
from tests.unit import blending_desk
from tests.unit.blending_desk import ROTATION, SHAPE, Desk, texts
from tests.unit.kv_factory import SequenceKVs
from tests.unit.store_factory import Workbench

bench = blending_desk.bench


def carry_out(job: BlendJob, shape: KVShape = SHAPE) -> tuple[list[Tensor], list[Tensor]]:
    """What the loader's thread fills in: keys and values of each layer, NaN where it does not."""
    assert job.target is not None
    size = len(job), shape.num_kv_heads, 8
    pools = [[torch.full(size, math.nan) for _ in range(shape.num_layers)] for _ in range(2)]
    loader = JobLoader(shape, torch.device("cpu"), lambda layer: (pools[0][layer], pools[1][layer]))
    job.state = JobState.LOADING
    loader.begin(job)
    assert job.done.wait(30) and list(loader.take_ended()) == [job]
    assert loader.close(30)
    keys, values = ([own[job.target] for own in pool] for pool in pools)
    return keys, values


def rounded(tokens: list[int], layer: int, part: slice, bits: int) -> tuple[Tensor, Tensor]:
    """Keys and values of some tokens of a segment in so many bits."""
    own = SequenceKVs(SHAPE, "", tuple(tokens))
    codes = code_keys(own.keys(layer), bits), code_values(own.values(layer), bits)
    rows = restore_codes(codes[0]), restore_codes(codes[1])
    for found, exact in zip(rows, (own.keys(layer), own.values(layer)), strict=True):
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
    assert job.reads.chunks_accessed > 0 and job.fills.bits == bits

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
    out, left = (plan.runs[own].span.segment for own in (bad, 1 - bad))
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


def test_where_the_drive_does_not_answer_the_job_fails(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not the fault of a segment: everything stays where it is."""
    desk, plan = two_segments(bench)

    def read(source: WholeSource, number: int) -> Any:
        raise StoreUnavailable(source.segment_ids[0], "a test")

    monkeypatch.setattr(WholeSource, "read", read)
    job = desk.job(plan)
    carry_out(job)
    assert job.state is JobState.FAILED and isinstance(job.error, StoreUnavailable)


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
    planned_at = 203
    assert plan.start == planned_at
    kinds, stop = plan.kinds, plan.stop
    job = plan
    job.begin_at(start)
    assert len(job.kinds) == len(job) == stop - start
    whole = np.concatenate([np.full(203, 255, np.uint8), kinds])[start:]
    if start < planned_at:
        # 200 tokens are stored as its prefix; the match was not used for three more.
        whole[: planned_at - start] = Kind.COMPUTED
    assert (job.kinds == whole).all()
    assert all(start <= run.start < run.stop <= stop for run in job.runs)
    covered = sum(map(len, job.runs))
    assert covered == np.count_nonzero(job.kinds != Kind.COMPUTED)
