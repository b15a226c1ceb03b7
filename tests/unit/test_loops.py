"""The loops are compiled, also where that cannot be kept; what they compute, others test."""

from __future__ import annotations

import os
import subprocess
import sys

from impress_sglang import loops


def test_the_compiled_loops_are_used_where_numba_is_installed() -> None:
    assert all(hasattr(getattr(loops, name), "nopython_signatures") for name in loops.__all__)


def test_loops_are_compiled_where_nothing_can_be_kept() -> None:
    """A read-only container: no folder for what is compiled."""
    script = """
import logging
logging.basicConfig(level=logging.WARNING)
from impress_sglang.loops.jit import compiled

@compiled("(int64,)")
def successor(number: int) -> int:
    return number + 1

print(successor(41), type(successor).__name__)
"""
    environment = {
        **os.environ,
        "NUMBA_CACHE_LOCATOR_CLASSES": "numba.core.caching.IPythonCacheLocator",
    }
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["42", "CPUDispatcher"]
    assert "NUMBA_CACHE_DIR" in found.stderr
