"""A request that runs with a part of a stored prefix; probes, selects and loads in each layer."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from impress_sglang.config import EXACT_BITS
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.paper.scores import (
    agreed_tokens,
    column_sums,
    similarity_threshold,
    tokens_by_head,
)
from impress_sglang.paper.source import PartSource
from impress_sglang.paper.store import PartStore
from impress_sglang.storage.layout import KVShape

logger = logging.getLogger(__name__)

NOTHING_LOADED = {
    **dict.fromkeys(("layers_by_probe", "layers_by_fallback", "layers_whole"), 0),
    **dict.fromkeys(("probe_ms", "load_ms", "attention_ms"), 0.0),
}
"""The fields of a report to which a `StoredRequest` adds, before its first layer."""

Scorer = Callable[..., Tensor]
"""`paper.scores.column_sums`, or the kernel that gives the same numbers."""


@dataclasses.dataclass(eq=False, slots=True)
class StoredRequest:
    """A request that runs with `k` tokens of a stored prefix of `m` tokens.

    If k < m, its row begins with an offset, and attention sees only the slots after it:

        |<- start = m - k ->|<- resident ->|<- k ->|<- new ... ->|

    Invariants: the k slots are private (counted as protected by the tree) until `adopted`; layers
    below `layers_loaded` are in them, or zeros if the request has `failed`.

    With probe heads (IMPRESS 4.3) a layer uses the tokens that most of them chose, if their sets
    are more alike than t = j**alpha. Otherwise, and without probe heads (AS+H2O), all keys are
    read, and each KV head uses its own top k.
    """

    shape: KVShape
    alpha: float
    resident_slots: Tensor  # int64 [resident]
    slots: Tensor  # int64 [k]
    num_tokens: int
    store: PartStore
    source: PartSource
    report: dict[str, Any]
    layers_loaded: int = 0
    is_loading: bool = True  # the source is open
    failed: bool = False  # not loadable: SGLang drops the results of its pass
    adopted: bool = False  # its slots belong to SGLang's tree

    @property
    def k(self) -> int:
        """Number of tokens of the stored prefix that each layer uses."""
        return len(self.slots)

    @property
    def start(self) -> int:
        """First entry of the row that attention sees; 0 if all of the prefix is used."""
        return self.num_tokens - self.k

    def load(
        self,
        layer: int,
        queries: Tensor,
        new_keys: Tensor,
        scaling: float,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Fill its slots of pools [rows, G, D] with the tokens that a layer uses; layers ascend.

        Slot j of a head gets that head's j-th token. `queries` [n, Hq, D] and `new_keys` [n, G, D]
        are those of the new tokens, after rotation. If it raises `PrefixUnreadable`, the content of
        the slots is undefined. Returns int64 [head groups, u] on the CPU, ascending: the tokens
        that the heads of each head group use.
        """
        shape, source, k = self.shape, self.source, self.k
        probe, all_keys, sets, scores = None, None, None, None

        def scored(head_keys: Tensor, score: Scorer) -> Tensor:
            asking = queries[:, : head_keys.shape[1] * shape.group_size]
            return score(asking, head_keys, keys, self.resident_slots, new_keys, scaling)

        if shape.probe_kv_heads:
            with self.timed("load_ms"):
                probe = source.read_probe(layer)
        if k == source.num_tokens:
            self.report["layers_whole"] += 1
            sets = torch.arange(k)[None]
        elif probe is not None:
            with self.timed("probe_ms"):
                scores = scored(probe, probe_scorer(probe))
                threshold = similarity_threshold(k, source.num_tokens, self.alpha)
                sets = agreed_tokens(scores, k, threshold)
            self.report["layers_by_probe"] += sets is not None
        if sets is None:
            self.report["layers_by_fallback"] += 1
            with self.timed("load_ms"):
                others, _ = source.read(layer, None, values=False)
                all_keys = _joined(probe, others)
            with self.timed("probe_ms"):
                scores = scored(all_keys, column_sums)
                sets = tokens_by_head(scores, shape.group_size, k)
        with self.timed("load_ms"):
            groups = len(shape.head_groups)
            # A head group with several heads loads what any of its heads uses.
            loaded = sets.expand(groups, -1) if groups >= len(sets) else sets.unique()[None]
            others, loaded_values = source.read(layer, loaded.numpy(), keys=all_keys is None)
            assert loaded_values is not None
            place = None if loaded.shape[1] == k else torch.searchsorted(loaded[0], sets)
            loaded_values = loaded_values if place is None else _of_heads(loaded_values, place)
            if all_keys is not None:
                chosen = _of_heads(all_keys, sets)
            else:
                if probe is not None:
                    probe = probe.index_select(0, loaded[0].to(probe.device, non_blocking=True))
                chosen = _joined(probe, others)
            keys.index_copy_(0, self.slots, chosen)
            values.index_copy_(0, self.slots, loaded_values)
            source.record_selection(layer, loaded.numpy(), scores)
        return loaded

    @contextmanager
    def timed(self, field: str) -> Iterator[None]:
        """Add the time of the block, in milliseconds, to a field of the report."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = (time.perf_counter() - began) * 1e3
            self.report[field] = round(self.report[field] + took, 3)

    def fail(self, error: Exception) -> None:
        """Give up a prefix that cannot be loaded, and report an unreadable segment."""
        logger.warning("the stored prefix of a request cannot be loaded: %s", error)
        self.failed = True
        self.end_loading()
        if isinstance(error, PrefixUnreadable):
            self.store.report(error)

    def end_layer(self) -> None:
        """Count a layer as loaded; after the last one, end loading."""
        if self.is_loading:
            self.source.end_layer(self.layers_loaded)
        self.layers_loaded += 1
        if self.layers_loaded == self.source.num_layers:
            self.end_loading()

    def end_loading(self) -> None:
        """Close the source, if it is open, and report its reads."""
        if self.is_loading:
            self.is_loading = False
            # This counts the reads ahead.
            self.store.close_source(self.source)
            self.report.update(bits_mean=EXACT_BITS, **self.source.stats.as_dict())


def probe_scorer(keys: Tensor) -> Scorer:
    """On a GPU, return kernels that never write the weights to memory and do not synchronize."""
    if not keys.is_cuda:
        return column_sums
    # Imported here, as a CPU does not need Triton.
    from impress_sglang.triton import scores

    return scores.column_sums


def _joined(probe: Tensor | None, others: Tensor | None) -> Tensor:
    """Join the keys of probe heads, which come first, and of other heads: [rows, G, Dk]."""
    parts = [part for part in (probe, others) if part is not None]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _of_heads(rows: Tensor, sets: Tensor) -> Tensor:
    """Pick each head's own set, int64 [G, k] or [1, k], from rows [m, G, D]: [k, G, D]."""
    index = sets.T.to(rows.device, non_blocking=True)
    return rows[index, torch.arange(rows.shape[1], device=rows.device)]
