"""Sizes of launches, which the host computes for each of them.

Triton's own functions for this also work in kernels, and take several microseconds.
"""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
