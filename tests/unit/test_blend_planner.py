"""How requests reuse stored text that is no prefix: what is planned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from impress_sglang.blend.job import BlendJob
from impress_sglang.blend.planner import MEASURE_SECONDS, SHARES
from impress_sglang.cost import RequestLengths
from impress_sglang.serving.why import Reason
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.store.policies import LoadOptions
from impress_sglang.transfer.basis_codec import shape_by
from tests.unit import blending_desk
from tests.unit.basis_factory import codec_for
from tests.unit.blending_desk import APPROXIMATE, Desk, texts
from tests.unit.kv_factory import make_shape
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


def test_cut_conversations_are_found_shifted(bench: Workbench) -> None:
    """Their head is computed: the first 16 tokens that remain."""
    desk = Desk(bench, (0, 1, 2))
    plan = desk.plan([*texts(0, 1, 2)[300:], 1, 2])
    assert kinds_of(plan) == 16 * "c" + 287 * "r"
    assert plan is not None and {run.shift for run in plan.runs} == {-300}


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


def test_computing_all_is_chosen_where_it_is_faster(bench: Workbench) -> None:
    desk = Desk(bench, (0, 1, 2), load="faster")
    desk.passes_take(1.0)
    desk.reading_takes(100.0)
    assert desk.plan(texts(0, 2, 1)) is None
    desk.reading_takes(0.0)
    assert desk.plan(texts(0, 2, 1)) is not None


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
