"""Reads parts of a stored prefix: the probe column, and the rows of chosen tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops.types import Indices
from impress_sglang.paper.history import TokenHistory
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, Column
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Access
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.columns import ColumnSource, ColumnSpan, PartOfRead, WantedRows


class PartSource(ColumnSource):
    """Reads the tokens of a stored prefix that layers ask for; also of reordered segments."""

    def __init__(
        self,
        spans: Sequence[ColumnSpan],
        histories: Sequence[TokenHistory],
        reader: BlockReader,
        pool: BufferPool,
        cache: ChunkCache,
        *,
        whole: bool,
    ) -> None:
        """`histories`: of the segments of the spans; `whole`: all tokens will be wanted."""
        shape = spans[0].segment.layout.shape
        keys, values = tuple(shape.key_columns), tuple(shape.value_columns)
        probe: tuple[Column, ...] = (PROBE,) if shape.probe_kv_heads else ()
        # What is certain to be read: besides these, which tokens are wanted is not known.
        certain = [probe] if probe else [keys]
        if whole:
            certain = [probe, (*keys, *values)] if probe else [(*keys, *values)]
        super().__init__(spans, reader, pool, cache, certain)
        self._histories = tuple(histories)

    def read_probe(self, layer: int) -> Tensor:
        """Read the keys of the probe heads, [num_tokens, probe heads, Dk], of all tokens.

        They are on the source's device, and valid until a source reads another layer.

        Raises:
            PrefixUnreadable: a chunk is missing, short or corrupt, or cannot be read now.
        """
        wanted = {number: span.whole((PROBE,)) for number, (_, span) in enumerate(self.spans)}
        blocks = self._take(layer, wanted, chosen=False)
        found = [
            own.rows_in(part, PROBE) for own, part in zip(wanted.values(), blocks, strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def read(
        self, layer: int, tokens: Indices | None, *, keys: bool = True, values: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Read the rows of tokens.

        Args:
            layer: from 0.
            tokens: int64 [head groups, k], ascending in each head group; None for all.
            keys: whether to read the keys of the heads that the probe column does not have.
            values: whether to read values.

        Returns:
            Keys [k, heads, Dk] and values [k, G, Dv]; None if there are no such heads, or they are
            not read.

        Raises:
            PrefixUnreadable: as for `read_probe`.
        """
        shape = self._shape
        # Keys that are read alone choose the tokens.
        chosen = values
        if tokens is None:
            tokens = np.tile(np.arange(self.num_tokens), (shape.num_head_groups, 1))
        keys = keys and bool(shape.other_kv_heads)
        kinds = [shape.key_columns] * keys + [shape.value_columns] * values
        wanted: dict[int, WantedRows] = {}
        places: dict[int, list[Indices]] = {}
        for number, (first, span) in enumerate(self.spans):
            inside = (tokens >= first) & (tokens < first + len(span))
            if not inside.any() or not kinds:
                continue
            rows: dict[Column, Indices] = {}
            places[number] = [np.flatnonzero(own) for own in inside]
            for group, place in enumerate(places[number]):
                own = tokens[group, place] + (span.start - first)
                if span.segment.mapping is not None:
                    own = span.segment.mapping[layer, group][own].astype(np.int64)
                rows.update({columns[group]: own for columns in kinds})
            wanted[number] = WantedRows(span.segment.layout, rows)
        found: list[Tensor | None] = []
        if wanted:
            blocks = self._take(layer, wanted, chosen=chosen)
            for columns in kinds:
                found.append(self._joined(columns, wanted, places, blocks, tokens.shape[1]))
        return found.pop(0) if keys else None, found.pop(0) if values else None

    def note_selection(self, layer: int, selected: Indices, importance: Tensor | None) -> None:
        """Note which tokens [head groups, k] the layer uses; updates the averages.

        `importance` [H, m] are scores of all query heads, or of those of the probe heads; None if
        the tokens were not chosen by scores.
        """
        for (first, span), history in zip(self.spans, self._histories, strict=True):
            part = None if importance is None else importance[:, first : first + len(span)]
            history.note(layer, span.start, len(span), selected, first, part)

    def _joined(
        self,
        columns: range,
        wanted: dict[int, WantedRows],
        places: dict[int, list[Indices]],
        blocks: Sequence[Tensor],
        k: int,
    ) -> Tensor:
        """The rows of k tokens in columns of keys or of values, [k, heads, D], from all spans."""
        shape, device = self._shape, self._cache.device
        if len(wanted) == len(columns) == 1:
            (own,) = wanted.values()
            return own.rows_in(blocks[0], columns[0])
        heads = [len(shape.heads(column)) for column in columns]
        found = torch.empty(
            k, sum(heads), shape.head_dim(columns[0]), dtype=shape.dtype, device=device
        )
        for (number, own), part in zip(wanted.items(), blocks, strict=True):
            begin = 0
            for column, count, place in zip(columns, heads, places[number], strict=True):
                rows = torch.from_numpy(place).to(device, non_blocking=True)
                found[:, begin : begin + count].index_copy_(0, rows, own.rows_in(part, column))
                begin += count
        return found

    def _count(self, parts: Sequence[PartOfRead], access: Access, *, chosen: bool) -> None:
        super()._count(parts, access, chosen=chosen)
        for part in parts:
            if part.wanted.chunks[-1] >= part.layout.num_chunks:
                self._histories[part.number].ssd_bytes += len(part.from_ssd) * BLOCK_BYTES
