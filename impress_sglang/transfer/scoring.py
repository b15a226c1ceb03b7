"""Scores tokens where their keys are: with torch on a CPU, with kernels on a GPU.

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
        squares: bool = False,
    ) -> Tensor:
        """Importance of the tokens of a prefix.

        Args:
            queries: [n, Hq, D] of all query heads that share the KV heads `heads`.
            prefix_keys: [m, heads, D], on any device.
            resident_keys: [c, G, D] of all KV heads.
            new_keys: [n, G, D] of all KV heads.
            heads: the KV heads that are scored, ascending.
            scaling: factor of the attention logits.
            squares: of the weights are summed.

        Returns:
            [Hq, m] float32 on the device of the queries.
        """
        ...


def scorer_for(device: torch.device) -> Scorer:
    """What fits the device of the queries."""
    return KernelScorer() if device.type == "cuda" else TorchScorer()


class TorchScorer:
    """Matrix products and whole rows of weights, in blocks of queries."""

    def column_sums(
        self,
        queries: Tensor,
        prefix_keys: Tensor,
        resident_keys: Tensor,
        new_keys: Tensor,
        heads: tuple[int, ...],
        scaling: float,
        *,
        squares: bool = False,
    ) -> Tensor:
        """See `Scorer`."""
        chosen, keys = list(heads), prefix_keys.to(queries.device)
        resident, new = resident_keys[:, chosen], new_keys[:, chosen]
        return column_sums(queries, keys, resident, new, scaling, squares=squares)


class KernelScorer:
    """Triton kernels that never write the weights."""

    def __init__(self) -> None:
        # Only where it is used: Triton is not needed on a CPU.
        from impress_sglang.triton import scores

        self._kernels = scores

    def column_sums(
        self,
        queries: Tensor,
        prefix_keys: Tensor,
        resident_keys: Tensor,
        new_keys: Tensor,
        heads: tuple[int, ...],
        scaling: float,
        *,
        squares: bool = False,
    ) -> Tensor:
        """See `Scorer`; nothing is waited for."""
        keys = prefix_keys.to(queries.device)
        return self._kernels.column_sums(
            queries, keys, resident_keys, new_keys, heads, scaling, squares=squares
        )
