"""How much of a match can be used where layers have sliding windows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.store.stored import StoredMatch, StoredSpan

spans = st.builds(
    lambda before, length, windows_from: (before, before + length, windows_from),
    st.integers(0, 5),
    st.integers(1, 20),
    st.integers(0, 30),
)


@given(found=st.lists(spans, max_size=5), window=st.integers(1, 12), page=st.integers(1, 4))
def test_the_longest_prefix_with_a_whole_window(
    found: list[tuple[int, int, int]], window: int, page: int
) -> None:
    segments: list[Any] = [
        SimpleNamespace(info=SimpleNamespace(windows_from=first)) for *_, first in found
    ]
    match = StoredMatch(
        tuple(
            StoredSpan(segment, start, stop)
            for segment, (start, stop, _) in zip(segments, found, strict=True)
        )
    )
    # Of each token, whether layers with windows have it.
    has = [at >= first for start, stop, first in found for at in range(start, stop)]
    usable = [
        length
        for length in range(0, len(has) + 1, page)
        if all(has[max(length - window, 0) : length])
    ]
    assert match.with_windows(window, page) == max(usable)
