"""What a request may ask of this extension, what it gets, and where over-long prompts are cut."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang import config as config_module
from impress_sglang.config import AUTO, BITS, EXACT_BITS, EXACTLY, OFF, USUAL_BITS, ImpressConfig
from impress_sglang.serving.custom_params import (
    BITS_KEY,
    KEEP_KEY,
    MIN_ROOM,
    PRIORITY_KEY,
    RETENTION_KEY,
    STORE_KEY,
    TRUNCATE_KEY,
    TTL_KEY,
    check_custom_params,
    find_cut,
    load_options_of,
    recompute_ratio_of,
)
from impress_sglang.store.policies import LoadOptions

CONFIG = ImpressConfig()
NO_NUMBERS = ("x", "0.5", True, False, None, [0.5], {}, 10**400, math.nan)
WRONG = {
    RETENTION_KEY: (*NO_NUMBERS, 0, 0.0, -0.5, 2, 1.0001, math.inf),
    BITS_KEY: (*NO_NUMBERS, 3, 5.5, 7, 8.0, 0, -5, 16, "5", "Exact", ""),
    TRUNCATE_KEY: (*NO_NUMBERS, 0, 1.0, 2),
    KEEP_KEY: (*NO_NUMBERS[:6], -1, 2.0),
    STORE_KEY: (None, 0, 1, "false", []),
    TTL_KEY: (None, 0, -1, True, "5", math.nan, math.inf, 2e9),
    PRIORITY_KEY: (None, 0, True, "", "LOW", "higher", [], {}, ["low"]),
}
RIGHT = {
    STORE_KEY: (True, False),
    TTL_KEY: (0.5, 60, 1e9),
    PRIORITY_KEY: ("low", "normal", "high"),
    KEEP_KEY: (0, 5),
}


@pytest.mark.parametrize(("key", "value"), [(k, value) for k in WRONG for value in WRONG[k]])
def test_others_are_refused_by_name_and_value(key: str, value: Any) -> None:
    for more in ({}, {RETENTION_KEY: 0.5}):
        with pytest.raises(ValueError, match=key) as caught:
            check_custom_params(more | {key: value}, CONFIG)

        assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [(k, value) for k in RIGHT for value in RIGHT[k]])
def test_what_a_request_may_ask_for(key: str, value: Any) -> None:
    check_custom_params({key: value}, CONFIG)


@pytest.mark.parametrize("key", ["impress_bit", "impress_TTL", "impress_", "impress_ttl "])
def test_a_typo_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is unknown; there are impress_bits, "):
        check_custom_params({BITS_KEY: 6, key: 6}, CONFIG)


@pytest.mark.parametrize("policy", config_module.POLICIES)
def test_only_the_papers_policies_have_parts(policy: str) -> None:
    config = ImpressConfig(policy=policy)
    check_custom_params({RETENTION_KEY: 1.0, BITS_KEY: 6}, config)
    if policy.startswith(("paper", "as+h2o")):
        check_custom_params({RETENTION_KEY: 0.5}, config)
    else:
        with pytest.raises(ValueError, match=f"uses prefixes whole .*; set {RETENTION_KEY} to 1"):
            check_custom_params({RETENTION_KEY: 0.5}, config)


def options_of(custom_params: object, config: ImpressConfig) -> LoadOptions:
    """What a request gets, which is let through."""
    check_custom_params(custom_params, config)
    found = load_options_of(SimpleNamespace(custom_params=custom_params), config)
    assert type(found.retention) is type(found.bits) is float
    return found


# What SGLang itself does with the second line is its own business.
WITHOUT = [None, {}, {"thinking_budget": 7}, {"impress": 0}]
NO_DICTIONARY = ["x", [1], 3, "impress_retention", "impress_bits"]


@pytest.mark.parametrize("custom_params", [*WITHOUT, *NO_DICTIONARY])
@pytest.mark.parametrize(
    ("config", "usual"),
    [
        (ImpressConfig(), LoadOptions(1.0, USUAL_BITS)),
        (
            ImpressConfig(policy="as+h2o+lfu", retention=0.3, bits=EXACTLY),
            LoadOptions(0.3, EXACT_BITS),
        ),
        (
            ImpressConfig(policy="paper", retention=AUTO),
            LoadOptions(config_module.AUTO_FLOOR, USUAL_BITS),
        ),
        (ImpressConfig(bits=AUTO), LoadOptions(1.0, USUAL_BITS, auto_bits=True)),
    ],
)
def test_a_request_that_asks_for_nothing_gets_what_is_usual_for_the_server(
    custom_params: object, config: ImpressConfig, usual: LoadOptions
) -> None:
    assert options_of(custom_params, config) == usual
    assert load_options_of(SimpleNamespace(), config) == usual


@pytest.mark.parametrize(
    ("floor", "asked", "given"),
    [
        *((0.1, share, share) for share in (0.7, 1, 0.3, 0.1)),
        *((0.1, share, 0.1) for share in (0.099, 1e-9)),
        (0.0, 1e-6, 1e-6),
    ],
)
def test_a_request_gets_what_it_asks_for_but_not_less_than_the_floor(
    floor: float, asked: float, given: float
) -> None:
    config = ImpressConfig(policy="paper", retention=0.3, min_retention=floor)
    found = options_of({RETENTION_KEY: asked, "thinking_budget": 7}, config)
    assert found == LoadOptions(given, USUAL_BITS, chosen=True)


@pytest.mark.parametrize(
    ("asked", "given"),
    [*((bits, float(bits)) for bits in (6, *BITS)), (EXACTLY, EXACT_BITS), (AUTO, USUAL_BITS)],
)
@pytest.mark.parametrize("usual", [5, EXACTLY, AUTO])
def test_a_request_gets_the_bits_that_it_asks_for(
    asked: float | str, given: float, usual: float | str
) -> None:
    """Its bits say nothing of its share."""
    config = ImpressConfig(policy="paper", retention=0.3, bits=usual)
    expected = LoadOptions(0.3, given, auto_bits=asked == AUTO)
    assert options_of({BITS_KEY: asked}, config) == expected
    whole = dataclasses.replace(expected, retention=1.0, chosen=True)
    assert options_of({BITS_KEY: asked, RETENTION_KEY: 1}, config) == whole


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

    if len(tokens) <= limit or limit - keep < max(MIN_ROOM * limit, 1):
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


def test_what_is_left_begins_with_a_message() -> None:
    """Where one begins near; what begins far away is cut within."""
    opened = [*range(10), OPENER, *range(100, 180), OPENER, *range(200, 300)]
    assert find_cut(opened, 180, 0.4, 10, {OPENER}) == range(10, 91)
    assert find_cut(opened, 180, 0.4, 10, ()) == range(10, 78)
    assert find_cut(opened, 180, 0.2, 10, {OPENER}) == range(10, 44)


def test_requests_override_the_server() -> None:
    assert recompute_ratio_of({}, ImpressConfig()) is None
    assert recompute_ratio_of({TRUNCATE_KEY: 0.25}, ImpressConfig()) == 0.25
    assert recompute_ratio_of({TRUNCATE_KEY: OFF}, ImpressConfig(truncate=0.5)) is None
    assert recompute_ratio_of({}, ImpressConfig(truncate=0.5)) == 0.5
