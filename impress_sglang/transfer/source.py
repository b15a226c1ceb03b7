"""Where the KVs of a request's stored prefix come from.

Stage: load. A source gives rows (tokens) of a layer. `SegmentSource` takes them from the device
cache, the host cache and SSD.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops.types import Flags
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape, SegmentLayout
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.reader import BlockReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.moves import LoadedChunks
from impress_sglang.transfer.buffers import BufferPool, LayerBuffer, PooledMemory, Tenant
from impress_sglang.transfer.expectation import likely_blocks
from impress_sglang.transfer.gather import make_gatherer
from impress_sglang.transfer.geometry import SourceSpan
from impress_sglang.transfer.read_planner import PlannedRead, PrefixPlanner, ReadStats, SpanRead
from impress_sglang.transfer.slots import Slots
from impress_sglang.transfer.stored_source import StoredSource

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class ReadNeeds:
    """What a request will read of each layer, as far as that is known in advance.

    `whole`: all keys and values. `probe`: the probe column. `all_keys`: all keys, and some values.
    """

    whole: bool = False
    probe: bool = True
    all_keys: bool = False


class PrefixSource(Protocol):
    """The KVs of the tokens [0, num_tokens) of a stored prefix.

    Layers are read in ascending order. Implementations must give exactly the requested rows, in the
    order of the tokens.
    """

    @property
    def num_tokens(self) -> int:
        """Length of the prefix."""
        ...

    @property
    def stats(self) -> ReadStats:
        """Counters of what was read so far."""
        ...

    def read_probe(self, layer: int) -> Tensor:
        """Read the keys by which important tokens are found; needs a shape with probe heads.

        Returns:
            [num_tokens, probe heads, Dk] in the KV's dtype, on the source's device, and valid until
            the source is asked for another layer.

        Raises:
            PrefixUnreadable: a chunk is missing, short or corrupt, or cannot be read now.
        """
        ...

    def read(
        self,
        layer: int,
        tokens: Tensor | None,
        *,
        keys: Slots | None = None,
        values: Slots | None = None,
    ) -> None:
        """Put rows of a layer into slots.

        Args:
            layer: from 0.
            tokens: int64 [head groups, k] on the CPU, ascending in each head group; None for all.
            keys: slots for the keys of the heads that the probe column does not have; None if they
                are not wanted.
            values: slots for the values of all heads; None if they are not wanted.

        Raises:
            PrefixUnreadable: as for `read_probe`; what is in the slots is then undefined.
        """
        ...

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor | None) -> None:
        """Note which tokens [head groups, k] the layer uses; see `PrefixPlanner.note_selection`."""
        ...

    def note_whole(self, layer: int) -> None:
        """Note that the layer uses all tokens."""
        ...


class SegmentSource(StoredSource):
    """Reads a stored prefix: consecutive spans of one or more segments."""

    def __init__(
        self,
        shape: KVShape,
        spans: Sequence[SourceSpan],
        reader: BlockReader,
        pool: BufferPool,
        cache: ChunkCache,
        needs: ReadNeeds,
        *,
        learns: bool = False,
    ) -> None:
        """Begin with nothing read.

        `learns`: learn from what layers want what to read ahead for later requests.
        """
        assert spans
        layouts = [span.segment.layout for span in spans]
        layer_bytes = sum(pool.size_of(columns_buffer_bytes(layout)) for layout in layouts)
        self._spans = tuple(spans)
        self._planner = PrefixPlanner(
            shape,
            spans,
            cache.placement,
            cache.page.page_bytes,
            learns=learns and not needs.whole,
        )
        segments = [span.segment for span in spans]
        super().__init__(segments, layer_bytes, reader, self._planner.stats)
        self._pool = pool
        self._cache = cache
        self._gatherer = make_gatherer(cache)
        self._needs = needs
        # Blocks to read ahead, by span; found once for all layers: faster, at worst out of date.
        self._expected: list[list[Flags]] | None = None
        self._expected_from = 0

    @property
    def num_tokens(self) -> int:
        """See `PrefixSource`."""
        return self._planner.num_tokens

    def read_ahead(self, waste_budget: float) -> None:
        """See `StoredSource.read_ahead`."""
        layer = self.next_ahead
        self.next_ahead += 1
        if self._expected is None:
            self._expected = [self.expect(layer, span, waste_budget) for span in self._spans]
            self._expected_from = layer
        for number, expected in enumerate(self._expected):
            # In separate reads, because the probe column is asked for first.
            for blocks in expected:
                own = np.flatnonzero(blocks[layer - self._expected_from])
                if len(own):
                    self._buffer(layer, number).read_ahead(own, self._reader)

    def read_probe(self, layer: int) -> Tensor:
        """See `PrefixSource.read_probe`."""
        self._begin(layer)
        plan = self._planner.plan_probe(layer)

        def take() -> Tensor:
            found = [self._probe_keys(layer, own) for own in plan.spans]
            return found[0] if len(found) == 1 else torch.cat(found)

        return self._carry_out(plan, take)

    def read(
        self,
        layer: int,
        tokens: Tensor | None,
        *,
        keys: Slots | None = None,
        values: Slots | None = None,
    ) -> None:
        """See `PrefixSource.read`."""
        self._begin(layer)
        wanted = None if tokens is None else tokens.numpy()
        plan = self._planner.plan(layer, wanted, keys=keys is not None, values=values is not None)

        def take() -> None:
            reads = [(own, self._memory_of(layer, own)) for own in plan.spans]
            self._gatherer.gather(reads, keys, values)

        self._carry_out(plan, take)

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor | None) -> None:
        """See `PrefixSource.note_selection`; counts hits and updates the moving averages."""
        self._planner.note_selection(layer, selected.numpy(), importance)

    def note_whole(self, layer: int) -> None:
        """See `PrefixSource.note_whole`; counts hits and updates the moving averages."""
        self._planner.note_whole(layer)

    def expect(self, layer: int, span: SourceSpan, waste_budget: float) -> list[Flags]:
        """Predict which blocks the layers from this one on will want from SSD.

        Returns:
            bool [layers, blocks of a layer] for the probe column, if needed, and keys and values.
        """
        needs, expected = self._needs, []
        if needs.probe:
            expected.append(self._planner.missing(layer, span, probe=True))
        missing = self._planner.missing(layer, span, probe=False)
        if needs.whole:
            return [*expected, missing]
        likely = likely_blocks(span.blocks.codes[layer:], missing, waste_budget)
        keys = span.geometry.keys
        if needs.all_keys and keys is not None:
            likely[:, keys.blocks] = missing[:, keys.blocks]
        return [*expected, likely]

    def _buffer(self, layer: int, number: int) -> LayerBuffer:
        """The buffer of a layer of the span with this number."""
        make = functools.partial(self._make_buffer, self._spans[number].segment, layer)
        return self._open_buffer(layer, number, make)

    def _make_buffer(self, segment: OpenSegment, layer: int, tenant: Tenant) -> LayerBuffer:
        layout = segment.layout
        offset, size = layout.layer_offset(layer), layout.columns_bytes
        spare = columns_buffer_bytes(layout) - size
        return LayerBuffer(segment, offset, size, self._pool, tenant, spare_bytes=spare)

    def _carry_out(self, plan: PlannedRead, take: Callable[[], _T]) -> _T:
        """Fetch blocks, take rows from where chunks stood before the read, then move the chunks."""
        try:
            self._fetch(plan)
            with self.writing():
                rows = take()
                self._settle(plan)
        except BaseException:
            # The placement assumes bytes that were not copied.
            self._cache.abandon(plan.access)
            raise
        self._planner.count(plan)
        return rows

    def _fetch(self, plan: PlannedRead) -> None:
        """Bring all blocks that must come from SSD into their buffers."""
        gap, wanted = self._reader.cost.gap_bytes, []
        for own in plan.spans:
            if own.blocks is not None:
                buffer = self._buffer(plan.layer, self._number(own.span))
                # A read of the probe column is followed by one of the layer's rows.
                last = own.rows is not None
                blocks = np.flatnonzero(own.blocks)
                num_bytes = buffer.read(blocks, gap, self._reader, last=last)
                self.stats.ssd_bytes += num_bytes
                if own.rows is not None:
                    own.span.history.ssd_bytes += len(blocks) * BLOCK_BYTES
                wanted.append((buffer, blocks))
        began = time.perf_counter()
        for buffer, blocks in wanted:
            buffer.wait(blocks)
        self.stats.wait_ms += (time.perf_counter() - began) * 1e3

    def _number(self, span: SourceSpan) -> int:
        return next(number for number, own in enumerate(self._spans) if own is span)

    def _memory(self, layer: int, span: SourceSpan) -> PooledMemory:
        return self._buffer(layer, self._number(span)).memory

    def _memory_of(self, layer: int, own: SpanRead) -> PooledMemory | None:
        """The memory of a span's layer buffer; None if nothing of the read comes from SSD."""
        return None if own.blocks is None else self._memory(layer, own.span)

    def _probe_keys(self, layer: int, own: SpanRead) -> Tensor:
        """The keys [tokens, heads, Dk] of the probe column of a span."""
        (part,), span = own.parts, own.span
        first = int(part.chunks[0]) * part.group.chunk_rows
        chunks = self._gatherer.gather_chunks(part, self._memory_of(layer, own))
        rows = chunks[span.start - first : span.stop - first]
        return rows.view(-1, part.group.heads, part.group.head_dim)

    def _settle(self, plan: PlannedRead) -> None:
        fence = self._cache.settle(plan.access, self._kept_chunks(plan))
        if fence is not None:
            for own in plan.spans:
                if (memory := self._memory_of(plan.layer, own)) is not None:
                    memory.fence = fence

    def _kept_chunks(self, plan: PlannedRead) -> list[LoadedChunks]:
        """The chunks that were read whole in order to be cached."""
        found = []
        for own in plan.spans:
            for part in own.parts:
                if part.kept.any():
                    group, memory = part.group, self._memory(plan.layer, own.span)
                    head_groups, chunks = np.divmod(part.chunks[part.kept], group.chunks)
                    starts = group.start + head_groups * group.column_bytes + chunks * group.stride
                    flat = memory.vectors(torch.uint8, 1).view(-1)
                    found.append(LoadedChunks(flat, part.ids[part.kept], starts))
        return found


def columns_buffer_bytes(layout: SegmentLayout) -> int:
    """Bytes of a layer buffer for the columns."""
    # The last chunk of a column may be short; it is viewed as if it were whole.
    longest = max(layout.chunk_stride(column) for column in layout.shape.columns)
    return layout.columns_bytes + longest
