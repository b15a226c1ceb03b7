"""Reads rows and loads layers into slots of a pool, and hands them out as tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impress_sglang.paper.request import StoredRequest
from impress_sglang.paper.source import PartSource
from impress_sglang.serving.report import new_report
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.sources import StoredSource
from tests.unit.waiting import wait_until

SPARE = 3
# What is in slots that nobody has filled.
EMPTY = -77.0


class Pools:
    """Keys and values [slots, G, D] of each layer, which nobody has filled."""

    def __init__(self, shape: KVShape, num_slots: int) -> None:
        self.keys, self.values = (
            [
                torch.full((num_slots, shape.num_kv_heads, dim), EMPTY, dtype=shape.dtype)
                for _ in range(shape.num_layers)
            ]
            for dim in (shape.key_dim, shape.value_dim)
        )

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer], self.values[layer]

    def rows(self, slots: Tensor) -> list[Tensor]:
        return [pool[slots] for pool in (*self.keys, *self.values)]

    def empty(self, slots: Tensor) -> bool:
        return all(bool((rows == EMPTY).all()) for rows in self.rows(slots))

    def check(self, layer: int, slots: Tensor, expected: Sequence[Tensor]) -> None:
        """Slots hold this, but for a rounding or two, and no others were touched."""
        for pool, rows in zip(self(layer), expected, strict=True):
            slack = 2 * torch.finfo(pool.dtype).eps * float(rows.abs().max())
            assert (pool[slots].float() - rows).abs().max() <= slack + 1e-5
            others = torch.ones(len(pool), dtype=torch.bool)
            others[slots] = False
            assert (pool[others] == EMPTY).all()


@dataclasses.dataclass(frozen=True)
class Asking:
    """What a request knows of a layer: queries [n, Hq, D] and keys [n, G, D] of its new tokens, and
    keys [c, G, D] of its resident ones."""

    queries: Tensor
    new_keys: Tensor
    resident_keys: Tensor
    scaling: float


@dataclasses.dataclass(frozen=True)
class LoadedLayer:
    """Keys [k, G, Dk], values [k, G, Dv], and the selected tokens [head groups, u]."""

    keys: Tensor
    values: Tensor
    selected: Tensor


def dense_weights(
    queries: Tensor, keys: Tensor, scaling: float, *, causal: bool = True, window: int | None = None
) -> np.ndarray:
    """Of attention, as the definition says: float64 [n, Hq, m], of one query and head at a time."""
    q, k = (tensor.double().cpu().numpy() for tensor in (queries, keys))
    weights = np.zeros((*q.shape[:2], len(k)))
    for i, head in np.ndindex(*q.shape[:2]):
        position = len(k) - len(q) + i
        first = 0 if window is None else max(0, position - window)
        seen = slice(first, position + 1) if causal else slice(None)
        logits = k[seen, head * k.shape[1] // q.shape[1]] @ q[i, head] * scaling
        exponentials = np.exp(logits - logits.max())
        weights[i, head, seen] = exponentials / exponentials.sum()
    return weights


def dense_sums(
    queries: Tensor, prefix: Tensor, resident: Tensor, new: Tensor, scaling: float
) -> np.ndarray:
    """Of the columns of the prefix, float64 [Hq, m]."""
    weights = dense_weights(queries, torch.cat([resident, prefix, new]), scaling).sum(0)
    return weights[:, len(resident) : len(resident) + len(prefix)]


def read_rows(
    source: PartSource, layer: int, tokens: Tensor | None, *, keys: bool = True, values: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """What a source gives for some tokens [head groups, k], None for all.

    Keys [k, heads, Dk] of the heads that the probe column does not have, values [k, G, Dv].
    """
    wanted = None if tokens is None else tokens.numpy()
    found_keys, found_values = source.read(layer, wanted, keys=keys, values=values)
    if keys and found_keys is None:
        # All heads are probe heads.
        k = source.num_tokens if tokens is None else tokens.shape[1]
        found_keys = torch.empty(k, 0, source.shape.key_dim, dtype=source.shape.dtype)
    return found_keys, found_values


def wait_for_reads(source: StoredSource) -> None:
    wait_until(lambda: not source.is_reading)


def asking(shape: KVShape, seed: int, resident: int = 2) -> Asking:
    """Of 6 new tokens by chance, after resident ones that have keys of theirs."""
    generator = torch.Generator().manual_seed(seed)
    queries, new = (
        torch.randn(6, heads, shape.key_dim, generator=generator).to(shape.dtype)
        for heads in (shape.num_query_heads, shape.num_kv_heads)
    )
    return Asking(queries, new, new[:resident], 0.2)


def request_of(
    shape: KVShape, alpha: float, source: Any, k: int, resident: int = 2
) -> StoredRequest:
    """A request that uses k tokens of a source, in scattered slots of a pool."""
    order, store = torch.randperm(k + resident + SPARE), Any
    arguments = order[:resident], order[resident : resident + k], source.num_tokens, store, source
    return StoredRequest(shape, alpha, *arguments, new_report("paper", resident))


def load_layer(request: StoredRequest, layer: int, asking: Asking) -> LoadedLayer:
    """What a request gets of a layer; nothing but its slots may change."""
    slots, resident = request.slots, request.resident_slots
    everything = torch.arange(len(resident) + request.k + SPARE)
    pools = Pools(request.shape, len(everything))
    keys, values = pools(layer)
    keys[resident] = asking.resident_keys
    selected = request.load(layer, asking.queries, asking.new_keys, asking.scaling, keys, values)
    loaded = LoadedLayer(keys[slots], values[slots], selected)
    assert torch.equal(keys[resident], asking.resident_keys)
    keys[resident] = keys[slots] = values[slots] = EMPTY
    assert pools.empty(everything)
    return loaded
