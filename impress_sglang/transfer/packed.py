"""What else pools keep of the same tokens, as further layers of a segment: of a draft model, index
keys, or rows of sliding windows. Or the states at the end of a prefix, as KVs of tokens behind it.

The bytes of a token in all of them stand in one row, which is cut into layers of the segment's
shape; the last one ends with zeros. So storage needs to know no second shape. They are exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.filling import FillStats, SlotFiller, Writing
from impress_sglang.transfer.sources import WholeSource


@dataclasses.dataclass(frozen=True)
class PackedLayers:
    """The layers of a segment from `first` on.

    Attributes:
        shape: of the segment, without these layers.
        first: number of the first of them.
        parts: gives uint8 [slots, bytes] for each stream of the other pools, in their order.
        window: of how many of the last tokens they are needed; 0: of all.
        tokens: how many tokens of the segment a row stands in.
    """

    shape: KVShape
    first: int
    parts: Callable[[], Sequence[Tensor]]
    window: int = 0
    tokens: int = 1

    def __len__(self) -> int:
        return -(-sum(part.shape[1] for part in self.parts()) // self.shape.token_bytes)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [t, G, Dk] and values [t, G, Dv] that stand for a layer of slots, int64 [n]."""
        shape = self.shape
        row = torch.zeros(len(slots), self._size, dtype=torch.uint8, device=slots.device)
        for part, start, stop, at in self._pieces(layer):
            row[:, at : at + stop - start] = part[:, start:stop][slots]
        row = row.view(-1, shape.token_bytes)
        key_bytes = shape.num_kv_heads * shape.key_dim * shape.dtype.itemsize
        both = (row[:, :key_bytes].contiguous(), row[:, key_bytes:].contiguous())
        keys, values = (
            own.view(shape.dtype).unflatten(1, (shape.num_kv_heads, -1)) for own in both
        )
        return keys, values

    def fill(
        self,
        filler: SlotFiller,
        layer: int,
        source: WholeSource,
        slots: Tensor,
        stats: FillStats,
        writing: Writing,
    ) -> None:
        """Fill slots of the other pools with a layer of a source; see `SlotFiller.fill`."""
        shape, count = self.shape, len(slots) * self.tokens
        keys, values = (
            torch.empty(count, shape.num_kv_heads, dim, dtype=shape.dtype, device=slots.device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        rows = torch.arange(count, device=slots.device)
        filler.fill(layer, source, keys, values, rows, stats, writing)
        row = torch.cat([own.flatten(1).view(torch.uint8) for own in (keys, values)], 1)
        row = row.view(len(slots), self._size)
        with writing():
            for part, start, stop, at in self._pieces(layer):
                part[slots, start:stop] = row[:, at : at + stop - start]

    @property
    def _size(self) -> int:
        """Bytes of a row that stand in a layer."""
        return self.tokens * self.shape.token_bytes

    def _pieces(self, layer: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """The bytes [start, stop) of a part that stand in a layer, and where they begin there."""
        size, begin = self._size, 0
        first = (layer - self.first) * size
        for part in self.parts():
            start = max(first - begin, 0)
            stop = min(first + size - begin, part.shape[1])
            if start < stop:
                yield part, start, stop, begin + start - first
            begin += part.shape[1]
