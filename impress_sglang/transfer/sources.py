"""Whole layers of a stored prefix, exact or in codes.

Stage: load. All of what they read is known before the request runs, and read ahead, in sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from impress_sglang.storage.layer_bytes import sinks_of
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.stored_source import OpenSpan, StoredSource
from impress_sglang.transfer.wanted import Wanted, wanted_tokens


class WholeSource(StoredSource):
    """Reads whole layers of segments: their codes, or their columns.

    The rows of columns must be in the order of the tokens, and their shape have no probe heads:
    each KV head is a head group.
    """

    def __init__(
        self,
        spans: Sequence[OpenSpan],
        reader: BlockReader,
        pool: BufferPool,
        cache: ChunkCache,
        *,
        codes: bool,
    ) -> None:
        """See `StoredSource`."""
        assert codes or all(segment.mapping is None for segment, _, _ in spans)
        super().__init__(spans, reader, pool, cache, codes=codes)
        self.state: Any = None
        """What restores codes keeps from layer to layer."""
        # Exact keys [L, n, G, Dk] and values of the first tokens, which are never in codes.
        sinks = [own.sinks[:, tokens.start : tokens.stop] for own, tokens, _ in spans if codes]
        self._sinks = [[part.to(cache.device) for part in sinks_of(self._shape, s)] for s in sinks]

    def _wanted(self, layer: int) -> list[Wanted]:
        return [
            wanted_tokens(own.layout.parts(layer, codes=self.codes), tokens.start, tokens.stop)
            for own, tokens, _ in self.spans
        ]

    def _certain(self, layer: int) -> Sequence[Sequence[Wanted]]:
        return [self._wanted(layer)]

    def read(self, layer: int) -> list[list[Tensor]]:
        """Read a layer: of each span, for each part of it that is not empty, the groups that have
        its tokens, uint8 [groups, group_bytes], on the cache's device.

        They are valid until any source is read from again.

        Raises:
            PrefixUnreadable: a block is missing, short or corrupt, or cannot be read now.
        """
        wanted = self._wanted(layer)
        taken = [own.reshape(-1) for own in self._take(layer, dict(enumerate(wanted)))]
        return [
            [pages.groups_in(memory[own])[groups] for pages, own, groups in of_span.places]
            for of_span, memory in zip(wanted, taken, strict=True)
        ]

    def put_sinks(self, layer: int, slots: Tensor, pools: Sequence[Tensor]) -> None:
        """Put the exact rows of first tokens where what was restored of them is."""
        for sinks, own in zip(self._sinks, slots.split(self.lengths), strict=True):
            for pool, exact in zip(pools, sinks, strict=True):
                if exact.shape[1]:
                    pool[own[: exact.shape[1]]] = exact[layer].to(pool.dtype)
