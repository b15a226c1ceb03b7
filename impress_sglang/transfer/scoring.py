"""Scores tokens on the device of their keys: with torch on a CPU, with kernels on a GPU.

Stage: probe. `Scorer` is the contract; tests/unit/triton/test_paths.py compares the two.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from impress_sglang.importance.scores import column_sums


class Scorer(Protocol):
    """The contract; `importance.scores.column_sums` defines the numbers."""

    def column_sums(
        self,
        queries: Tensor,
        prefix_keys: Tensor,
        resident_keys: Tensor,
        new_keys: Tensor,
        heads: tuple[int, ...],
        scaling: float,
        *,
        resident_rows: Tensor | None = None,
    ) -> Tensor:
        """Compute the importance of the tokens of a prefix.

        Args:
            queries: [n, Hq, D] of the new tokens, of all query heads that share the KV heads
                `heads`.
            prefix_keys: [m, heads, D].
            resident_keys: [c, G, D] of all KV heads.
            new_keys: [n, G, D] of all KV heads.
            heads: the KV heads that are scored, ascending.
            scaling: factor of the attention logits.
            resident_rows: int64 [c] on the device of the keys, the rows of `resident_keys` that are
                these tokens, which are read without copying all of them; None for all rows.

        Returns:
            [Hq, m] float32 on the device of the queries.
        """
        ...


def scorer_for(device: torch.device) -> Scorer:
    """The scorer that fits the device of the queries."""
    return kernel_scorer() if device.type == "cuda" else TorchScorer()


def kernel_scorer() -> Scorer:
    """Triton kernels that never write the weights to memory, and wait for nothing."""
    # Imported only where it is used: Triton is not needed on a CPU.
    from impress_sglang.triton import scores

    return scores


class TorchScorer:
    """Scores by matrix products and whole rows of weights, in blocks of queries."""

    def column_sums(
        self,
        queries: Tensor,
        prefix_keys: Tensor,
        resident_keys: Tensor,
        new_keys: Tensor,
        heads: tuple[int, ...],
        scaling: float,
        *,
        resident_rows: Tensor | None = None,
    ) -> Tensor:
        """See `Scorer`."""
        return column_sums(
            queries,
            prefix_keys,
            resident_keys,
            new_keys,
            scaling,
            heads=heads if len(heads) < new_keys.shape[1] else None,
            resident_rows=resident_rows,
        )
