"""Reads rows and loads layers into slots of a pool, and hands them out as tensors.

Slots are scattered over a pool that is full of NaN, so that what was not filled, or in the wrong
place, is seen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from impress_sglang.paper.loader import LayerInputs, LoadStats, PartLoader
from impress_sglang.paper.source import PartSource
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.sources import StoredSource
from tests.unit.waiting import wait_until

SPARE = 3


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


def layer_inputs(shape: KVShape, seed: int) -> LayerInputs:
    """Of 6 new tokens by chance, after two resident ones that have keys of theirs."""
    generator = torch.Generator().manual_seed(seed)
    queries, new = (
        torch.randn(6, heads, shape.key_dim, generator=generator).to(shape.dtype)
        for heads in (shape.num_query_heads, shape.num_kv_heads)
    )
    return LayerInputs(queries, new, new, torch.tensor([0, 1]), 0.2)


def load_layer(
    loader: PartLoader, layer: int, source: Any, inputs: LayerInputs, k: int, stats: LoadStats
) -> LoadedLayer:
    """What a loader gives for k tokens, in scattered slots; nothing but these may change."""
    shape, order = loader._shape, torch.randperm(k + SPARE)
    pools = [
        torch.full((k + SPARE, shape.num_kv_heads, dim), float("nan"), dtype=shape.dtype)
        for dim in (shape.key_dim, shape.value_dim)
    ]
    selected = loader.load(layer, source, inputs, *pools, order[:k], stats)
    assert all(bool(pool[order[k:]].isnan().all()) for pool in pools)
    return LoadedLayer(*(pool[order[:k]] for pool in pools), selected)
