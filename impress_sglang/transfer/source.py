"""Where the KVs of a request's stored prefix come from.

Stage: load. A source gives rows (tokens) of a layer. `SegmentSource` takes them from the device
cache, the host cache and SSD; `MemorySource` has them in memory, after a recompute of a prefix
whose chunks were unreadable.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from impress_sglang.loops.types import Flags, Indices
from impress_sglang.storage.layout import BLOCK_BYTES, PROBE, KVShape
from impress_sglang.storage.reader import ChunkReader
from impress_sglang.storage.sketch import Sketch
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Tier
from impress_sglang.timeline import COPY, NO_TIMELINE, PLAN, PROBE_READ, SSD_READ, Timeline
from impress_sglang.transfer.area import AreaPool, LayerArea, PooledMemory
from impress_sglang.transfer.expectation import chances_after, likely_blocks
from impress_sglang.transfer.gather import RowGatherer, make_gatherer
from impress_sglang.transfer.plan import SourceSpan, StreamGroup, chances_by_tokens
from impress_sglang.transfer.planner import (
    GroupPart,
    PlannedRead,
    PrefixPlanner,
    ReadStats,
    SpanRead,
)

_T = TypeVar("_T")
# Positions of rows in a read, None if they are all there are; and the rows.
_Piece = tuple[Indices | None, Tensor]

# Layers whose choice says something of the next one; more add next to nothing.
LAYERS_ABOVE = 2
# From so many requests on their wishes say more than the layers above.
WELL_KNOWN_REQUESTS = 3

# The track of reads on a timeline.
SSD_TRACK = "SSD"


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What a request will ask of each layer, as far as that is known before.

    `whole`: all keys and values. `probe`: the probe stream. `all_keys`: all keys, and some values.
    """

    whole: bool = False
    probe: bool = True
    all_keys: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of a layer on the source's device, None what was not asked for.

    keys [k, heads, Dk] of the heads that the probe stream does not have, values [k, G, Dv]; row j
    of a head is the j-th token of its lane.
    """

    keys: Tensor | None
    values: Tensor | None


class PrefixSource(Protocol):
    """The KVs of the tokens [0, num_tokens) of a stored prefix.

    Layers are read in ascending order. Implementations must return exactly the rows that are
    wanted, in the order of the tokens, on the source's device. A returned tensor is valid until the
    source is asked for another layer.
    """

    @property
    def num_tokens(self) -> int:
        """Length of the prefix."""
        ...

    @property
    def stats(self) -> ReadStats:
        """What reading has taken so far."""
        ...

    @property
    def timeline(self) -> Timeline:
        """Where the time goes."""
        ...

    def read_probe(self, layer: int) -> Tensor | Sketch:
        """The keys from which important tokens are found.

        Returns:
            [num_tokens, heads, Dk]: the probe heads' keys in the KV's dtype, or where the shape has
            sketches an approximation of the keys of all heads in float32, or the sketch of all
            tokens, where that is what a scorer likes best.

        Raises:
            ChunkUnreadable: a chunk is missing, short or corrupt.
        """
        ...

    def read(
        self, layer: int, tokens: Tensor | None, *, keys: bool = True, values: bool = True
    ) -> LayerRows:
        """Rows of a layer.

        Args:
            layer: from 0.
            tokens: int64 [lanes, k] on the CPU, ascending in each lane; None for all.
            keys: whether keys are wanted, of the heads that the probe stream does not have.
            values: whether values are wanted.

        Raises:
            ChunkUnreadable: a chunk is missing, short or corrupt.
        """
        ...

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor | None) -> None:
        """Say which tokens [lanes, k] the layer uses: see `PrefixPlanner.note_selection`."""
        ...

    def note_whole(self, layer: int) -> None:
        """Say that the layer uses all tokens."""
        ...


class SegmentSource:
    """A stored prefix: consecutive spans of one or more segments."""

    def __init__(
        self,
        shape: KVShape,
        spans: Sequence[SourceSpan],
        reader: ChunkReader,
        pool: AreaPool,
        cache: ChunkCache,
        demand: Demand,
        *,
        learns: bool = False,
        timeline: Timeline = NO_TIMELINE,
        gatherer: RowGatherer | None = None,
    ) -> None:
        """Begin with nothing read.

        `learns`: what layers want teaches what is read ahead for later requests. `gatherer`: None
        for what fits the device.
        """
        assert spans
        self.segment_ids = [span.segment.segment_id for span in spans]
        self.layer_bytes = sum(span.segment.layout.layer_bytes for span in spans)
        self.timeline = timeline
        self.layer = -1
        """The layer that was asked for last."""
        self.next_ahead = 0
        """The first layer of which nothing was read ahead."""
        self._shape = shape
        self._spans = tuple(spans)
        self._planner = PrefixPlanner(
            shape,
            spans,
            cache.placement,
            cache.page.page_bytes,
            learns=learns and not demand.whole,
        )
        self._reader = reader
        self._pool = pool
        self._cache = cache
        self._gatherer = make_gatherer(cache) if gatherer is None else gatherer
        # A kernel restores keys as it reads them.
        self._gives_sketches = cache.device.type == "cuda"
        self._demand = demand
        self._areas: dict[int, dict[int, LayerArea]] = {}
        # By span; found once for all layers, which is faster and at worst out of date.
        self._expected: list[list[Flags]] | None = None
        self._expected_from = 0
        # What the last layers have chosen, and the last layer that was read ahead by that.
        self._above: collections.deque[Indices] = collections.deque(maxlen=LAYERS_ABOVE)
        self._refined = 0

    @property
    def num_tokens(self) -> int:
        """See `PrefixSource`."""
        return self._planner.num_tokens

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._shape.num_layers

    @property
    def stats(self) -> ReadStats:
        """See `PrefixSource`."""
        return self._planner.stats

    def read_ahead(self, waste: float) -> None:
        """Begin to read what the layer `next_ahead` will probably want.

        `waste` bounds what is expected to be read in vain, as a share of what is wanted.
        """
        layer = self.next_ahead
        self.next_ahead += 1
        if self._expected is None:
            self._expected = [self.expect(layer, span, waste) for span in self._spans]
            self._expected_from = layer
        for number, expected in enumerate(self._expected):
            # Apart, because the probe stream is asked for first.
            for blocks in expected:
                own = blocks[layer - self._expected_from]
                if own.any():
                    self._area(layer, number).read_ahead(own, self._reader)

    def refine(self, waste: float) -> None:
        """Read ahead what the layers above make likely for the next one, of a little known prefix.

        Neighbouring layers choose similar tokens (ContiguousKV, https://arxiv.org/abs/2601.13631).
        Where a few requests have told what a block is wanted for, that says more
        (`python -m bench.prediction`), and this does nothing.
        """
        layer = self.layer + 1
        if self._demand.whole or not self._above or not self._refined < layer < self.next_ahead:
            return
        self._refined = layer
        chosen = np.concatenate([own.reshape(-1) for own in self._above])
        shares = np.bincount(chosen, minlength=self.num_tokens) / (
            len(self._above) * self._shape.num_lanes
        )
        first = 0
        for number, span in enumerate(self._spans):
            own = shares[first : first + len(span)]
            first += len(span)
            if (requests := span.blocks.requests(layer)) >= WELL_KNOWN_REQUESTS:
                continue
            missing = self._planner.missing(layer, span, probe=False, layers=1)[0]
            seen = chances_by_tokens(span, layer, own)
            chances = chances_after(span.blocks.codes[layer], requests, seen)
            likely = likely_blocks(chances, missing, waste)
            if likely.any():
                self._area(layer, number).read_ahead(likely, self._reader)

    def read_probe(self, layer: int) -> Tensor | Sketch:
        """See `PrefixSource.read_probe`."""
        self._begin(layer)
        with self.timeline.span(PLAN, layer):
            plan = self._planner.plan_probe(layer)

        def take() -> Tensor | Sketch:
            found = [self._probe_keys(layer, own) for own in plan.spans]
            if len(found) == 1 and self._gives_sketches:
                return found[0]
            rows = [own.restore() if isinstance(own, Sketch) else own for own in found]
            return rows[0] if len(rows) == 1 else torch.cat(rows)

        return self._carry_out(plan, PROBE_READ, take)

    def read(
        self, layer: int, tokens: Tensor | None, *, keys: bool = True, values: bool = True
    ) -> LayerRows:
        """See `PrefixSource.read`."""
        self._begin(layer)
        with self.timeline.span(PLAN, layer):
            wanted = None if tokens is None else tokens.numpy()
            plan = self._planner.plan(layer, wanted, keys=keys, values=values)
        count = self.num_tokens if tokens is None else tokens.shape[1]

        return self._carry_out(
            plan, SSD_READ, lambda: self._rows(plan, count, keys=keys, values=values)
        )

    @property
    def is_reading(self) -> bool:
        """Whether reads that were asked for have not ended."""
        areas = (area for own in self._areas.values() for area in own.values())
        return any(not read.done for area in areas for read in area.reads)

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor | None) -> None:
        """See `PrefixSource.note_selection`; counts hits and updates the moving averages."""
        with self.timeline.span(PLAN, layer):
            self._planner.note_selection(layer, selected.numpy(), importance)
            self._above.append(selected.numpy())

    def note_whole(self, layer: int) -> None:
        """See `PrefixSource.note_whole`; counts hits and updates the moving averages."""
        with self.timeline.span(PLAN, layer):
            self._planner.note_whole(layer)

    def close(self) -> None:
        """Stop reading; afterwards nothing reads from the segments for this source."""
        closed = [area for areas in self._areas.values() for area in areas.values()]
        for layer in list(self._areas):
            self._close_areas(layer)
        for area in closed:
            area.drain()

    def expect(self, layer: int, span: SourceSpan, waste: float) -> list[Flags]:
        """What the layers from this one on will probably want from SSD.

        Returns:
            bool [layers, blocks of a layer] of the probe stream, and the same of keys and values.
        """
        demand, expected = self._demand, []
        if demand.probe:
            expected.append(self._planner.missing(layer, span, probe=True))
        missing = self._planner.missing(layer, span, probe=False)
        if demand.whole:
            return [*expected, missing]
        likely = likely_blocks(span.blocks.codes[layer:], missing, waste)
        keys = span.geometry.keys
        if demand.all_keys and keys is not None:
            likely[:, keys.blocks] = missing[:, keys.blocks]
        return [*expected, likely]

    def _begin(self, layer: int) -> None:
        """Another layer is asked for: what earlier ones were read into is not needed any more."""
        if layer == self.layer:
            return
        assert layer > self.layer, "layers are read in ascending order"
        self.layer = layer
        self.next_ahead = max(self.next_ahead, layer + 1)
        for earlier in [number for number in self._areas if number < layer]:
            self._close_areas(earlier)

    def _close_areas(self, layer: int) -> None:
        for area in self._areas.pop(layer).values():
            area.close(self._reader)
            self.stats.ssd_bytes += area.ahead_bytes
            self.stats.ahead_bytes += area.ahead_bytes
            self.stats.ahead_used_bytes += area.ahead_used_bytes
            if self.timeline.enabled:
                for read in area.reads:
                    if read.began:
                        name = "ahead" if read.ahead else "demand"
                        ended = read.ended or time.perf_counter()
                        self.timeline.add(SSD_TRACK, name, read.began, ended, layer)

    def _area(self, layer: int, number: int) -> LayerArea:
        """The area of a layer of the span with this number."""
        areas = self._areas.setdefault(layer, {})
        if number not in areas:
            areas[number] = LayerArea(self._spans[number].segment, layer, self._pool)
        return areas[number]

    def _carry_out(self, plan: PlannedRead, stage: str, take: Callable[[], _T]) -> _T:
        """Rows are taken from where chunks stood before the read; then the chunks move."""
        try:
            with self.timeline.span(stage, plan.layer):
                self._fetch(plan)
            with self.timeline.span(COPY, plan.layer):
                rows = take()
                self._cache.settle(plan.access, self._kept_chunks(plan))
        except BaseException:
            # The placement counts on bytes that were not copied.
            self._cache.abandon(plan.access)
            raise
        with self.timeline.span(PLAN, plan.layer):
            self._planner.count(plan)
        return rows

    def _fetch(self, plan: PlannedRead) -> None:
        """Bring all blocks that must come from SSD into their areas."""
        gap, wanted = self._reader.cost.gap_bytes, []
        for own in plan.spans:
            if own.blocks is not None:
                area = self._area(plan.layer, self._number(own.span))
                num_bytes = area.read(own.blocks, gap, self._reader)
                self.stats.ssd_bytes += num_bytes
                if own.rows is not None:
                    own.span.history.ssd_bytes += int(own.blocks.sum()) * BLOCK_BYTES
                wanted.append((area, own.blocks))
        began = time.perf_counter()
        for area, blocks in wanted:
            area.wait(blocks)
        self.stats.wait_ms += (time.perf_counter() - began) * 1e3

    def _number(self, span: SourceSpan) -> int:
        return next(number for number, own in enumerate(self._spans) if own is span)

    def _memory(self, layer: int, span: SourceSpan) -> PooledMemory:
        return self._area(layer, self._number(span)).memory

    def _probe_keys(self, layer: int, own: SpanRead) -> Tensor | Sketch:
        """Keys [tokens, heads, Dk] of the probe stream of a span, or their sketch."""
        (part,), span, shape = own.parts, own.span, self._shape
        wanted = span.probe_rows
        first = int(part.chunks[0]) * part.group.chunk_rows
        rows = self._whole_chunks(layer, span, part)[wanted.start - first : wanted.stop - first]
        if not shape.sketch_bits:
            return rows.view(-1, part.group.heads, part.group.head_dim)
        tables = span.segment.sketch_tables
        assert tables is not None
        codes = rows.contiguous().view(torch.uint8)
        start = span.start - wanted.start * shape.tokens_per_row(PROBE)
        return Sketch(
            codes.view(-1, shape.num_kv_heads, shape.key_dim),
            torch.from_numpy(tables[layer]).to(codes.device),
            shape.sketch_bits,
            start,
            start + len(span),
        )

    def _whole_chunks(self, layer: int, span: SourceSpan, part: GroupPart) -> Tensor:
        """All rows of neighbouring chunks of one stream, [rows, heads * dim], on the device."""
        group, width = part.group, part.group.heads * part.group.head_dim
        first, count = int(part.chunks[0]), len(part.chunks)
        found = [tier for tier, chunks in enumerate(part.chunks_by_tier) if chunks]
        if found == [Tier.SSD]:
            return self._staged_chunks(layer, span, group, first, count).to(self._cache.device)
        size = (count, group.chunk_rows * width)
        chunks = torch.empty(size, dtype=self._shape.dtype, device=self._cache.device)
        for tier in found:
            place = np.flatnonzero(part.tiers == tier)
            if tier == Tier.SSD:
                staged = self._staged_chunks(layer, span, group, first, count)
                contents = staged.view(size)[torch.from_numpy(place)]
            else:
                contents = self._cached_chunks(tier, part, place)
            chunks[torch.from_numpy(place).to(chunks.device)] = contents.to(chunks.device)
        return chunks.view(-1, width)

    def _cached_chunks(self, tier: int, part: GroupPart, place: Indices) -> Tensor:
        """Chunks of one stream, [chunks, rows of a chunk * heads * dim]; missing rows undefined."""
        group, page = part.group, self._cache.page
        vectors = page.row_vectors_of(group.heads * group.head_dim)
        if group.chunk_rows != page.page_vectors:
            # Of a store with another chunk size: pages do not end where chunks do.
            rows = np.tile(np.arange(group.chunk_rows), len(place))
            held = group.rows_of_chunk[part.chunks[place]].astype(np.int64)
            offsets = np.minimum(rows, np.repeat(held, group.chunk_rows) - 1)
            pages = np.repeat(part.pages[place], group.chunk_rows, axis=0)
            return self._cache.read_rows(tier, pages, offsets, vectors).view(len(place), -1)
        # A short chunk has fewer pages; what stands behind their numbers means nothing.
        owned = np.ceil(group.rows_of_chunk[part.chunks[place]] * vectors / page.page_vectors)
        pages = part.pages[place, :vectors].copy()
        pages[np.arange(vectors) >= owned[:, None]] = 0
        return self._cache.read_chunks(tier, pages)

    def _staged_chunks(
        self, layer: int, span: SourceSpan, group: StreamGroup, first: int, count: int
    ) -> Tensor:
        """Rows of chunks in an area; those that were not read are undefined."""
        dtype, width = self._shape.dtype, group.heads * group.head_dim
        flat = self._memory(layer, span).vectors(dtype, dtype.itemsize).view(-1)
        stride = group.stride // dtype.itemsize
        start = group.start // dtype.itemsize + first * stride
        if group.unbroken:
            return flat[start : start + count * stride].view(-1, width)
        shape = (count, group.chunk_rows * width)
        return flat.as_strided(shape, (stride, 1), start).reshape(-1, width)

    def _rows(self, plan: PlannedRead, count: int, *, keys: bool, values: bool) -> LayerRows:
        """The `count` rows of each lane that a read wants, in the order of the tokens."""
        pieces: tuple[list[_Piece], list[_Piece]] = ([], [])
        for own in plan.spans:
            assert own.rows is not None
            memory = None if own.blocks is None else self._memory(plan.layer, own.span)
            gathered = self._gatherer.gather(own, memory)
            for part, rows in zip(own.parts, gathered, strict=True):
                pieces[part.is_values(own.span)].append((own.rows.positions, rows))
        shape = self._shape
        return LayerRows(
            self._joined(pieces[0], count, shape.key_dim) if keys else None,
            self._joined(pieces[1], count, shape.value_dim) if values else None,
        )

    def _joined(self, pieces: Sequence[_Piece], count: int, dim: int) -> Tensor:
        """Rows [count, heads of all lanes, dim] from those of each span."""
        device = self._cache.device
        if not pieces:
            return torch.empty(count, 0, dim, dtype=self._shape.dtype, device=device)
        if len(pieces) == 1 and pieces[0][0] is None:
            return pieces[0][1].view(count, -1, dim)
        joined = pieces[0][1].new_empty(count * self._shape.num_lanes, pieces[0][1].shape[1])
        for positions, rows in pieces:
            assert positions is not None
            joined.index_copy_(0, torch.from_numpy(positions).to(device), rows)
        return joined.view(count, -1, dim)

    def _kept_chunks(self, plan: PlannedRead) -> dict[int, Tensor]:
        """Bytes of the chunks that were read whole to be cached, by id."""
        found: dict[int, Tensor] = {}
        for own in plan.spans if plan.access.moves else ():
            for part in own.parts:
                group, memory = part.group, self._memory(plan.layer, own.span)
                flat = memory.vectors(torch.uint8, 1).view(-1)
                kept = np.flatnonzero(part.kept)
                lanes, chunks = np.divmod(part.chunks[kept], group.chunks)
                starts = group.start + lanes * group.stream_bytes + chunks * group.stride
                for place, start in zip(kept.tolist(), starts.tolist(), strict=True):
                    found[int(part.ids[place])] = flat[start : start + group.stride]
        return found


class MemorySource:
    """A prefix whose KVs are in memory: `keys` [L, m, G, Dk] and `values` [L, m, G, Dv]."""

    def __init__(self, shape: KVShape, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        assert len(keys) == len(values) == shape.num_layers
        self.num_tokens = keys[0].shape[0]
        self.stats = ReadStats()
        self.timeline = NO_TIMELINE
        self._shape = shape
        self._keys = keys
        self._values = values

    def read_probe(self, layer: int) -> Tensor | Sketch:
        """See `PrefixSource.read_probe`; instead of a sketch the keys themselves."""
        keys = self._keys[layer][:, list(self._shape.heads(PROBE))]
        return keys.float() if self._shape.sketch_bits else keys

    def read(
        self, layer: int, tokens: Tensor | None, *, keys: bool = True, values: bool = True
    ) -> LayerRows:
        """See `PrefixSource.read`."""
        shape = self._shape
        own = list(shape.other_kv_heads)
        return LayerRows(
            _of_lanes(self._keys[layer], tokens)[:, own] if keys else None,
            _of_lanes(self._values[layer], tokens) if values else None,
        )

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor | None) -> None:
        """See `PrefixSource.note_selection`; a recomputed prefix has no averages."""

    def note_whole(self, layer: int) -> None:
        """See `PrefixSource.note_whole`."""


def rows_of_lanes(whole: Tensor, tokens: Tensor) -> Tensor:
    """From rows [m, G, D] of all tokens those of the tokens [lanes, k] of each lane: [k, G, D]."""
    if len(tokens) == 1:
        return whole.index_select(0, tokens[0].to(whole.device))
    heads = torch.arange(whole.shape[1], device=whole.device)
    return whole[tokens.T.to(whole.device), heads]


def _of_lanes(whole: Tensor, tokens: Tensor | None) -> Tensor:
    return whole if tokens is None else rows_of_lanes(whole, tokens)
