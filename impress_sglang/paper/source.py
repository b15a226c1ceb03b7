"""Reads parts of a stored prefix: the probe column, and the rows of chosen tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops.types import Flags, Indices
from impress_sglang.paper.history import TokenHistory
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, Column, SegmentLayout
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Access, Tier
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.sources import OpenSpan, StoredSource
from impress_sglang.transfer.wanted import WantedChunks


class WantedRows(WantedChunks):
    """Rows of some columns of a layer."""

    def __init__(self, layout: SegmentLayout, rows: Mapping[Column, Indices]) -> None:
        """`rows`: rows of each column, int64 [n], in any order."""
        self._layout = layout
        self._offsets: dict[Column, Indices] = {}
        blocks: Flags = np.zeros(layout.columns.num_bytes // BLOCK_BYTES, np.bool_)
        counts = np.zeros((len(layout.columns), layout.num_chunks), np.int64)
        for column, column_rows in rows.items():
            pages, size = layout.columns[column], layout.columns[column].group_bytes
            number, inside = np.divmod(column_rows, layout.chunk_tokens)
            offsets = layout.columns.starts[column] + number * pages.page_bytes + inside * size
            self._offsets[column] = offsets
            for step in {*range(0, size, BLOCK_BYTES), size - 1}:
                blocks[(offsets + step) // BLOCK_BYTES] = True
            counts[column] = np.bincount(number, minlength=layout.num_chunks)
        numbers = np.flatnonzero(counts)
        super().__init__(layout.columns.chunks, numbers, counts.reshape(-1)[numbers], blocks)
        self.taken = blocks[self.all_blocks]

    def rows_in(self, blocks: Tensor, column: Column) -> Tensor:
        """Return the rows of a column [n, heads, D], from `self.blocks`: uint8 [blocks,
        BLOCK_BYTES]."""
        shape, offsets = self._layout.shape, self._offsets[column]
        # Rows begin at multiples of a unit, even if a row does not divide a block.
        size = self._layout.columns[column].group_bytes
        unit = math.gcd(size, BLOCK_BYTES)
        count, rank = size // unit, np.cumsum(self.blocks) - 1
        first = (rank[offsets // BLOCK_BYTES] * BLOCK_BYTES + offsets % BLOCK_BYTES) // unit
        units = blocks.view(-1, unit)
        if len(first) and (np.diff(first) == count).all():
            rows = units[int(first[0]) : int(first[-1]) + count]
        else:
            places = torch.from_numpy((first[:, None] + np.arange(count)).reshape(-1))
            rows = units.index_select(0, places.to(units.device, non_blocking=True))
        return rows.view(shape.dtype).view(
            len(first), len(shape.heads[column]), shape.head_dim(column)
        )


class PartSource(StoredSource):
    """Reads selected tokens of a stored prefix, layer by layer; also of reordered segments."""

    def __init__(
        self,
        spans: Sequence[OpenSpan],
        histories: Sequence[TokenHistory],
        pool: BufferPool,
        cache: ChunkCache,
        *,
        whole: bool,
    ) -> None:
        """`histories`: those of the spans' segments; `whole`: all tokens will be read."""
        super().__init__(spans, pool, cache, codes=False)
        shape = self.shape
        keys, values = tuple(shape.key_columns), tuple(shape.value_columns)
        probe: tuple[Column, ...] = (PROBE,) if shape.probe_kv_heads else ()
        # Columns that are certain to be read whole; other reads depend on the selection.
        certain = [probe] if probe else [keys]
        if whole:
            certain = [probe, (*keys, *values)] if probe else [(*keys, *values)]
        self._ahead = [
            [WantedRows(span.layout, dict.fromkeys(part, np.array(t))) for span, t, _ in self.spans]
            for part in certain
        ]
        self._histories = tuple(histories)
        self._firsts = list(itertools.accumulate(self.lengths, initial=0))
        """Index of the first token of each span."""

    def _certain(self, layer: int) -> Sequence[Sequence[WantedChunks]]:
        return self._ahead

    def read_probe(self, layer: int) -> Tensor:
        """Read the keys of the probe heads, [num_tokens, probe heads, Dk], of all tokens.

        They are on the source's device, and valid until a source reads another layer. Raises
        `PrefixUnreadable` if a chunk is missing, short or corrupt, or cannot be read now.
        """
        wanted = self._ahead[0]
        self._chosen, self._probing = False, True
        blocks = self._take(layer, dict(enumerate(wanted)), last=False)
        parts = [rows.rows_in(part, PROBE) for rows, part in zip(wanted, blocks, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read(
        self, layer: int, tokens: Indices | None, *, keys: bool = True, values: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Read rows of tokens int64 [head groups, k], ascending in each head group; None for all.

        Returns keys [k, heads, Dk] of the heads that the probe column does not have, and values [k,
        G, Dv]; None if there are no such heads, or they are not requested. Raises as `read_probe`.
        """
        shape = self.shape
        # Keys that are read without values serve to choose the tokens.
        self._chosen, self._probing = values, False
        if tokens is None:
            tokens = np.tile(np.arange(self.num_tokens), (len(shape.head_groups), 1))
        keys = keys and bool(shape.other_kv_heads)
        kinds = [shape.key_columns] * keys + [shape.value_columns] * values
        wanted: dict[int, WantedRows] = {}
        places: dict[int, list[Indices]] = {}
        for number, (segment, span, _) in enumerate(self.spans):
            first = self._firsts[number]
            inside = (tokens >= first) & (tokens < first + len(span))
            if not inside.any() or not kinds:
                continue
            rows: dict[Column, Indices] = {}
            places[number] = [np.flatnonzero(selected) for selected in inside]
            for group, place in enumerate(places[number]):
                places_in_span = tokens[group, place] + (span.start - first)
                if segment.mapping is not None:
                    places_in_span = segment.mapping[layer, group][places_in_span].astype(np.int64)
                rows.update({columns[group]: places_in_span for columns in kinds})
            wanted[number] = WantedRows(segment.layout, rows)
        blocks, k = self._take(layer, wanted) if wanted else [], tokens.shape[1]
        columns_read = [self._joined(columns, wanted, places, blocks, k) for columns in kinds]
        return columns_read.pop(0) if keys else None, columns_read.pop(0) if values else None

    def record_selection(self, layer: int, selected: Indices, importance: Tensor | None) -> None:
        """Record the tokens [head groups, k] that the layer uses; updates the averages.

        `importance` [H, m] are scores of all query heads, or of the probe heads; None if the tokens
        were not chosen by scores.
        """
        for (_, span, _), first, history in zip(
            self.spans, self._firsts[:-1], self._histories, strict=True
        ):
            part = None if importance is None else importance[:, first : first + len(span)]
            history.observe(layer, span.start, len(span), selected, first, part)

    def _joined(
        self,
        columns: range,
        wanted: dict[int, WantedRows],
        places: dict[int, list[Indices]],
        blocks: Sequence[Tensor],
        k: int,
    ) -> Tensor:
        """Return rows of k tokens in columns of keys or of values, [k, heads, D], from all
        spans."""
        shape, device = self.shape, self._cache.device
        if len(wanted) == len(columns) == 1:
            (span_rows,) = wanted.values()
            return span_rows.rows_in(blocks[0], columns[0])
        # All columns have the same number of heads.
        heads = len(shape.heads[columns[0]])
        size = k, heads * len(columns), shape.head_dim(columns[0])
        joined = torch.empty(*size, dtype=shape.dtype, device=device)
        for (number, span_rows), part in zip(wanted.items(), blocks, strict=True):
            targets = joined.split(heads, 1)
            for column, place, target in zip(columns, places[number], targets, strict=True):
                rows = torch.from_numpy(place).to(device, non_blocking=True)
                target.index_copy_(0, rows, span_rows.rows_in(part, column))
        return joined

    def _count(
        self, wanted: Mapping[int, WantedChunks], missing: Sequence[int], access: Access
    ) -> tuple[int, int, int]:
        counts = super()._count(wanted, missing, access)
        if self._chosen:
            self.stats.important_bytes += sum(counts)
            self.stats.important_device_bytes += counts[Tier.DEVICE]
        if not self._probing:
            self.stats.selected_chunks += len(access.tiers)
            for number, count in zip(wanted, missing, strict=True):
                self._histories[number].ssd_bytes += count * BLOCK_BYTES
        return counts
