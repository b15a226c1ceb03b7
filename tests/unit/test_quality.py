"""How good stored KVs are, and what a request takes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.options import EXACT_BITS
from impress_sglang.storage.quality import EXACT, Quality

BITS = st.sampled_from([4.0, 5.0, 8.0]) | st.just(EXACT_BITS)
SHARES = st.just(1.0) | st.floats(0.0, 1.0)
QUALITIES = st.just(EXACT) | st.builds(Quality, st.integers(1, 4), BITS, SHARES)


@pytest.mark.parametrize(
    "bad",
    [
        *((-1, 16.0), (1, 0.0), (1, -5.0), (1, 16.5), (0, 5.0)),
        *((1, 5.0, -0.1), (1, 5.0, 1.1), (0, 16.0, 0.5)),
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


def test_neither_fewer_approximations_nor_more_bits_make_up_for_the_other() -> None:
    often, coarse, better = Quality(2, 8.0), Quality(1, 5.0), Quality(1, 8.0)

    assert not often.suffices(coarse) and not coarse.suffices(often)
    assert better.suffices(often) and better.suffices(coarse)


@given(QUALITIES, BITS, SHARES)
def test_what_is_computed_behind_few_bits_is_worse_by_one_approximation(
    before: Quality, bits: float, share: float
) -> None:
    after = before.after(bits, share)

    assert before.suffices(after)
    if share == 1.0 and bits == EXACT_BITS:
        assert after == before
    else:
        assert after.depth == before.depth + 1
        assert after.bits == min(before.bits, bits)
        assert after.share == min(before.share, share)


@given(QUALITIES, QUALITIES, QUALITIES)
def test_the_worst_of_several_is_what_a_request_must_take_to_take_each(
    a: Quality, b: Quality, least: Quality
) -> None:
    worst = a.worst(b)

    assert worst == b.worst(a) and a.worst(EXACT) == a
    assert worst.suffices(least) == (a.suffices(least) and b.suffices(least))
