"""Triton kernels: codes and rows into slots, copies of pages, scores of probe heads.

Each kernel has a torch reference in `impress_sglang.codes` or `paper.scores`. Nothing here is
needed or imported on a CPU, except that tests run the kernels in Triton's interpreter.
"""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`; Triton's own takes microseconds."""
    return 1 << (number - 1).bit_length()
