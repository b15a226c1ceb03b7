"""How good stored KVs are, and what a request takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.options import EXACT_BITS
from impress_sglang.storage.quality import EXACT, Quality

RETENTIONS = st.floats(0.0, 1.0, exclude_min=True)
BITS = st.sampled_from([4.0, 5.0, 8.0]) | st.just(EXACT_BITS)
SHARES = st.just(1.0) | st.floats(0.0, 1.0)
QUALITIES = st.just(EXACT) | st.builds(Quality, st.integers(1, 4), RETENTIONS, BITS, SHARES)


@pytest.mark.parametrize(
    "bad",
    [
        *((-1, 1.0), (1, 0.0), (1, -0.5), (1, 1.5), (0, 0.5)),
        *((1, 1.0, 0.0), (1, 1.0, 16.5), (0, 1.0, 5.0)),
        *((1, 1.0, 5.0, -0.1), (1, 1.0, 5.0, 1.1), (0, 1.0, 16.0, 0.5)),
    ],
)
def test_a_quality_that_cannot_be(bad: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError):
        Quality(*bad)


@given(QUALITIES)
def test_exact_kvs_suffice_for_everybody_and_only_they_for_the_exact(quality: Quality) -> None:
    assert EXACT.suffices(quality)
    assert quality.suffices(EXACT) == (quality == EXACT)


@given(QUALITIES, QUALITIES, QUALITIES)
def test_better_is_a_partial_order(a: Quality, b: Quality, c: Quality) -> None:
    assert a.suffices(a)
    if a.suffices(b) and b.suffices(a):
        assert a == b
    if a.suffices(b) and b.suffices(c):
        assert a.suffices(c)
    assert a.rank <= b.rank or not a.suffices(b)
    assert a.rank < b.rank or a.blended or not b.blended, "whatever else they rest on"


def test_neither_fewer_approximations_nor_more_tokens_make_up_for_the_other() -> None:
    often, coarse = Quality(2, 0.5), Quality(1, 0.25)

    assert not often.suffices(coarse) and not coarse.suffices(often)
    assert Quality(1, 0.5).suffices(often) and Quality(1, 0.5).suffices(coarse)
    part, few = Quality(1, 0.5), Quality(1, 1.0, 5.0)
    assert not part.suffices(few) and not few.suffices(part)
    assert Quality(1, 1.0, 8.0).suffices(few) and not few.suffices(Quality(1, 1.0, 8.0))


@given(QUALITIES, RETENTIONS, BITS, SHARES)
def test_what_is_computed_after_a_part_is_worse_by_one_approximation(
    before: Quality, retention: float, bits: float, share: float
) -> None:
    after = before.after(retention, bits, share)

    assert before.suffices(after)
    assert before.after(retention) == before.after(retention, EXACT_BITS)
    if retention == share == 1.0 and bits == EXACT_BITS:
        assert after == before
    else:
        assert after.depth == before.depth + 1
        assert after.retention == min(before.retention, retention)
        assert after.bits == min(before.bits, bits)
        assert after.share == min(before.share, share)


@given(QUALITIES, QUALITIES, QUALITIES)
def test_the_worst_of_several_is_what_a_request_must_take_to_take_each(
    a: Quality, b: Quality, least: Quality
) -> None:
    worst = a.worst(b)

    assert worst == b.worst(a) and a.worst(EXACT) == a
    assert worst.suffices(least) == (a.suffices(least) and b.suffices(least))
