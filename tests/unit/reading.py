"""Reads rows and loads layers into slots of a pool, and hands them out as tensors.

Slots are scattered over a pool that is full of NaN, so that what was not filled, or in the wrong
place, is seen.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.slots import LayerSlots, Slots
from impress_sglang.transfer.stored_source import StoredSource
from tests.unit.waiting import wait_until

SPARE = 3


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """Keys [k, heads, Dk] of the heads that the probe column does not have, values [k, G, Dv]."""

    keys: Tensor | None
    values: Tensor | None


@dataclasses.dataclass(frozen=True)
class LoadedLayer:
    """Keys [k, G, Dk], values [k, G, Dv], and the selected tokens [head groups, u]."""

    keys: Tensor
    values: Tensor
    selected: Tensor


class ScatteredSlots:
    """Slots in a pool that has more of them; nothing but these may change."""

    def __init__(self, k: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        pool = torch.empty(k + SPARE, heads + 1, dim, dtype=dtype)
        self._pool = pool.view(torch.uint8).fill_(0xFF).view(dtype).view(pool.shape)
        self._rows = torch.randperm(k + SPARE)
        self.slots = Slots(self._pool, tuple(range(1, heads + 1)), self._rows[:k])

    @property
    def whole(self) -> Slots:
        """For those who want a pool of as many heads."""
        return Slots.of(self._pool[:, 1:], self.slots.rows)

    def rows(self) -> Tensor:
        """What is in them, [k, heads, D]."""
        k = len(self.slots)
        untouched = self._pool[self._rows[k:]], self._pool[:, 0]
        assert all(bool((own.contiguous().view(torch.uint8) == 0xFF).all()) for own in untouched)
        return self._pool[self.slots.rows][:, 1:]


def read_rows(
    source: Any, layer: int, tokens: Tensor | None, *, keys: bool = True, values: bool = True
) -> LayerRows:
    """What a source gives for some tokens [head groups, k], None for all."""
    shape: KVShape = source._shape
    k = source.num_tokens if tokens is None else tokens.shape[1]
    heads = len(shape.other_kv_heads)
    own_keys = ScatteredSlots(k, heads, shape.key_dim, shape.dtype)
    own_values = ScatteredSlots(k, shape.num_kv_heads, shape.value_dim, shape.dtype)
    source.read(
        layer,
        tokens,
        keys=own_keys.slots if keys else None,
        values=own_values.slots if values else None,
    )
    found_keys, found_values = own_keys.rows(), own_values.rows()
    return LayerRows(found_keys if keys else None, found_values if values else None)


def wait_for_reads(source: StoredSource) -> None:
    wait_until(lambda: not source.is_reading)


def layer_inputs(shape: KVShape, seed: int) -> LayerInputs:
    """Of 6 new tokens by chance, after two resident ones that have keys of theirs."""
    generator = torch.Generator().manual_seed(seed)
    queries, new = (
        torch.randn(6, heads, shape.key_dim, generator=generator).to(shape.dtype)
        for heads in (shape.num_query_heads, shape.num_kv_heads)
    )
    return LayerInputs(queries, new, new[:2], 0.2)


def load_layer(
    loader: PrefixLoader, layer: int, source: Any, inputs: LayerInputs, k: int, stats: LoadStats
) -> LoadedLayer:
    """What a loader gives for k tokens."""
    shape: KVShape = loader._shape
    keys = ScatteredSlots(k, shape.num_kv_heads, shape.key_dim, shape.dtype)
    values = ScatteredSlots(k, shape.num_kv_heads, shape.value_dim, shape.dtype)
    slots = LayerSlots(keys.whole, values.whole)
    selected = loader.load(layer, source, inputs, slots, stats)
    return LoadedLayer(keys.rows(), values.rows(), selected)
