"""Where the KVs of a request's stored prefix come from.

Stage: load. A source gives rows (tokens) of streams of a layer. `SegmentSource` takes them from the
device cache, the host cache and SSD; `MemorySource` has them in memory, after a recompute of a
prefix whose chunks were unreadable.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from impress_sglang.storage.direct_io import AlignedBuffer
from impress_sglang.storage.layout import PROBE, KVShape, Stream
from impress_sglang.storage.reader import BlockRun, ChunkReader
from impress_sglang.storage.sketch import restore_keys
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.plan import Indices, SourceSpan
from impress_sglang.transfer.planner import PlannedRead, PrefixPlanner, ReadPart, ReadStats


class PrefixSource(Protocol):
    """The KVs of the tokens [0, num_tokens) of a stored prefix.

    Implementations must return exactly the rows that are wanted, in the order of the tokens, on the
    source's device. A returned tensor is valid until the next read of the same stream by any
    source.
    """

    @property
    def num_tokens(self) -> int:
        """Length of the prefix."""
        ...

    @property
    def stats(self) -> ReadStats:
        """What reading has taken so far."""
        ...

    def read_probe(self, layer: int) -> Tensor:
        """The keys from which important tokens are found.

        Returns:
            [num_tokens, heads, Dk]: the probe heads' keys in the KV's dtype, or where the shape has
            sketches an approximation of the keys of all heads in float32.

        Raises:
            ChunkUnreadable: a chunk is missing, short or corrupt.
        """
        ...

    def read(self, layer: int, wanted: Mapping[Stream, Tensor | None]) -> dict[Stream, Tensor]:
        """Rows of several streams of a layer, at once.

        Args:
            layer: from 0.
            wanted: streams with keys or values, and ascending int64 tokens of each; None for all.

        Returns:
            For each stream [rows, heads of the stream, dim] in the KV's dtype.

        Raises:
            ChunkUnreadable: a chunk is missing, short or corrupt.
        """
        ...

    def note_selection(
        self, layer: int, selected: Sequence[Tensor], importance: Tensor | None
    ) -> None:
        """Say which tokens the layer uses: see `PrefixPlanner.note_selection`."""
        ...

    def note_whole(self, layer: int) -> None:
        """Say that the layer uses all tokens."""
        ...


class Staging:
    """Memory that reads land in: one buffer per stream, shared by the sources of one thread."""

    def __init__(self) -> None:
        self._buffers: dict[Stream, AlignedBuffer] = collections.defaultdict(AlignedBuffer)

    def view(self, stream: Stream, num_bytes: int) -> memoryview:
        """Memory for the next read of a stream."""
        return self._buffers[stream].view(num_bytes)


class SegmentSource:
    """A stored prefix: consecutive spans of one or more segments."""

    def __init__(
        self,
        shape: KVShape,
        spans: Sequence[SourceSpan],
        reader: ChunkReader,
        staging: Staging,
        cache: ChunkCache,
    ) -> None:
        assert spans
        self.segment_ids = [span.segment.segment_id for span in spans]
        self._shape = shape
        self._spans = tuple(spans)
        self._planner = PrefixPlanner(shape, spans, cache.placement, cache.page.page_bytes)
        self._reader = reader
        self._staging = staging
        self._cache = cache

    @property
    def num_tokens(self) -> int:
        """See `PrefixSource`."""
        return self._planner.num_tokens

    @property
    def stats(self) -> ReadStats:
        """See `PrefixSource`."""
        return self._planner.stats

    def read_probe(self, layer: int) -> Tensor:
        """See `PrefixSource.read_probe`."""
        rows = self.read(layer, {PROBE: None})[PROBE]
        return self._restore(layer, rows) if self._shape.sketch_bits else rows

    def read(self, layer: int, wanted: Mapping[Stream, Tensor | None]) -> dict[Stream, Tensor]:
        """See `PrefixSource.read`.

        Rows are taken from where chunks stood before this read; then the chunks move.
        """
        arrays = _arrays_of(wanted)
        plan = self._planner.plan(layer, arrays, self._reader.cost.gap_bytes)
        try:
            rows = self._carry_out(plan, wanted)
        except BaseException:
            # The placement counts on bytes that were not copied.
            self._cache.abandon(plan.access)
            raise
        self._planner.count(plan)
        return rows

    def note_selection(
        self, layer: int, selected: Sequence[Tensor], importance: Tensor | None
    ) -> None:
        """See `PrefixSource.note_selection`; counts hits and updates the moving averages."""
        self._planner.note_selection(layer, _as_arrays(selected), importance)

    def note_whole(self, layer: int) -> None:
        """See `PrefixSource.note_whole`; counts hits and updates the moving averages."""
        self._planner.note_whole(layer)

    def _restore(self, layer: int, packed: Tensor) -> Tensor:
        """Sketched keys [m, G, Dk] float32 of all spans from their packed rows."""
        shape, per_row = self._shape, self._shape.tokens_per_row(PROBE)
        keys, first = [], 0
        for span in self._spans:
            skipped = span.start // per_row
            stop = first + -(-span.stop // per_row) - skipped
            codes = packed[first:stop].contiguous().view(torch.uint8)
            tables = span.segment.sketch_tables
            assert tables is not None
            start = span.start - skipped * per_row
            keys.append(
                restore_keys(
                    codes.view(-1, shape.num_kv_heads, shape.key_dim),
                    torch.tensor(tables[layer], device=codes.device),
                    shape.sketch_bits,
                    start,
                    start + len(span),
                )
            )
            first = stop
        return keys[0] if len(keys) == 1 else torch.cat(keys)

    def _carry_out(
        self, plan: PlannedRead, streams: Mapping[Stream, Tensor | None]
    ) -> dict[Stream, Tensor]:
        memory = self._assign_memory(plan)
        self._reader.read(
            [
                BlockRun(part.plan.span.segment, run.offset, own[run.start : run.stop])
                for part, own in zip(plan.parts, memory, strict=True)
                for run in part.runs
            ]
        )
        rows = {stream: self._rows(stream, plan, memory, streams[stream]) for stream in streams}
        self._cache.settle(plan.access, _kept_chunks(plan.parts, memory))
        return rows

    def _assign_memory(self, plan: PlannedRead) -> list[memoryview]:
        """Staging memory of each part."""
        sizes = dict.fromkeys(self._shape.streams, 0)
        for part in plan.parts:
            sizes[part.stream] += part.staged_bytes
        areas = {stream: self._staging.view(stream, size) for stream, size in sizes.items() if size}
        used, memory = dict.fromkeys(self._shape.streams, 0), []
        for part in plan.parts:
            start = used[part.stream]
            used[part.stream] += part.staged_bytes
            whole = areas.get(part.stream, memoryview(b""))
            memory.append(whole[start : used[part.stream]])
        return memory

    def _rows(
        self, stream: Stream, plan: PlannedRead, memory: list[memoryview], tokens: Tensor | None
    ) -> Tensor:
        heads, dim = len(self._shape.heads(stream)), self._shape.head_dim(stream)
        rows = [
            self._gather(part, own)
            for part, own in zip(plan.parts, memory, strict=True)
            if part.stream == stream
        ]
        if not rows:
            count = self.num_tokens if tokens is None else len(tokens)
            dtype, device = self._shape.dtype, self._cache.device
            return torch.empty(count, 0, dim, dtype=dtype, device=device)
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).view(-1, heads, dim)

    def _gather(self, part: ReadPart, memory: memoryview) -> Tensor:
        """Rows [k, heads * dim] of a part, on the device."""
        plan, device = part.plan, self._cache.device
        found = np.flatnonzero(np.bincount(part.tiers, minlength=len(Tier))).tolist()
        if len(found) == 1:
            everything = np.arange(plan.num_rows)
            return self._gather_tier(part, memory, found[0], everything).to(device)
        tier_of_row = part.tiers[plan.chunk_of_row]
        chosen = [np.flatnonzero(tier_of_row == tier) for tier in found]
        by_tier = [
            self._gather_tier(part, memory, tier, own).to(device)
            for tier, own in zip(found, chosen, strict=True)
        ]
        # Joining and reordering is faster than writing scattered rows.
        position = np.empty(plan.num_rows, np.int64)
        position[np.concatenate(chosen)] = np.arange(plan.num_rows)
        return torch.cat(by_tier).index_select(0, torch.from_numpy(position).to(device))

    def _gather_tier(
        self, part: ReadPart, memory: memoryview, tier: int, chosen: Indices
    ) -> Tensor:
        chunks, offsets = part.plan.chunk_of_row[chosen], part.plan.offset_of_row[chosen]
        if tier == Tier.SSD:
            return self._staged_rows(part, memory, part.staged_position[chunks], offsets)
        vectors = self._cache.page.row_vectors(self._shape, part.stream)
        return self._cache.read_rows(tier, part.pages[chunks], offsets, vectors)

    def _staged_rows(
        self, part: ReadPart, memory: memoryview, positions: Indices, offsets: Indices
    ) -> Tensor:
        dtype = self._shape.dtype
        width = self._shape.row_bytes(part.stream) // dtype.itemsize
        rows_per_chunk = part.plan.span.segment.layout.chunk_tokens
        stride = part.stride // dtype.itemsize
        flat = torch.frombuffer(memory, dtype=dtype)
        if stride == rows_per_chunk * width:
            rows = flat.view(-1, width)
            if part.plan.unbroken and len(offsets) == part.plan.num_rows:
                first = int(offsets[0])
                return rows[first : first + len(offsets)]
            return rows.index_select(0, torch.from_numpy(positions * rows_per_chunk + offsets))
        count = len(memory) // part.stride
        staged = flat.as_strided((count, rows_per_chunk, width), (stride, width, 1))
        return staged[torch.from_numpy(positions), torch.from_numpy(offsets)]


class MemorySource:
    """A prefix whose KVs are in memory: `keys` [L, m, G, Dk] and `values` [L, m, G, Dv]."""

    def __init__(self, shape: KVShape, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        assert len(keys) == len(values) == shape.num_layers
        self.num_tokens = keys[0].shape[0]
        self.stats = ReadStats()
        self._shape = shape
        self._keys = keys
        self._values = values

    def read_probe(self, layer: int) -> Tensor:
        """See `PrefixSource.read_probe`; instead of a sketch the keys themselves."""
        keys = self._keys[layer][:, list(self._shape.heads(PROBE))]
        return keys.float() if self._shape.sketch_bits else keys

    def read(self, layer: int, wanted: Mapping[Stream, Tensor | None]) -> dict[Stream, Tensor]:
        """See `PrefixSource.read`."""
        return {stream: self._rows(layer, stream, tokens) for stream, tokens in wanted.items()}

    def note_selection(
        self, layer: int, selected: Sequence[Tensor], importance: Tensor | None
    ) -> None:
        """See `PrefixSource.note_selection`; a recomputed prefix has no averages."""

    def note_whole(self, layer: int) -> None:
        """See `PrefixSource.note_whole`."""

    def _rows(self, layer: int, stream: Stream, tokens: Tensor | None) -> Tensor:
        values = stream in self._shape.value_streams
        whole = self._values[layer] if values else self._keys[layer]
        rows = whole if tokens is None else whole[tokens]
        return rows[:, list(self._shape.heads(stream))]


def _as_arrays(selected: Sequence[Tensor]) -> list[Indices]:
    """The tokens of each lane; one array where lanes share one tensor."""
    arrays = {id(tokens): tokens.numpy() for tokens in selected}
    return [arrays[id(tokens)] for tokens in selected]


def _arrays_of(wanted: Mapping[Stream, Tensor | None]) -> dict[Stream, Indices | None]:
    """The same tokens are the same array, by which a planner knows that they are."""
    arrays = {id(tokens): tokens.numpy() for tokens in wanted.values() if tokens is not None}
    return {
        stream: None if tokens is None else arrays[id(tokens)] for stream, tokens in wanted.items()
    }


def _kept_chunks(parts: list[ReadPart], memory: list[memoryview]) -> dict[int, Tensor]:
    """Bytes of the chunks that were read whole to be cached, by id."""
    found = {}
    for part, own in zip(parts, memory, strict=True):
        if part.kept.any():
            staged = torch.frombuffer(own, dtype=torch.uint8).view(-1, part.stride)
            for index in np.flatnonzero(part.kept).tolist():
                found[int(part.ids[index])] = staged[int(part.staged_position[index])]
    return found
