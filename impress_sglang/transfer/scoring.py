"""Scores tokens where their keys are: with torch on a CPU, with kernels on a GPU.

Stage: probe. `Scorer` is the contract; tests/unit/triton/test_paths.py compares the two.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from impress_sglang.importance.scores import column_sums
from impress_sglang.storage.sketch import Sketch


class Scorer(Protocol):
    """The contract; `importance.scores.column_sums` defines the numbers."""

    def column_sums(
        self,
        queries: Tensor,
        prefix_keys: Tensor | Sketch,
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
            prefix_keys: [m, heads, D] or a sketch of all heads; on any device.
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
        prefix_keys: Tensor | Sketch,
        resident_keys: Tensor,
        new_keys: Tensor,
        heads: tuple[int, ...],
        scaling: float,
        *,
        squares: bool = False,
    ) -> Tensor:
        """See `Scorer`."""
        keys = prefix_keys.restore() if isinstance(prefix_keys, Sketch) else prefix_keys
        chosen = list(heads)
        resident, new = resident_keys[:, chosen], new_keys[:, chosen]
        return column_sums(
            queries, keys.to(queries.device), resident, new, scaling, squares=squares
        )


class KernelScorer:
    """Triton kernels that never write the weights, and restore sketches as they read them."""

    def __init__(self) -> None:
        # Only where it is used: Triton is not needed on a CPU.
        from impress_sglang.triton import scores

        self._kernels = scores

    def column_sums(
        self,
        queries: Tensor,
        prefix_keys: Tensor | Sketch,
        resident_keys: Tensor,
        new_keys: Tensor,
        heads: tuple[int, ...],
        scaling: float,
        *,
        squares: bool = False,
    ) -> Tensor:
        """See `Scorer`; nothing is waited for."""
        kernels = self._kernels
        rows = kernels.KeyRows
        prefix: Any
        if isinstance(prefix_keys, Sketch):
            own = prefix_keys
            prefix = kernels.SketchRows(own.codes, own.table, own.bits, own.start)
        else:
            # Keys of several sketches were restored in float32.
            prefix = rows(prefix_keys.to(queries.device, queries.dtype))
        resident = rows(resident_keys, heads=heads) if len(resident_keys) else None
        return kernels.column_sums(
            queries,
            prefix,
            resident,
            rows(new_keys, heads=heads),
            scaling,
            new_lengths=[len(queries)],
            prefix_lengths=[len(prefix_keys)],
            resident_lengths=[len(resident_keys)],
            squares=squares,
        )
