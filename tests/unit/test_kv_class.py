"""Classes of KVs: no key of SGLang's tree stands for two of them, or for two requests' keys."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from impress_sglang.options import AUTO, AUTO_SHARE, BITS, EXACT_BITS, OFF
from impress_sglang.serving.kv_class import KVClass, marked, unmarked
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.store.policies import LoadOptions

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
        lambda own: marked(own[2], *own[:2])
    )
)


@given(KEYS, CLASSES, KEYS, CLASSES, CLASSES)
@example("impress-class:5|a", KVClass(), "a", KVClass(5.0), KVClass())
@example(None, KVClass(5.0), "", KVClass(5.0), KVClass())
@example(None, KVClass(5.0), "impress-class:5", KVClass(), KVClass())
@example(None, KVClass(5.0, 0.1234567), None, KVClass(5.0, 0.12345674), KVClass())
def test_different_arguments_have_different_keys(
    key: str | None, own: KVClass, other_key: str | None, other: KVClass, usual: KVClass
) -> None:
    same = marked(key, own, usual) == marked(other_key, other, usual)
    assert same == ((key, own) == (other_key, other))


@given(KEYS, CLASSES, CLASSES)
@example("impress-class:5|a", KVClass(), KVClass())
@example("a|b", KVClass(5.0), KVClass())
def test_the_key_of_a_request_comes_back(key: str | None, own: KVClass, usual: KVClass) -> None:
    assert unmarked(marked(key, own, usual)) == key


def test_the_class_of_a_request() -> None:
    assert KVClass.of(LoadOptions()) == KVClass()
    assert KVClass.of(LoadOptions(bits=6.0)) == KVClass(6.0)
    assert KVClass.of(LoadOptions(bits=6.0, blend=OFF)) == KVClass(6.0, 1.0)
    assert KVClass.of(LoadOptions(bits=6.0, blend=0.25)) == KVClass(6.0, 0.25)
    assert KVClass.of(LoadOptions(bits=6.0, blend=AUTO)) == KVClass(6.0, AUTO_SHARE)
    # Who wants exact KVs reuses no text behind other text.
    assert KVClass.of(LoadOptions(bits=EXACT_BITS, blend=0.25)) == KVClass()


@given(CLASSES, st.integers(0, 3))
def test_what_a_class_accepts(own: KVClass, depth: int) -> None:
    worst = own.worst(depth)
    assert EXACT.suffices(worst)
    if own.exact or not depth:
        assert worst == EXACT
    else:
        assert Quality(depth, own.bits, own.share).suffices(worst)
        assert not Quality(depth + 1, own.bits, own.share).suffices(worst)
        fewer = [bits for bits in BITS if bits < own.bits]
        assert not any(Quality(depth, bits, own.share).suffices(worst) for bits in fewer)
