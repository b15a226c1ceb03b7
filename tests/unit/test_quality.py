"""How good stored KVs are, what a request takes, and the classes of KVs in SGLang's tree."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from impress_sglang.config import AUTO, AUTO_SHARE, BITS, EXACT_BITS, OFF
from impress_sglang.serving.kv_class import KVClass, class_extra_key, request_extra_key
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.store.policies import LoadOptions

SOME_BITS = st.sampled_from([4.0, 5.0, 8.0]) | st.just(EXACT_BITS)
SOME_SHARES = st.just(1.0) | st.floats(0.0, 1.0)
QUALITIES = st.just(EXACT) | st.builds(Quality, st.integers(1, 4), SOME_BITS, SOME_SHARES)


@given(QUALITIES)
def test_exact_kvs_suffice_for_everybody_and_only_they_for_the_exact(quality: Quality) -> None:
    assert EXACT.is_at_least(quality)
    assert quality.is_at_least(EXACT) == (quality == EXACT)


@given(QUALITIES, QUALITIES, QUALITIES)
def test_better_is_a_partial_order(a: Quality, b: Quality, c: Quality) -> None:
    assert a.is_at_least(a)
    if a.is_at_least(b) and b.is_at_least(a):
        assert a == b
    if a.is_at_least(b) and b.is_at_least(c):
        assert a.is_at_least(c)
    assert a.rank <= b.rank or not a.is_at_least(b)
    assert a.rank < b.rank or a.blended or not b.blended, "whatever else they rest on"


def test_neither_fewer_approximations_nor_more_bits_make_up_for_the_other() -> None:
    often, coarse, better = Quality(2, 8.0), Quality(1, 5.0), Quality(1, 8.0)

    assert not often.is_at_least(coarse) and not coarse.is_at_least(often)
    assert better.is_at_least(often) and better.is_at_least(coarse)


@given(QUALITIES, SOME_BITS, SOME_SHARES)
def test_what_is_computed_behind_few_bits_is_worse_by_one_approximation(
    before: Quality, bits: float, share: float
) -> None:
    after = before.after(bits, share)

    assert before.is_at_least(after)
    if share == 1.0 and bits == EXACT_BITS:
        assert after == before
    else:
        assert after.depth == before.depth + 1
        assert after.bits == min(before.bits, bits)
        assert after.recompute_ratio == min(before.recompute_ratio, share)


@given(QUALITIES, QUALITIES, QUALITIES)
def test_the_worst_of_several_is_what_a_request_must_take_to_take_each(
    a: Quality, b: Quality, wanted: Quality
) -> None:
    worst = a.worst(b)

    assert worst == b.worst(a) and a.worst(EXACT) == a
    assert worst.is_at_least(wanted) == (a.is_at_least(wanted) and b.is_at_least(wanted))


SHARES = st.floats(0.0, 1.0, allow_nan=False)
CLASSES = st.just(KVClass()) | st.builds(KVClass, st.sampled_from(BITS), SHARES)
MARK = "impress-class:"
# What looks like a mark or like the border behind it, and anything else.
PIECES = st.sampled_from([MARK, "impress", "class:", "|", "5", "5/0.5", "exact", "/", ""])
KEYS = (
    st.none()
    | st.text(max_size=8)
    | st.lists(PIECES, max_size=5).map("".join)
    | st.tuples(CLASSES, CLASSES, st.text("|a", max_size=3)).map(
        lambda drawn: class_extra_key(drawn[2], *drawn[:2])
    )
)


@given(KEYS, CLASSES, KEYS, CLASSES, CLASSES)
@example("impress-class:5|a", KVClass(), "a", KVClass(5.0), KVClass())
@example(None, KVClass(5.0), "", KVClass(5.0), KVClass())
@example(None, KVClass(5.0), "impress-class:5", KVClass(), KVClass())
@example(None, KVClass(5.0, 0.1234567), None, KVClass(5.0, 0.12345674), KVClass())
def test_different_arguments_have_different_keys(
    key: str | None, kv_class: KVClass, other_key: str | None, other: KVClass, usual: KVClass
) -> None:
    same = class_extra_key(key, kv_class, usual) == class_extra_key(other_key, other, usual)
    assert same == ((key, kv_class) == (other_key, other))


@given(KEYS, CLASSES, CLASSES)
@example("impress-class:5|a", KVClass(), KVClass())
@example("a|b", KVClass(5.0), KVClass())
def test_the_key_of_a_request_comes_back(key: str | None, kind: KVClass, usual: KVClass) -> None:
    assert request_extra_key(class_extra_key(key, kind, usual)) == key


@pytest.mark.parametrize(
    ("bits", "blend", "expected"),
    [
        (EXACT_BITS, OFF, KVClass()),
        (6.0, OFF, KVClass(6.0, 1.0)),
        (6.0, 0.25, KVClass(6.0, 0.25)),
        (6.0, AUTO, KVClass(6.0, AUTO_SHARE)),
        # Who wants exact KVs reuses no text behind other text.
        (EXACT_BITS, 0.25, KVClass()),
    ],
)
def test_the_class_of_a_request(bits: float, blend: float | str, expected: KVClass) -> None:
    assert KVClass.of(LoadOptions(bits=bits, blend=blend)) == expected


@given(CLASSES, st.integers(0, 3))
def test_what_a_class_accepts(kv_class: KVClass, depth: int) -> None:
    worst = kv_class.worst(depth)
    assert EXACT.is_at_least(worst)
    if kv_class.exact or not depth:
        assert worst == EXACT
    else:
        assert Quality(depth, kv_class.bits, kv_class.recompute_ratio).is_at_least(worst)
        assert not Quality(depth + 1, kv_class.bits, kv_class.recompute_ratio).is_at_least(worst)
        fewer = [bits for bits in BITS if bits < kv_class.bits]
        assert not any(
            Quality(depth, bits, kv_class.recompute_ratio).is_at_least(worst) for bits in fewer
        )
