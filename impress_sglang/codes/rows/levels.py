"""Scalar quantisers of a normal distribution, in 0 to 8 bits.

The levels of b bits are u (p + q u^2) / (1 - r u^2) at the centres u = (2 c + 1 - 2^b) / 2^b of
codes c, with three numbers of each b by which the mean square error is within a percent of the
least possible (Max 1960). So loops compute levels in vectors, without a table. Cells end half-way
between levels.
"""

from __future__ import annotations

import numpy as np

from impress_sglang.loops.types import Float32s

# p, q and r of 0 to 8 bits: float32 [9, 3].
CURVES = np.array(
    [
        (1.0, 0.0, 0.0),
        (1.5957692, 0.0, 0.0),
        (1.7934, -0.6910, 0.5377),
        (1.9555, -0.6107, 0.5159),
        (2.0620, -0.8871, 0.6372),
        (2.1352, -1.1435, 0.7291),
        (2.1891, -1.3523, 0.7928),
        (2.2301, -1.5085, 0.8350),
        (2.2618, -1.6224, 0.8632),
    ],
    np.float32,
)
MAX_BITS = len(CURVES) - 1


def _levels(bits: int) -> Float32s:
    p, q, r = CURVES[bits]
    size = 1 << bits
    centres = ((2 * np.arange(size) + 1 - size) / size).astype(np.float32)
    square = centres * centres
    levels: Float32s = centres * (p + q * square) / (1 - r * square)
    return levels


# Of b bits: float32 [2**b], ascending, and float32 [2**b - 1] between them.
LEVELS = [_levels(bits) for bits in range(MAX_BITS + 1)]
BOUNDS = [(own[1:] + own[:-1]) / 2 for own in LEVELS]
# float32 [511]: the levels of 0 to 8 bits; those of b bits begin at 2**b - 1.
LEVEL_TABLE = np.concatenate(LEVELS)
