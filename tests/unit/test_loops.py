"""The loops are compiled, also where that cannot be kept; what most compute, others test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core import config

from impress_sglang import loops
from impress_sglang.loops import areas
from impress_sglang.loops.jit import compiled


def test_the_compiled_loops_are_used_where_numba_is_installed() -> None:
    assert all(hasattr(getattr(loops, name), "nopython_signatures") for name in loops.__all__)


def test_loops_are_compiled_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read-only container: no folder for what is compiled."""
    monkeypatch.setattr(config, "CACHE_LOCATOR_CLASSES", "numba.core.caching.IPythonCacheLocator")

    @compiled("(int64,)")
    def successor(number: int) -> int:
        return number + 1

    assert successor(41) == 42 and hasattr(successor, "nopython_signatures")
    assert "NUMBA_CACHE_DIR" in caplog.text


@given(st.data(), st.integers(1, 3), st.integers(0, 5), st.integers(0, 9))
def test_units_of_planes(data: st.DataObject, heads: int, units: int, first: int) -> None:
    planes = st.lists(st.integers(0, 3), min_size=heads, max_size=heads)
    levels = np.array(data.draw(planes), np.uint8)

    found = areas.units_below(levels, first, first + units)

    plane = np.arange(3)[:, None]
    there = np.argwhere(plane < levels)
    expected = [[*own, unit] for own in there.tolist() for unit in range(first, first + units)]
    assert found.tolist() == expected
