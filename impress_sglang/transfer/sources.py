"""Whole layers of a stored prefix, exact or in codes, into slots of a pool.

Stage: load. All of what they read is known before the request runs, and read ahead, in sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np
from torch import Tensor

from impress_sglang.codes.groups.codec import GROUP_TOKENS
from impress_sglang.storage.layer_codec import sinks_of
from impress_sglang.storage.layout import PROBE, KVShape
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.stored_source import OpenSpan, StoredSource
from impress_sglang.transfer.wanted import Wanted, WantedRows, wanted_groups

Writing: TypeAlias = Callable[[], AbstractContextManager[None]]
"""What it makes is entered while slots are written; it may raise."""


class Restorer(Protocol):
    """Puts what is in codes into slots of a pool; one for each kind of codes and of device."""

    def restore(
        self,
        layer: int,
        source: CodedSource,
        groups: Sequence[Tensor],
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> None:
        """Put a layer of a source into slots; layers are restored in ascending order.

        Args:
            layer: from 0.
            source: was read; its `state` is the restorer's, None before the first layer.
            groups: of each span, what `source.read` has returned.
            keys: pool [slots, G, Dk].
            values: pool [slots, G, Dv].
            slots: int64 [source.num_tokens] on the device of the pools, distinct.
        """
        ...


class ExactSource(StoredSource):
    """Reads whole layers of segments whose rows are in the order of the tokens.

    Their shape has no probe heads: each KV head is a head group.
    """

    def __init__(
        self, spans: Sequence[OpenSpan], reader: BlockReader, pool: BufferPool, cache: ChunkCache
    ) -> None:
        """See `StoredSource`."""
        assert all(segment.mapping is None for segment, _, _ in spans)
        super().__init__(spans, reader, pool, cache, codes=False)

    @functools.cached_property
    def _whole(self) -> list[WantedRows]:
        columns = self._shape.columns[PROBE + 1 :]
        return [
            WantedRows(segment.layout, dict.fromkeys(columns, np.array(tokens)))
            for segment, tokens, _ in self.spans
        ]

    def _certain(self, layer: int) -> Sequence[Sequence[Wanted]]:
        return [self._whole]

    def fill(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        writing: Writing,
    ) -> None:
        """Copy a layer of all tokens into slots; see `filling.SlotFiller.fill`."""
        blocks = self._take(layer, dict(enumerate(self._whole)))
        pools = (keys, self._shape.key_columns), (values, self._shape.value_columns)
        parts: Sequence[Tensor] = slots.split(self.lengths)
        with writing():
            for own, found, places in zip(self._whole, blocks, parts, strict=True):
                for pool, columns in pools:
                    for head, column in enumerate(columns):
                        pool[:, head].index_copy_(0, places, own.rows_in(found, column)[:, 0])


class CodedSource(StoredSource):
    """Reads whole layers of segments from their codes."""

    def __init__(
        self, spans: Sequence[OpenSpan], reader: BlockReader, pool: BufferPool, cache: ChunkCache
    ) -> None:
        """See `StoredSource`."""
        super().__init__(spans, reader, pool, cache, codes=True)
        self.state: Any = None
        """What a `Restorer` keeps from layer to layer."""
        # Exact keys [L, n, G, Dk] and values of the first tokens, which are never in codes.
        sinks = [segment.sinks[:, tokens.start : tokens.stop] for segment, tokens, _ in spans]
        self._sinks = [[part.to(cache.device) for part in sinks_of(self._shape, s)] for s in sinks]

    def _wanted(self, layer: int) -> list[Wanted]:
        return [
            wanted_groups(segment.layout.codes[layer], tokens.start, tokens.stop)
            for segment, tokens, _ in self.spans
        ]

    def _certain(self, layer: int) -> Sequence[Sequence[Wanted]]:
        return [self._wanted(layer)]

    def read(self, layer: int) -> list[Tensor]:
        """Read a layer: the groups of each span, uint8 [groups, group_bytes], on the cache's
        device; valid until any source is read from again.

        Raises:
            PrefixUnreadable: a block is missing, short or corrupt, or cannot be read now.
        """
        wanted, found = self._wanted(layer), []
        blocks = self._take(layer, dict(enumerate(wanted)))
        for (segment, tokens, _), own, part in zip(self.spans, wanted, blocks, strict=True):
            pages = segment.layout.codes[layer]
            first = tokens.start // pages.group_tokens - int(own.chunks[0]) * pages.page_groups
            count = -(-tokens.stop // pages.group_tokens) - tokens.start // pages.group_tokens
            found.append(pages.groups_in(part.reshape(-1))[first : first + count])
        return found

    def fill(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        writing: Writing,
        restorer: Restorer,
    ) -> None:
        """Restore a layer of all tokens into slots; see `filling.SlotFiller.fill`."""
        groups = self.read(layer)
        parts: Sequence[Tensor] = slots.split(self.lengths)
        with writing():
            restorer.restore(layer, self, groups, keys, values, slots)
            for sinks, own in zip(self._sinks, parts, strict=True):
                for pool, exact in zip((keys, values), sinks, strict=True):
                    put_sinks(exact[layer], own, pool)


def put_sinks(exact: Tensor, slots: Tensor, pool: Tensor) -> None:
    """Put the exact rows of the first tokens where what was restored of them is."""
    if len(exact):
        pool[slots[: len(exact)]] = exact.to(pool.dtype)


class GroupRestorer:
    """Restores codes without a basis: with compiled loops on a CPU, with a kernel on a GPU."""

    def __init__(self, shape: KVShape, *, kernels: bool) -> None:
        """`kernels`: restore on a GPU."""
        # Imported only where it is used: Numba is not needed on a GPU, Triton not on a CPU.
        self._restore: Callable[..., None]
        if kernels:
            from impress_sglang.triton import codes

            self._restore = codes.restore
        else:
            from impress_sglang.codes.groups import slots

            self._restore = slots.restore
        self._layout = shape.group_layout

    def restore(
        self,
        layer: int,
        source: CodedSource,
        groups: Sequence[Tensor],
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> None:
        """See `Restorer.restore`."""
        parts: Sequence[Tensor] = slots.split(source.lengths)
        for (_, tokens, _), own, places in zip(source.spans, groups, parts, strict=True):
            self._restore(self._layout, own, tokens.start % GROUP_TOKENS, places, keys, values)
