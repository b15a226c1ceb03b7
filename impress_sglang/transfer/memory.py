"""A prefix whose KVs are in host memory, computed again because it could not be read.

Stage: load. See `transfer.source.PrefixSource` for the contract.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impress_sglang.storage.layout import PROBE, KVShape
from impress_sglang.tiers.fence import to_device
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.slots import Slots

# Rows that are copied to the device at once.
TILE_TOKENS = 1024


class MemorySource:
    """Holds keys [m, G, Dk] and values [m, G, Dv] of each layer until a later layer is read.

    The first layers may be missing: their KVs are in the slots of the request already.
    """

    def __init__(
        self, shape: KVShape, keys: Sequence[Tensor | None], values: Sequence[Tensor | None]
    ) -> None:
        assert len(keys) == len(values) == shape.num_layers
        self._keys, self._values = list(keys), list(values)
        self.num_tokens = next(len(own) for own in self._keys if own is not None)
        self.stats = ReadStats()
        self._shape = shape

    @property
    def held_bytes(self) -> int:
        """Bytes of the layers that it still holds."""
        return sum(own.nbytes for own in (*self._keys, *self._values) if own is not None)

    def read_probe(self, layer: int) -> Tensor:
        """See `PrefixSource.read_probe`."""
        keys, _ = self._take(layer)
        return keys[:, list(self._shape.heads(PROBE))]

    def read(
        self,
        layer: int,
        tokens: Tensor | None,
        *,
        keys: Slots | None = None,
        values: Slots | None = None,
    ) -> None:
        """See `PrefixSource.read`."""
        own_keys, own_values = self._take(layer)
        if keys is not None:
            _put(own_keys, tokens, list(self._shape.other_kv_heads), keys)
        if values is not None:
            _put(own_values, tokens, list(range(self._shape.num_kv_heads)), values)

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor | None) -> None:
        """See `PrefixSource.note_selection`; a recomputed prefix has no averages."""

    def note_whole(self, layer: int) -> None:
        """See `PrefixSource.note_whole`."""

    def _take(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer; lets go of earlier layers."""
        for earlier in range(layer):
            self._keys[earlier] = self._values[earlier] = None
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None and values is not None, "layers are read in ascending order"
        return keys, values


def rows_of_head_groups(whole: Tensor, tokens: Tensor) -> Tensor:
    """Pick the rows of tokens [head groups, k] from those of all tokens [m, G, D]: [k, G, D]."""
    index = to_device(tokens, whole.device)
    if len(tokens) == 1:
        return whole.index_select(0, index[0])
    heads = torch.arange(whole.shape[1], device=whole.device)
    return whole[index.T, heads]


def _put(whole: Tensor, tokens: Tensor | None, heads: list[int], slots: Slots) -> None:
    """Fill slots with some heads of the tokens [head groups, k], or of all tokens, in tiles."""
    count = len(whole) if tokens is None else tokens.shape[1]
    for start in range(0, count, TILE_TOKENS):
        stop = min(start + TILE_TOKENS, count)
        part = slice(start, stop)
        rows = whole[part] if tokens is None else rows_of_head_groups(whole, tokens[:, part])
        slots.part(start, stop).put(rows[:, heads])
