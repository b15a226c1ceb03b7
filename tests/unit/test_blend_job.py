"""How requests reuse stored text that is no prefix: what is planned, and what comes into slots."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.blend.job import BlendJob, TokenKind
from impress_sglang.blend.planner import MEASURE_SECONDS, RECOMPUTE_RATIOS, BlendPlanner
from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.cost import Estimator, RequestLengths
from impress_sglang.errors import SegmentUnreadable
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.serving.load_jobs import JobState
from impress_sglang.serving.why import Reason
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.store.policies import LoadOptions, make_policy
from impress_sglang.transfer.basis_codec import shape_by
from impress_sglang.transfer.sources import WholeSource
from tests.unit import load_desk
from tests.unit.codes_factory import codec_for, in_codes
from tests.unit.kv_factory import SequenceKVs, as_tokens, make_shape
from tests.unit.load_desk import desks_in
from tests.unit.reading import EMPTY
from tests.unit.store_checks import check_content
from tests.unit.store_factory import look_again, lose, make_config

SHAPE = make_shape(probe=(), coded=True)
APPROXIMATE = LoadOptions(bits=6.0, blend=0.0)
DOCUMENTS = [
    np.random.default_rng(seed).integers(0, 1000, 200 + seed).tolist() for seed in range(4)
]


def texts(*numbers: int) -> list[int]:
    return [token for number in numbers for token in DOCUMENTS[number]]


def table(rows: int) -> Tensor:
    angles = torch.arange(rows)[:, None] * 50.0 ** (-torch.arange(0, 8, 2) / 8)
    return torch.cat([angles.cos(), angles.sin()], -1)


ROTATION = KeyRotation(table, halves=True)


class Desk(load_desk.Desk):
    """A store with documents, and all that weighs its use."""

    def __init__(
        self, root: Path, *stored: tuple[int, ...], block: int = 10_000, **options: Any
    ) -> None:
        """`stored` are prompts of documents."""
        usual = {"shape": SHAPE, "blend": 0.0, "blend_min_tokens": 100, "load": "always"}
        super().__init__(root, **usual | {"num_slots": 2000} | options)
        for numbers in stored:
            self.put(texts(*numbers))
        self.estimator = Estimator(64)
        config = make_config(root, **self.options)
        service: Any = SimpleNamespace(
            config=config, shape=self.shape, store=self.store, in_use=True, estimator=self.estimator
        )
        self.policy = make_policy(config)
        self.planner = BlendPlanner(service, ROTATION, 1, block, lambda spans: None)
        self.why: Any = None
        """Why the last request does not blend."""

    def plan(
        self,
        tokens: Sequence[int],
        resident: int = 0,
        namespace: str = "",
        wanted: LoadOptions = APPROXIMATE,
        usual: Any = None,
    ) -> BlendJob | None:
        # As `Service.class_of`.
        kv_class = KVClass.of(dataclasses.replace(wanted, bits=self.policy.bits(wanted)))
        found = self.planner.plan(
            namespace, (None, None), as_tokens(tokens), resident, usual, kv_class, wanted.blend
        )
        self.why = None if isinstance(found, BlendJob) else found
        return found if isinstance(found, BlendJob) else None

    def planned(self, *arguments: Any, **how: Any) -> BlendJob:
        """Of a request that does blend."""
        plan = self.plan(*arguments, **how)
        assert plan is not None
        return plan

    def reading_takes(self, seconds: float) -> None:
        segments: Any = self.store.readers
        segments.seconds_to_read = lambda num_bytes: seconds

    def passes_take(self, seconds: float, times: int = 8) -> None:
        """For 1,000 new tokens."""
        for _ in range(times):
            self.estimator.computing.observe(1000, 500_500.0, seconds)

    def run(self, job: BlendJob) -> tuple[list[Tensor], list[Tensor]]:
        """What is read into its slots: keys and values of each layer, EMPTY where nothing is."""
        job.set_start(job.start)
        self.wait(self.start(job))
        assert job.target_slots is not None
        rows = self.pools.rows(job.target_slots)
        return rows[: self.shape.num_layers], rows[self.shape.num_layers :]


Make = Callable[..., Desk]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from desks_in(tmp_path, Desk)


def kinds_of(plan: BlendJob) -> str:
    """One letter for each token and its kind."""
    return "".join("kcr"[kind] for kind in plan.kinds)


def quality_of(plan: BlendJob) -> Quality:
    """Of what is blended, and of what is computed after it."""
    return plan.match.quality.after(plan.estimate.bits, plan.recompute_ratio)


@pytest.mark.parametrize(
    ("tokens", "resident", "kinds", "shifts"),
    [
        (texts(0, 2, 1), 0, 200 * "k" + 403 * "r", [0, -201, 202]),
        (texts(0, 2, 1), 150, 50 * "k" + 403 * "r", [0, -201, 202]),
        (texts(3, 2), 204, 201 * "r", [-198]),
        (
            [*texts(2), 5, 6, *texts(0), 7, 8, 9],
            *(0, 16 * "c" + 186 * "r" + 2 * "c" + 200 * "r", [-401, 204]),
        ),
    ],
    ids=["behind a prefix", "a part is resident", "all before is", "without a prefix"],
)
def test_documents_in_another_order(
    make: Make, tokens: list[int], resident: int, kinds: str, shifts: list[int]
) -> None:
    """A prefix stays exact, and what is resident is not read."""
    plan = make((0, 1, 2)).planned(tokens, resident)
    assert kinds_of(plan) == kinds and [run.shift for run in plan.runs] == shifts
    assert plan.stop - resident == len(plan.kinds) and plan.num_new == 1 + len(tokens) - plan.stop
    assert quality_of(plan) != EXACT and bool(plan.match.spans) == ("k" in kinds)
    assert all(run.start >= resident for run in plan.runs) and plan.runs[-1].stop == plan.stop


def test_of_a_prefix_that_only_sglang_has_there_is_nothing_to_find(make: Make) -> None:
    assert make((0, 1, 2)).plan(texts(3), resident=100) is None


def test_behind_what_was_blended_before_only_the_rest_is(make: Make) -> None:
    """Its own text is no run for anybody, and who computes more again begins anew."""
    desk = make((0, 1, 2))
    desk.put(texts(3, 2, 1), quality=Quality(2, 6.0, 0.5))
    some, most = LoadOptions(bits=6.0, blend=0.25), LoadOptions(bits=6.0, blend=0.75)
    plan = desk.planned(texts(3, 2, 1, 0), wanted=some)
    assert kinds_of(plan) == 606 * "k" + 200 * "r" and plan.recompute_ratio == 0.25
    assert quality_of(plan) == Quality(3, 6.0, 0.25)
    assert desk.plan(texts(3, 2, 1), wanted=some) is None
    plan = desk.planned(texts(3, 2, 1, 0), wanted=most)
    assert kinds_of(plan).startswith(203 * "c" + 202 * "r")
    assert quality_of(plan) == Quality(1, 6.0, 0.75)
    assert desk.plan([7, *texts(3)]) is None, "what was blended is no donor"


@pytest.mark.parametrize(
    "how",
    [
        {"wanted": LoadOptions(blend=0.0)},
        {"wanted": LoadOptions(bits=6.0, blend=1.0)},
        {"wanted": LoadOptions(bits=6.0, blend="off")},
        {"namespace": "other"},
        # It has as much anyway.
        {"usual": SimpleNamespace(stop=302)},
    ],
    ids=str,
)
def test_who_never_blends(make: Make, how: dict[str, Any]) -> None:
    desk = make((0, 1))
    assert desk.plan(texts(1, 0)) is not None and desk.plan(texts(0, 1)) is None
    assert desk.plan(texts(1, 0), **how) is None


def test_nothing_is_indexed_without_the_option(make: Make) -> None:
    desk = make((0, 1), blend="off")
    assert desk.store.tree.content is None and desk.plan(texts(1, 0)) is None


def test_the_index_is_there_after_a_restart_and_follows_evictions(tmp_path: Path) -> None:
    with closing(Desk(tmp_path, (0, 1), (0, 1, 2), (3,))):
        pass
    with closing(Desk(tmp_path)) as desk:
        asked, content = [1, *texts(2), 1, *texts(3)], desk.store.tree.content
        assert content is not None
        check_content(content)
        assert kinds_of(desk.planned(asked))[16:].count("r") == 390
        for segment in list(desk.store.tree.segments()):
            if segment.info.prefix_len:
                lose(desk.bench, desk.store, segment.segment_id, gone=True)
        check_content(content)
        assert kinds_of(desk.planned(asked)).count("r") == 203


def test_auto_computes_what_hardly_takes_longer_beside_reading(make: Make) -> None:
    """Of many layers: two compute all in any case."""
    desk = make((0, 1, 2), shape=make_shape(layers=20, probe=(), coded=True))
    wanted = LoadOptions(bits=6.0, blend="auto")

    def share(seconds: float) -> float:
        desk.reading_takes(seconds)
        return desk.planned(texts(0, 2, 1), wanted=wanted).recompute_ratio

    # Without any pass nothing is known: as little as there is.
    assert share(1.0) == RECOMPUTE_RATIOS[-1]
    desk.passes_take(1.0)
    shares = [share(seconds) for seconds in (0.0, 0.05, 0.1, 0.2, 0.3, 5.0)]
    assert (
        shares == sorted(shares)
        and shares[0] == RECOMPUTE_RATIOS[-1]
        and shares[-1] == RECOMPUTE_RATIOS[0]
    )
    assert len(set(shares)) > 3


def test_why_nobody_blends(make: Make) -> None:
    desk = make((0, 1, 2), load="faster", blend_seconds=7.0)

    def why(tokens: list[int], wanted: LoadOptions = APPROXIMATE) -> str | None:
        assert desk.plan(tokens, wanted=wanted) is None
        return None if desk.why is None else ": ".join(desk.why)

    short = [4, *texts(0)[:99]]
    assert why(texts(3)) is None and why(short) == "blend_too_short: 99 of 100 tokens"
    assert why(short, LoadOptions(bits=6.0, blend=1.0)) is None, "it would not have"
    assert desk.plan([4, *texts(0)[:100]]) is not None
    for each in (desk, always := make((0, 1, 2), blend_seconds=7.0)):
        each.passes_take(0.1)
        each.reading_takes(100.0)
    assert str(why(texts(0, 2, 1))).startswith("blend_slower: 1000")
    assert always.plan(texts(0, 2, 1)) is not None, "reading keeps nobody waiting"
    desk.passes_take(1e6, times=20)
    too_long = str(why([4, *texts(2)], LoadOptions(bits=6.0, blend=0.9)))
    assert too_long.startswith("blend_too_long: ") and too_long.endswith(" of 7 s")
    desk.planner.refusal = "a test"
    assert why(texts(0, 2, 1)) == "blend_unsupported: a test"


def test_what_blends_take_is_learnt_and_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make((0, 1, 2), load="faster")
    desk.reading_takes(0.0)
    desk.passes_take(0.5)
    wanted, now = LoadOptions(bits=6.0, blend=0.5), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def plan() -> BlendJob | None:
        return desk.plan(texts(0, 2, 1), wanted=wanted)

    def learns(seconds: float, times: int = 30) -> None:
        for _ in range(times):
            desk.estimator.observe_blend(work, 201.0, seconds)

    fast = desk.planned(texts(0, 2, 1), wanted=wanted)
    work = RequestLengths(fast.start, len(fast), fast.num_new)
    learns(1.0)
    assert plan() is not None, "to see how fast it is"
    assert plan() is None and desk.why[0] == Reason.BLEND_SLOWER
    now[0] += MEASURE_SECONDS
    assert plan() is not None and plan() is None
    learns(0.01)
    found = plan()
    assert found is not None and found.estimate.compute < fast.estimate.compute
    # Whoever waits for a blend of a minute does so seldom.
    learns(60.0, times=60)
    for pause, tries in ((1, True), (5, False), (20, True)):
        now[0] += pause * MEASURE_SECONDS
        assert (plan() is not None) == tries
        assert tries or desk.why[0] == Reason.BLEND_TOO_LONG
    monkeypatch.undo()


def test_a_basis_has_no_other_bits(make: Make) -> None:
    codec = codec_for(SHAPE)
    desk = make((0, 1), (2,), shape=shape_by(codec.basis, SHAPE), codec=codec)
    plan = desk.planned([9, *texts(2, 0, 1)], wanted=LoadOptions(bits=4.0, blend=0.0))
    assert plan.estimate.bits == quality_of(plan).bits == 4.0


@pytest.mark.parametrize("block", [10_000, 128, 100])
@pytest.mark.parametrize("resident", [0, 60])
def test_what_comes_into_slots(make: Make, block: int, resident: int) -> None:
    """Keys as they would have been at the new place, values as they were, whoever computed them."""
    desk = make(block=block)
    first, second = texts(0, 1, 2), texts(3, 2)
    desk.put(first, second)
    job = desk.planned([*texts(2), 5, *texts(3), 6, 7, *texts(1, 0)], resident)
    assert job.start == resident

    keys, values = desk.run(job)

    assert job.state is JobState.LOADED and job.unread_fraction(SHAPE.num_layers) == 0.0
    assert job.read_stats.chunks_accessed > 0 and job.bits == 6.0

    for layer in range(SHAPE.num_layers):
        of_first, of_second = (
            in_codes(SequenceKVs(SHAPE, "", tuple(tokens)).read_from(0)(layer), 6)
            for tokens in (first, second)
        )
        stored = [(of_first, 0), (of_first, 200), (of_first, 401), (of_second, 0)]
        # Document 2 is stored twice; the run that was found says which it is.
        if job.runs[0].span.segment.info.num_tokens == len(second):
            stored[2] = of_second, 203
        place = 0
        for number, gap in ((2, 1), (3, 2), (1, 0), (0, 0)):
            low, high = max(place, resident), place + 200 + number
            (old_keys, old_values), start = stored[number]
            at = slice(low - resident, high - resident)
            of = slice(start + low - place, start + high - place)
            assert torch.allclose(values[layer][at], old_values[of], atol=1e-4)
            run = next(run for run in job.runs if run.start <= low < run.stop)
            old = torch.arange(low, high) - run.shift
            turns = ROTATION.factors(old, torch.arange(low, high))
            expected = ROTATION.move(old_keys[of], turns)
            assert torch.allclose(keys[layer][at], expected, atol=1e-3)
            place = high + gap
        assert (keys[layer] == EMPTY).all(2).all(1).sum() == 3


# Documents that stand in segments of their own.
TWO = [4, *texts(1), 5, *texts(0)]


def before_each_read(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[WholeSource, int], None]
) -> None:
    """Call it with each source and layer that is read."""
    original = WholeSource.read

    def read(source: WholeSource, layer: int) -> Any:
        look(source, layer)
        return original(source, layer)

    monkeypatch.setattr(WholeSource, "read", read)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("block", [10_000, 100])
@pytest.mark.parametrize("layer", [None, 0, 1])
def test_a_segment_that_cannot_be_read_is_computed_and_the_rest_reused(
    make: Make, monkeypatch: pytest.MonkeyPatch, block: int, bad: int, layer: int | None
) -> None:
    """Gone before it is opened, or damaged where some layers are in slots already."""
    desk = make((0,), (1,), block=block, readahead=1.0)
    job = desk.planned(TWO)
    out, left = (job.runs[number].span.segment for number in (bad, 1 - bad))

    def fail(source: WholeSource, number: int) -> None:
        if number == layer and out.segment_id in source.segment_ids:
            raise SegmentUnreadable(out.segment_id, "a test")

    before_each_read(monkeypatch, fail)
    if layer is None:
        desk.bench.file_of(out.segment_id).unlink()
    desk.run(job)
    assert job.state is JobState.FAILED and isinstance(job.error, SegmentUnreadable)
    assert job.error.segment_id == out.segment_id
    desk.store.report(job.error)
    # Nobody finds it before a second look.
    again = desk.planned(TWO)
    assert {run.span.segment for run in again.runs} == {left}
    keys, _ = desk.run(again)
    (run,), (_, reused, _) = again.runs, again.tokens_by_origin(again.stop)
    assert again.state is JobState.LOADED and 0 < reused <= len(run)
    assert not (keys[0][run.start : run.stop] == EMPTY).any()
    look_again(desk.store)


def test_a_job_that_is_revoked_is_left(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, layers = make((0,), (1,), block=100), list[int]()
    job = desk.planned(TWO)

    def revoke_third(source: WholeSource, layer: int) -> None:
        layers.append(layer)
        if len(layers) == 3:
            job.revoke()

    before_each_read(monkeypatch, revoke_third)
    desk.run(job)
    assert job.state is JobState.DROPPED and len(layers) == 3


@pytest.mark.parametrize("start", [0, 50, 203, 300])
def test_it_begins_where_its_prefix_ends(make: Make, start: int) -> None:
    """What became resident since it was planned is not read; what is gone is read or computed."""
    plan = make((0, 1, 2)).planned(texts(0, 2, 1), 203)
    assert plan.start == 203
    kinds, stop = plan.kinds, plan.stop
    plan.set_start(start)
    assert len(plan.kinds) == len(plan) == stop - start
    # 200 tokens are stored as its prefix; the match was not used for three more.
    before = np.full(203, TokenKind.COMPUTED, np.uint8)
    assert (plan.kinds == np.concatenate([before, kinds])[start:]).all()
    assert all(start <= run.start < run.stop <= stop for run in plan.runs)
    covered = sum(map(len, plan.runs))
    assert covered == np.count_nonzero(plan.kinds != TokenKind.COMPUTED)


@pytest.mark.parametrize("start", [0, 50, 200, 249, 300])
def test_what_was_resident_of_several_segments_may_be_evicted_since(make: Make, start: int) -> None:
    """Segments behind the part that was resident are read in any case, and once."""
    plan = make((0,), (0, 2), (0, 2, 1), (3,)).planned(texts(0, 2, 1, 3), 250)
    assert len(plan.match.spans) == 3
    plan.set_start(start)
    assert kinds_of(plan) == (603 - start) * "k" + 203 * "r"
    assert [token for run in plan.runs for token in range(run.start, run.stop)] == [
        *range(start, plan.stop)
    ]
