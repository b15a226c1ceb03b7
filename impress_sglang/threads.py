"""Background threads must not take the processors that the model computes on."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import torch


def compute_alone() -> None:
    """From now on torch computes with this thread alone, when this thread asks.

    Else OpenMP gives each thread that computes a team of its own, as many as there are cores. As
    soon as all teams have more threads than there are cores, idle members do not spin any more but
    sleep after each parallel loop, in the model's team as well (libgomp's `GOMP_SPINCOUNT`): a
    forward pass on a CPU took a fifth longer, long after the other thread had done its work.
    """
    # Torch sets the number of a thread when it is first asked; it must not do so later.
    torch.get_num_threads()
    runtime = _openmp()
    if runtime is not None:
        runtime.omp_set_num_threads(1)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded, None if it has none."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"\S*/lib(gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    return None if found is None else ctypes.CDLL(found[0])
