"""What a request may ask of this extension, and what it gets."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from impress_sglang.config import ImpressConfig
from impress_sglang.integration.request import (
    RETENTION_KEY,
    check_custom_params,
    requested_retention,
)


@pytest.mark.parametrize("value", [1, 1.0, 0.25, 1e-9])
def test_a_share_is_accepted(value: float) -> None:
    check_custom_params({RETENTION_KEY: value})
    check_custom_params({RETENTION_KEY: value, "thinking_budget": 7})


@pytest.mark.parametrize(
    "value",
    [
        0,
        0.0,
        -0.5,
        2,
        1.0001,
        10**400,
        float("nan"),
        float("inf"),
        "x",
        "0.5",
        True,
        False,
        None,
        [0.5],
        {},
    ],
)
def test_anything_else_is_refused_by_name_and_value(value: Any) -> None:
    with pytest.raises(ValueError, match=RETENTION_KEY) as caught:
        check_custom_params({RETENTION_KEY: value})

    assert repr(value) in str(caught.value)


# What SGLang itself does with the second line is its own business.
WITHOUT = [None, {}, {"thinking_budget": 7}, {"impress": 0}]
NO_DICTIONARY = ["x", [1], 3, "impress_retention"]


@pytest.mark.parametrize("custom_params", [*WITHOUT, *NO_DICTIONARY])
def test_what_is_not_ours_is_let_through(custom_params: object) -> None:
    check_custom_params(custom_params)


@pytest.mark.parametrize("custom_params", [*WITHOUT, *NO_DICTIONARY])
def test_a_request_that_asks_for_nothing_gets_the_retention_of_the_server(
    custom_params: object,
) -> None:
    config = ImpressConfig(retention=0.3)

    assert requested_retention(SimpleNamespace(custom_params=custom_params), config) is None
    assert requested_retention(SimpleNamespace(), config) is None


@pytest.mark.parametrize(
    ("asked", "given"), [(0.7, 0.7), (1, 1.0), (0.3, 0.3), (0.1, 0.1), (0.099, 0.1), (1e-9, 0.1)]
)
def test_a_request_gets_what_it_asks_for_but_not_less_than_the_floor(
    asked: float, given: float
) -> None:
    config = ImpressConfig(retention=0.3, min_retention=0.1)
    params = SimpleNamespace(custom_params={RETENTION_KEY: asked})

    found = requested_retention(params, config)

    assert found == given
    assert type(found) is float


def test_without_a_floor_any_share_is_given() -> None:
    params = SimpleNamespace(custom_params={RETENTION_KEY: 1e-6})

    assert requested_retention(params, ImpressConfig(min_retention=0.0)) == 1e-6


def test_the_check_needs_no_sglang() -> None:
    """It runs in the process that answers HTTP, before anything of a model is loaded."""
    code = (
        "import sys, impress_sglang.integration.request; "
        "print([name for name in sys.modules if name.split('.')[0] == 'sglang'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"
