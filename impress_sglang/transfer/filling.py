"""Fills rows of pools with whole layers of a stored prefix, exact or from codes, and maps layers
of a segment to pools.

Stage: load. Attention treats these rows like computed ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from impress_sglang.codes.coding import Rows
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.codecs import Codec
from impress_sglang.transfer.sources import Piece, WholeSource


def fill(
    layer: int, source: WholeSource, pieces: Sequence[Piece], rows: Rows, codec: Codec | None
) -> None:
    """Put the `pieces` of a layer that `source.read` returned into the rows of all tokens.

    Layers ascend for each source. `codec`: None if there are no codes.
    """
    shape = source.shape
    slots: Sequence[Tensor] = rows.slots.split(source.lengths)
    if source.codes and layer < shape.first_raw:
        assert codec is not None, "there are codes, and no codec"
        source.state = codec.restore(layer, pieces, rows, source.state)
        for number, sinks in source.sinks.items():
            for pool, exact in zip(rows[:2], sinks, strict=True):
                pool[slots[number][: exact.shape[1]]] = exact[layer]
        return
    for piece, target in zip(pieces, slots, strict=True):
        if layer >= shape.first_raw:
            pools: Sequence[Tensor] = rows[:2]
            streams: Sequence[Tensor] = shape.kvs_of(piece.parts[0])
        else:
            # A column of each head.
            pools = [head for pool in rows[:2] for head in pool.unbind(1)]
            streams = [part.view(shape.dtype) for part in piece.parts]
        for pool, stream in zip(pools, streams, strict=True):
            pool.index_copy_(0, target, stream)


@dataclasses.dataclass(frozen=True)
class PackedLayers:
    """The layers of a segment from `first` on: data of other pools for the same tokens (of a draft
    model, index keys, or rows of sliding windows), or states, as KVs of tokens after a prefix.

    The bytes of a token in all these pools form one row, which is cut into layers of the segment's
    shape; the last layer is padded with zeros. So storage needs no second shape.

    Attributes:
        shape: shape of the segment, without these layers.
        first: number of the first of these layers.
        parts: returns uint8 [slots, bytes], or [pages, slots of a page, bytes], for each stream of
            the other pools, in order.
        window: number of last tokens that need them; 0 for all tokens.
        tokens: number of tokens of the segment that a row occupies.
    """

    shape: KVShape
    first: int
    parts: Callable[[], Sequence[Tensor]]
    window: int = 0
    tokens: int = 1

    def __len__(self) -> int:
        return -(-sum(part.shape[-1] for part in self.parts()) // self.shape.token_bytes)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Pack a layer of slots, int64 [n], into keys [t, G, Dk] and values [t, G, Dv]."""
        row = torch.zeros(len(slots), self._size, dtype=torch.uint8, device=slots.device)
        for part, start, stop, at in self._pieces(layer):
            row[:, at : at + stop - start] = part[..., start:stop][places_in(part, slots)]
        return self.shape.kvs_of(row.view(-1, self.shape.token_bytes))

    @contextlib.contextmanager
    def into(self, layer: int, slots: Tensor) -> Iterator[Rows]:
        """Yield rows for a layer of slots; their content is copied into the pools at the end."""
        shape, count = self.shape, len(slots) * self.tokens
        keys, values = (
            torch.empty(count, shape.num_kv_heads, dim, dtype=shape.dtype, device=slots.device)
            for dim in (shape.key_dim, shape.value_dim)
        )
        yield Rows(keys, values, torch.arange(count, device=slots.device))
        row = shape.rows_of(keys, values).view(len(slots), self._size)
        for part, start, stop, at in self._pieces(layer):
            part[..., start:stop][places_in(part, slots)] = row[:, at : at + stop - start]

    @property
    def _size(self) -> int:
        """Bytes of a row in one layer."""
        return self.tokens * self.shape.token_bytes

    def _pieces(self, layer: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """Yield the bytes [start, stop) of each part in a layer, and their offset there."""
        size, begin = self._size, 0
        first = (layer - self.first) * size
        for part in self.parts():
            start = max(first - begin, 0)
            stop = min(first + size - begin, part.shape[-1])
            if start < stop:
                yield part, start, stop, begin + start - first
            begin += part.shape[-1]


def places_in(part: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """Return the index of the rows of slots, int64 [n], in one of `PackedLayers.parts`."""
    return (slots,) if part.ndim == 2 else (slots // part.shape[1], slots % part.shape[1])


class StoredLayers:
    """Maps layers of segments to pools."""

    def __init__(self, streams: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        """`streams` returns the pools of keys and values of a layer."""
        self._main_layers = streams
        self.packed: PackedLayers | None = None
        """Layers from other pools of the same tokens."""
        self.states: PackedLayers | None = None
        """States of layers without KVs at the end of a prefix."""

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        """The pools of a layer."""
        return self._main_layers(layer)

    def into(self, layer: int, slots: Tensor) -> AbstractContextManager[Rows]:
        """Rows for a layer of slots, int64 [n]; stored in the pools at the end of the block."""
        if self.packed is not None and layer >= self.packed.first:
            return self.packed.into(layer, slots)
        return contextlib.nullcontext(Rows(*self(layer), slots))
