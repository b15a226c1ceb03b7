"""Which units get how many planes: bits go where an error would weigh most.

In the attention output of a layer, an error of a key or value counts in proportion to the weight of
its token, and each further bit halves it. So for a given number of planes, the sum of squared
errors is least if planes go to the units in the order of

    weight of the unit x 4^(-bits that it has),

which is reverse water-filling (Cover and Thomas, Elements of Information Theory, 10.3.3), here in
steps of a plane.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from impress_sglang.precision.codec import BASE_BITS, LEVELS, NUM_PLANES, PLANE_BITS

_PLANES = np.arange(NUM_PLANES)[:, None]
# What a plane gains, relative to the first one: exact.
_SHRINKING = (4.0 ** -(PLANE_BITS * _PLANES)).astype(np.float32)


def allocate_planes(weights: Tensor, num_planes: int, floors: Tensor | None = None) -> Tensor:
    """How many planes each unit gets, so that `num_planes` are given besides the floors.

    Args:
        weights: [G, units] float32 on the CPU, squared attention weights, summed over the tokens of
            a unit and the queries of a KV head; heads compete with each other. Squares, because in
            a long unit, the few large weights are what counts.
        num_planes: besides the floors; with these, at most `NUM_PLANES` for each unit.
        floors: int64 [G, units] on the CPU, planes that a unit has in any case; None: none.

    Returns:
        int64 [G, units], from 0 to `NUM_PLANES`.
    """
    gains = weights.numpy().reshape(-1) * _SHRINKING
    gains[np.isnan(gains)] = np.inf
    if floors is not None:
        num_planes += int(floors.sum())
        gains[floors.numpy().reshape(-1) > _PLANES] = np.inf
    flat = gains.reshape(-1)
    count = min(num_planes, flat.size)
    given = np.zeros(flat.size, np.bool_)
    if count:
        least = np.partition(flat, flat.size - count)[flat.size - count]
        np.greater(flat, least, out=given)
        # A unit gets its planes in order: of equal gains (all zero), the first are taken first.
        given[np.flatnonzero(flat == least)[: count - np.count_nonzero(given)]] = True
    return torch.from_numpy(given.reshape(NUM_PLANES, -1).sum(0)).view_as(weights)


def mean_planes(bits: float) -> float:
    """How many planes a unit gets on average for `bits` per element."""
    return (bits - BASE_BITS) / PLANE_BITS


def whole_planes(bits: float) -> int:
    """How many planes every unit gets for `bits` per element, if they are allocated evenly."""
    return int(mean_planes(bits))


def certain_planes(bits: float) -> int:
    """How many planes every unit gets for `bits` per element, however they are allocated."""
    return NUM_PLANES if bits >= LEVELS[-1] else 0


def is_chosen(bits: float, planes: int) -> bool:
    """Whether some units get more than the `planes` that all of them get."""
    return mean_planes(bits) > planes


def planes_of(bits: float, num_units: int) -> int:
    """How many planes `num_units` units of a layer get for `bits` per element on average."""
    most = NUM_PLANES * num_units
    return min(most, max(0, int(mean_planes(bits) * num_units)))
