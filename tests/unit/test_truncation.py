"""Where over-long prompts are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.config import ImpressConfig
from impress_sglang.options import OFF
from impress_sglang.serving.custom_params import (
    LEAST_ROOM,
    TRUNCATE_KEY,
    find_cut,
    share_of,
)

OPENER = -1


@given(
    limit=st.integers(1, 300),
    share=st.floats(0.01, 0.99),
    keep=st.integers(0, 320),
    messages=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    grown=st.integers(1, 40),
)
def test_cuts(limit: int, share: float, keep: int, messages: list[int], grown: int) -> None:
    """What is said first stays, it fits, and turns begin alike until the next cut."""
    tokens = list(range(keep))
    for length in messages:
        tokens += [OPENER, *range(1000 * len(tokens), 1000 * len(tokens) + length)]

    cut = find_cut(tokens, limit, share, keep, {OPENER})

    if len(tokens) <= limit or limit - keep < max(LEAST_ROOM * limit, 1):
        assert cut is None
        return
    assert cut is not None and cut.start == keep
    left = len(tokens) - len(cut)
    assert keep < left <= limit
    step = max(round(share * (limit - keep)), 1)
    # No more than a step too much, and half of what that leaves.
    assert limit - left < step + min(step, limit - keep - step) // 2 + 1
    longer = tokens + list(range(-2 - grown, -2))
    if -(-(len(longer) - limit) // step) == -(-(len(tokens) - limit) // step):
        assert find_cut(longer, limit, share, keep, {OPENER}) == cut


def test_turns_after_a_cut_begin_alike() -> None:
    """Half of the room is cut: the next cut is that many tokens away."""
    conversation = list(range(10_000))
    cuts = [find_cut(conversation[:length], 1000, 0.5, 100, ()) for length in range(1001, 2000)]
    assert cuts == [range(100, 550)] * 450 + [range(100, 1000)] * 450 + [range(100, 1450)] * 99


def test_what_is_left_begins_with_a_message() -> None:
    """Where one begins near; what begins far away is cut within."""
    opened = [*range(10), OPENER, *range(100, 180), OPENER, *range(200, 300)]
    assert find_cut(opened, 180, 0.4, 10, {OPENER}) == range(10, 91)
    assert find_cut(opened, 180, 0.4, 10, ()) == range(10, 78)
    assert find_cut(opened, 180, 0.2, 10, {OPENER}) == range(10, 44)


def test_requests_override_the_server() -> None:
    assert share_of({}, ImpressConfig()) is None
    assert share_of({TRUNCATE_KEY: 0.25}, ImpressConfig()) == 0.25
    assert share_of({TRUNCATE_KEY: OFF}, ImpressConfig(truncate=0.5)) is None
    assert share_of({}, ImpressConfig(truncate=0.5)) == 0.5
