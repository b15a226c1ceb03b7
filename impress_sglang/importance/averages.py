"""Moving averages of what was wanted: the mean of the first accesses, then an exponential average.

An average of zeros and ones is stored as a code, uint8, in steps of 1/255: the error is smaller
than the change by a single access.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from impress_sglang.loops.types import Float32s, Uint8s

# Weight of the newest access; the first ones count alike, so that few accesses give their mean.
AVERAGE_WEIGHT = 0.1
# The code for an average of 1.
STEPS = 255


def weights(accesses: npt.NDArray[np.integer]) -> Float32s:
    """The weight of the newest access, given the number of accesses including it."""
    return np.maximum(1.0 / np.maximum(accesses, 1), AVERAGE_WEIGHT).astype(np.float32)


def moved(average: npt.NDArray[np.generic], seen: Float32s, weight: Float32s) -> Float32s:
    """Averages after an access in which `seen` was observed."""
    exact = average.astype(np.float32)
    result: Float32s = exact + weight * (seen - exact)
    return result


def _moved_codes(accesses: int) -> tuple[Uint8s, Uint8s]:
    codes, weight = np.arange(STEPS + 1), weights(np.array([accesses]))
    kept, raised = (
        np.rint(moved(codes, np.full(len(codes), seen, np.float32), weight)) for seen in (0, STEPS)
    )
    return kept.astype(np.uint8), raised.astype(np.uint8)


# By the number of the access; from the last entry on, all accesses weigh alike.
_MOVED = [_moved_codes(accesses) for accesses in range(1, round(1 / AVERAGE_WEIGHT) + 1)]


def moved_codes(accesses: int) -> tuple[Uint8s, Uint8s]:
    """New codes, uint8 [256], for all codes not wanted, and wanted, by the access of this number.

    Numbers whose accesses weigh alike have the same two arrays.
    """
    return _MOVED[min(max(accesses, 1), len(_MOVED)) - 1]
