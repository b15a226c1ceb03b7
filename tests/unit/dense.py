"""Sums of attention weights as their definition says, one query and one head at a time."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def column_sums(
    queries: Tensor,
    prefix: Tensor,
    resident: Tensor,
    new: Tensor,
    scaling: float,
) -> np.ndarray:
    """Of the columns of the prefix, float64 [Hq, m]."""
    q, p, c, x = (t.double().numpy() for t in (queries, prefix, resident, new))
    num_new, num_heads, _ = q.shape
    group = num_heads // p.shape[1]
    total = np.zeros((num_heads, len(p)))
    for head in range(num_heads):
        key_head = head // group
        for i in range(num_new):
            seen = np.concatenate([c[:, key_head], p[:, key_head], x[: i + 1, key_head]])
            logits = seen @ q[i, head] * scaling
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            total[head] += weights[len(c) : len(c) + len(p)]
    return total
