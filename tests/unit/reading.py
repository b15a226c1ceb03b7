"""Reads rows and loads layers into slots of a pool, and hands them out as tensors.

Slots are scattered over a pool that is full of NaN, so that what was not filled, or in the wrong
place, is seen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from impress_sglang.paper.request import StoredRequest
from impress_sglang.paper.source import PartSource
from impress_sglang.serving.report import new_report
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.sources import StoredSource
from tests.unit.waiting import wait_until

SPARE = 3


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


def read_rows(
    source: PartSource,
    layer: int,
    tokens: Tensor | None,
    *,
    keys: bool = True,
    values: bool = True,
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


def asking(shape: KVShape, seed: int) -> Asking:
    """Of 6 new tokens by chance, after two resident ones that have keys of theirs."""
    generator = torch.Generator().manual_seed(seed)
    queries, new = (
        torch.randn(6, heads, shape.key_dim, generator=generator).to(shape.dtype)
        for heads in (shape.num_query_heads, shape.num_kv_heads)
    )
    return Asking(queries, new, new[:2], 0.2)


def request_of(
    shape: KVShape, alpha: float, source: Any, k: int, resident: int = 2
) -> StoredRequest:
    """A request that uses k tokens of a source, in scattered slots of a pool."""
    order, store = torch.randperm(k + resident + SPARE), Any
    arguments = order[:resident], order[resident : resident + k], source.num_tokens, store, source
    return StoredRequest(shape, alpha, *arguments, new_report("paper", resident))


def load_layer(request: StoredRequest, layer: int, asking: Asking) -> LoadedLayer:
    """What a request gets of a layer; nothing but its slots may change."""
    shape = request.shape
    size = len(request.resident_slots) + request.k + SPARE
    keys, values = (
        torch.full((size, shape.num_kv_heads, dim), float("nan"), dtype=shape.dtype)
        for dim in (shape.key_dim, shape.value_dim)
    )
    keys[request.resident_slots] = asking.resident_keys
    before = keys.clone(), values.clone()
    selected = request.load(layer, asking.queries, asking.new_keys, asking.scaling, keys, values)
    loaded = LoadedLayer(keys[request.slots], values[request.slots], selected)
    for pool, was in zip((keys, values), before, strict=True):
        pool[request.slots] = was[request.slots]
        assert torch.equal(pool.nan_to_num(7.0), was.nan_to_num(7.0))
    return loaded
