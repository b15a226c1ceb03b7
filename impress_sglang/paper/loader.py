"""Runs one layer of one request through probe -> select -> load."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from impress_sglang.paper.scores import agreed_tokens, column_sums, own_tokens, similarity_threshold
from impress_sglang.paper.source import PartSource
from impress_sglang.storage.layout import KVShape

Scorer = Callable[..., Tensor]
"""`paper.scores.column_sums`, or the kernel that gives the same numbers."""


@dataclasses.dataclass(slots=True)
class LoadStats:
    """What loading one request's prefix took, and attention; milliseconds of wall clock.

    `layers_by_fallback` read all keys; `layers_by_probe` chose their tokens without that.
    """

    layers_by_probe: int = 0
    layers_by_fallback: int = 0
    layers_whole: int = 0
    probe_ms: float = 0.0
    load_ms: float = 0.0
    attention_ms: float = 0.0

    @contextmanager
    def timed(self, field: str) -> Iterator[None]:
        """Add the time of the block to `field`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, field, getattr(self, field) + (time.perf_counter() - start) * 1e3)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerInputs:
    """What attention of a layer knows of a request before its prefix is loaded.

    queries [n, Hq, D] and new_keys [n, G, D] of the new tokens; resident_keys [rows, G, D] is the
    pool, and resident_rows int64 [c] the rows of the resident tokens in it. All after rotation, in
    the model's dtype.
    """

    queries: Tensor
    new_keys: Tensor
    resident_keys: Tensor
    resident_rows: Tensor
    scaling: float


class PartLoader:
    """Loads the tokens of a prefix that a layer uses.

    With probe heads (IMPRESS 4.3) these are the tokens that most of them chose, if their sets are
    more alike than t = j**alpha. Else, and without probe heads (AS+H2O), all keys are read, and
    each KV head takes its own top k.
    """

    def __init__(self, shape: KVShape, alpha: float) -> None:
        self._shape = shape
        self._alpha = alpha

    def load(
        self,
        layer: int,
        source: PartSource,
        inputs: LayerInputs,
        keys: Tensor,
        values: Tensor,
        rows: Tensor,
        stats: LoadStats,
    ) -> Tensor:
        """Fill rows int64 [k] of pools [rows, G, D] with the tokens that this layer uses.

        Row j of a head gets that head's own j-th token. Layers ascend for each source. If it raises
        `PrefixUnreadable`, what is in the rows is undefined. Returns int64 [head groups, u] on the
        CPU, ascending: the tokens that the heads of each head group use.
        """
        shape, k = self._shape, len(rows)
        if k == source.num_tokens:
            stats.layers_whole += 1
            with stats.timed("load_ms"):
                probe = source.read_probe(layer) if shape.probe_kv_heads else None
                others, found = source.read(layer, None)
                keys[rows], values[rows] = self._joined(probe, others), found
                everything = np.arange(k)[None].repeat(shape.num_head_groups, 0)
                source.note_selection(layer, everything, None)
            return torch.from_numpy(everything)
        probe, all_keys, agreed = None, None, None
        if shape.probe_kv_heads:
            with stats.timed("load_ms"):
                probe = source.read_probe(layer)
            with stats.timed("probe_ms"):
                scores = self._scores(inputs, probe, shape.probe_kv_heads, probe_scorer(probe))
                threshold = similarity_threshold(k, source.num_tokens, self._alpha)
                agreed = agreed_tokens(scores, k, threshold)
        if agreed is None:
            stats.layers_by_fallback += 1
            with stats.timed("load_ms"):
                others, _ = source.read(layer, None, values=False)
                all_keys = self._joined(probe, others)
            with stats.timed("probe_ms"):
                scores = self._scores(inputs, all_keys, range(shape.num_kv_heads), column_sums)
                sets = own_tokens(scores, shape.group_size, k)
        else:
            stats.layers_by_probe += 1
            sets = agreed[None]
        with stats.timed("load_ms"):
            groups = shape.num_head_groups
            # A head group with several heads loads what any of its heads uses.
            loaded = sets.expand(groups, -1) if groups >= len(sets) else sets.unique()[None]
            others, found = source.read(layer, loaded.numpy(), keys=all_keys is None)
            assert found is not None
            place = None if loaded.shape[1] == k else torch.searchsorted(loaded[0], sets)
            values[rows] = found if place is None else _of_heads(found, place)
            if all_keys is not None:
                keys[rows] = _of_heads(all_keys, sets)
            else:
                assert probe is not None
                chosen = loaded[0].to(probe.device, non_blocking=True)
                keys[rows] = self._joined(probe[chosen], others)
            source.note_selection(layer, loaded.numpy(), scores)
        return loaded

    def _scores(
        self, inputs: LayerInputs, keys: Tensor, heads: Sequence[int], score: Scorer
    ) -> Tensor:
        """Importance [Hq, m] float32 by keys [m, heads, Dk] of some KV heads."""
        queries, size = inputs.queries, self._shape.group_size
        if len(heads) < self._shape.num_kv_heads:
            queries = queries[:, [head * size + own for head in heads for own in range(size)]]
        return score(
            queries,
            keys,
            inputs.resident_keys,
            inputs.new_keys,
            inputs.scaling,
            heads=tuple(heads),
            resident_rows=inputs.resident_rows,
        )

    def _joined(self, probe: Tensor | None, others: Tensor | None) -> Tensor:
        """Join the keys of probe and of other heads to [rows, G, Dk], in the order of the heads."""
        found = [own for own in (probe, others) if own is not None]
        if len(found) == 1:
            return found[0]
        shape = self._shape
        joined = found[0].new_empty(len(found[0]), shape.num_kv_heads, shape.key_dim)
        for heads, own in zip((shape.probe_kv_heads, shape.other_kv_heads), found, strict=True):
            for place, head in enumerate(heads):
                joined[:, head] = own[:, place]
        return joined


def probe_scorer(keys: Tensor) -> Scorer:
    """On a GPU kernels, which never write the weights to memory, and wait for nothing."""
    if not keys.is_cuda:
        return column_sums
    # Imported only where it is used: Triton is not needed on a CPU.
    from impress_sglang.triton import scores

    return scores.column_sums


def _of_heads(rows: Tensor, sets: Tensor) -> Tensor:
    """Pick each head's own set, int64 [G, k] or [1, k], from rows [m, G, D]: [k, G, D]."""
    index = sets.T.to(rows.device, non_blocking=True)
    return rows[index, torch.arange(rows.shape[1], device=rows.device)]
