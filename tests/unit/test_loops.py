"""The loops are compiled, also where that cannot be kept; what most compute, others test."""

from __future__ import annotations

import pytest
from numba.core import config

from impress_sglang.loops import heaps, placing
from impress_sglang.loops.jit import compiled


def test_the_compiled_loops_are_used_where_numba_is_installed() -> None:
    assert all(hasattr(own, "nopython_signatures") for own in (placing.place, heaps.lowest))


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
