"""Where the KVs of a request's stored prefix come from.

Stage: load. A source gives rows (tokens) of streams of a layer. `SegmentSource` takes them from the
device cache, the host cache and SSD; `MemorySource` has them in memory, after a recompute of a
prefix whose chunks were unreadable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.errors import ChunkUnreadable
from impress_sglang.storage.direct_io import AlignedBuffer
from impress_sglang.storage.layout import KVShape, Stream
from impress_sglang.storage.reader import BlockRun, ChunkReader
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.placement import Access, Tier
from impress_sglang.transfer.plan import (
    Indices,
    RowPlan,
    SourceSpan,
    block_runs,
    plan_rows,
    wanted_blocks,
)

_T = TypeVar("_T", bound=np.generic)


@dataclasses.dataclass(slots=True)
class ReadStats:
    """What reading a prefix took; bytes, and accesses to chunks by the tier where they were found.

    `ssd_needed_bytes` are the rows that were asked of SSD: `ssd_bytes` over it is the read
    amplification. `h2d_bytes` are rows that were not on the device, and whole chunks that moved
    there. `important_bytes` are the KVs of selected tokens, `important_device_bytes` those that
    were found on the device. `selected_chunks` leaves out the chunks of probe keys, which every
    probe reads.
    """

    ssd_bytes: int = 0
    ssd_needed_bytes: int = 0
    h2d_bytes: int = 0
    device_chunks: int = 0
    host_chunks: int = 0
    ssd_chunks: int = 0
    selected_chunks: int = 0
    important_bytes: int = 0
    important_device_bytes: int = 0

    @property
    def chunks_accessed(self) -> int:
        """Accesses to chunks, wherever they were found."""
        return self.device_chunks + self.host_chunks + self.ssd_chunks

    @property
    def chunks_loaded(self) -> int:
        """Accesses to chunks that were not on the device."""
        return self.host_chunks + self.ssd_chunks

    def add(self, other: ReadStats) -> None:
        """Count what another source has read."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, value)

    def as_dict(self) -> dict[str, int]:
        """All counters, with those that follow from others."""
        return {
            **dataclasses.asdict(self),
            "chunks_accessed": self.chunks_accessed,
            "chunks_loaded": self.chunks_loaded,
        }


class PrefixSource(Protocol):
    """The KVs of the tokens [0, num_tokens) of a stored prefix.

    Implementations must return exactly the rows that are wanted, in the order of the tokens, as
    tensors [rows, heads of the stream, dim] in the KV's dtype on the source's device. A returned
    tensor is valid until the next `read` of the same stream by any source.
    """

    num_tokens: int
    stats: ReadStats

    def read(
        self, layer: int, streams: Sequence[Stream], tokens: Tensor | None = None
    ) -> list[Tensor]:
        """Rows of several streams of a layer; `tokens` is ascending int64 [k], None for all.

        Raises:
            ChunkUnreadable: a chunk is missing, short or corrupt.
        """
        ...

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor) -> None:
        """Say which tokens the layer uses: ascending int64 [k], by scores [Hp, m]."""
        ...

    def note_whole(self) -> None:
        """Say that the layer uses all tokens."""
        ...


class Staging:
    """Memory that reads land in: one buffer per stream, shared by the sources of one thread."""

    def __init__(self) -> None:
        self._buffers = {stream: AlignedBuffer() for stream in Stream}

    def view(self, stream: Stream, num_bytes: int) -> memoryview:
        """Memory for the next read of a stream."""
        return self._buffers[stream].view(num_bytes)


@dataclasses.dataclass(slots=True)
class _Part:
    """One stream of one span in a read: its share of the access, and of the staging area."""

    plan: RowPlan
    stream: Stream
    ids: Indices
    tiers: npt.NDArray[np.uint8]
    pages: npt.NDArray[np.int32]
    kept: npt.NDArray[np.bool_]
    memory: memoryview = dataclasses.field(default_factory=lambda: memoryview(b""))

    @property
    def stride(self) -> int:
        return self.plan.span.segment.layout.chunk_stride(self.stream)

    @property
    def staged_bytes(self) -> int:
        """Memory of the chunks that come from SSD, one after another."""
        return int((self.tiers == Tier.SSD).sum()) * self.stride

    def staged_position(self) -> Indices:
        """Position of each SSD chunk in the staging area; undefined for others."""
        return np.cumsum(self.tiers == Tier.SSD) - 1


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
        self.num_tokens = sum(len(span) for span in spans)
        self.stats = ReadStats()
        self._shape = shape
        self._spans = tuple(spans)
        self._reader = reader
        self._staging = staging
        self._cache = cache
        # Per stream of the last read: which of its rows were on the device.
        self._on_device: dict[Stream, npt.NDArray[np.bool_]] = {}

    @property
    def segment_ids(self) -> list[str]:
        """Names of the segments that this source reads, in order."""
        return [span.segment.segment_id for span in self._spans]

    def read(
        self, layer: int, streams: Sequence[Stream], tokens: Tensor | None = None
    ) -> list[Tensor]:
        """See `PrefixSource.read`."""
        plans = self._plan(layer, None if tokens is None else tokens.numpy())
        parts, access = self._access(layer, streams, plans)
        try:
            self._read_blocks(layer, parts)
        except ChunkUnreadable:
            self._cache.abandon(access)
            raise
        rows = [self._rows(stream, plans, parts) for stream in streams]
        self._cache.settle(access, _kept_chunks(parts))
        self._count(parts, access)
        return rows

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor) -> None:
        """See `PrefixSource.note_selection`; counts hits and updates the moving averages."""
        tokens = selected.numpy()
        self._count_important(tokens)
        first = 0
        for span in self._spans:
            low, high = np.searchsorted(tokens, [first, first + len(span)])
            span.history.note(
                layer,
                span.start,
                tokens[low:high] - first,
                importance[:, first : first + len(span)],
            )
            first += len(span)

    def note_whole(self) -> None:
        """See `PrefixSource.note_whole`; counts hits."""
        self._count_important(np.arange(self.num_tokens))

    def _count_important(self, tokens: Indices) -> None:
        for stream, on_device in self._on_device.items():
            hits = on_device[tokens] if len(on_device) == self.num_tokens else on_device
            assert len(hits) == len(tokens)
            row_bytes = self._shape.row_bytes(stream)
            self.stats.important_bytes += len(tokens) * row_bytes
            self.stats.important_device_bytes += int(hits.sum()) * row_bytes
        self._on_device.clear()

    def _plan(self, layer: int, tokens: Indices | None) -> list[RowPlan]:
        plans, first = [], 0
        for span in self._spans:
            if tokens is None:
                local = np.arange(span.start, span.stop)
            else:
                low, high = np.searchsorted(tokens, [first, first + len(span)])
                local = tokens[low:high] - (first - span.start)
            if len(local):
                plans.append(plan_rows(span, layer, local))
            first += len(span)
        return plans

    def _access(
        self, layer: int, streams: Sequence[Stream], plans: list[RowPlan]
    ) -> tuple[list[_Part], Access]:
        """Ask the cache where the chunks are, and give those on SSD their memory."""
        pairs = [
            (plan, stream) for stream in streams if self._shape.row_bytes(stream) for plan in plans
        ]
        ids = [plan.chunk_ids(layer, stream) for plan, stream in pairs]
        shares = [plan.shares() for plan, _ in pairs]
        access = self._cache.access(_joined(ids, np.int64), _joined(shares, np.float64))
        parts, first = [], 0
        for (plan, stream), own in zip(pairs, ids, strict=True):
            found = slice(first, first + len(own))
            first = found.stop
            tiers, pages, kept = access.tiers[found], access.pages[found], access.kept[found]
            parts.append(_Part(plan, stream, own, tiers, pages, kept))
        self._assign_memory(parts)
        return parts, access

    def _assign_memory(self, parts: list[_Part]) -> None:
        for stream in {part.stream for part in parts}:
            own = [part for part in parts if part.stream is stream]
            memory, start = self._staging.view(stream, sum(p.staged_bytes for p in own)), 0
            for part in own:
                part.memory = memory[start : start + part.staged_bytes]
                start += part.staged_bytes

    def _read_blocks(self, layer: int, parts: list[_Part]) -> None:
        gap_bytes = self._reader.cost.gap_bytes
        runs = []
        for part in parts:
            own = _runs(layer, part, gap_bytes)
            if part.stream is not Stream.PROBE_KEYS:
                part.plan.span.history.ssd_bytes += sum(len(run.target) for run in own)
            runs += own
        if runs:
            self.stats.ssd_bytes += self._reader.read(runs)

    def _rows(self, stream: Stream, plans: list[RowPlan], parts: list[_Part]) -> Tensor:
        heads, dim = len(self._shape.heads(stream)), self._shape.head_dim(stream)
        own = [part for part in parts if part.stream is stream]
        if not own:
            count = sum(plan.num_rows for plan in plans)
            return torch.empty(count, 0, dim, dtype=self._shape.dtype, device=self._cache.device)
        rows = [self._gather(part) for part in own]
        self._on_device[stream] = np.concatenate(
            [(part.tiers == Tier.DEVICE)[part.plan.chunk_of_row] for part in own]
        )
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).view(-1, heads, dim)

    def _gather(self, part: _Part) -> Tensor:
        """Rows [k, heads * dim] of a part, on the device."""
        plan = part.plan
        found = [tier for tier in Tier if (part.tiers == tier).any()]
        if len(found) == 1:
            everything = np.arange(plan.num_rows)
            return self._gather_tier(part, found[0], everything).to(self._cache.device)
        tier_of_row = part.tiers[plan.chunk_of_row]
        width = self._shape.row_bytes(part.stream) // self._shape.dtype.itemsize
        rows = torch.empty(plan.num_rows, width, dtype=self._shape.dtype, device=self._cache.device)
        for tier in found:
            chosen = np.flatnonzero(tier_of_row == tier)
            part_rows = self._gather_tier(part, tier, chosen).to(rows.device)
            rows[torch.from_numpy(chosen).to(rows.device)] = part_rows
        return rows

    def _gather_tier(self, part: _Part, tier: Tier, chosen: Indices) -> Tensor:
        plan = part.plan
        chunks, offsets = plan.chunk_of_row[chosen], plan.offset_of_row[chosen]
        if tier == Tier.SSD:
            return self._staged_rows(part, chunks, offsets)
        vectors = self._cache.page.row_vectors(self._shape, part.stream)
        return self._cache.read_rows(tier, part.pages[chunks], offsets, vectors)

    def _staged_rows(self, part: _Part, chunks: Indices, offsets: Indices) -> Tensor:
        dtype = self._shape.dtype
        width = self._shape.row_bytes(part.stream) // dtype.itemsize
        rows_per_chunk = part.plan.span.segment.layout.chunk_tokens
        stride = part.stride // dtype.itemsize
        flat = torch.frombuffer(part.memory, dtype=dtype)
        positions = part.staged_position()[chunks]
        if stride == rows_per_chunk * width:
            rows = flat.view(-1, width)
            if part.plan.unbroken and len(chunks) == part.plan.num_rows:
                first = int(offsets[0])
                return rows[first : first + len(chunks)]
            return rows.index_select(0, torch.from_numpy(positions * rows_per_chunk + offsets))
        count = len(part.memory) // part.stride
        staged = flat.as_strided((count, rows_per_chunk, width), (stride, width, 1))
        return staged[torch.from_numpy(positions), torch.from_numpy(offsets)]

    def _count(self, parts: list[_Part], access: Access) -> None:
        stats = self.stats
        for part in parts:
            row_bytes = self._shape.row_bytes(part.stream)
            rows = np.bincount(part.tiers, part.plan.counts, len(Tier)).astype(np.int64)
            chunks = np.bincount(part.tiers, minlength=len(Tier))
            stats.ssd_needed_bytes += int(rows[Tier.SSD]) * row_bytes
            stats.h2d_bytes += int(rows[Tier.SSD] + rows[Tier.HOST]) * row_bytes
            stats.ssd_chunks += int(chunks[Tier.SSD])
            stats.host_chunks += int(chunks[Tier.HOST])
            stats.device_chunks += int(chunks[Tier.DEVICE])
            if part.stream is not Stream.PROBE_KEYS:
                stats.selected_chunks += int(chunks.sum())
        pages = sum(len(move.target_pages) for move in access.moves if move.target == Tier.DEVICE)
        stats.h2d_bytes += pages * self._cache.page.page_bytes


class MemorySource:
    """A prefix whose KVs are in memory: `keys` [L, m, G, Dk] and `values` [L, m, G, Dv]."""

    def __init__(self, shape: KVShape, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        assert len(keys) == len(values) == shape.num_layers
        self.num_tokens = keys[0].shape[0]
        self.stats = ReadStats()
        self._shape = shape
        self._keys = keys
        self._values = values

    def read(
        self, layer: int, streams: Sequence[Stream], tokens: Tensor | None = None
    ) -> list[Tensor]:
        """See `PrefixSource.read`."""
        return [self._rows(layer, stream, tokens) for stream in streams]

    def note_selection(self, layer: int, selected: Tensor, importance: Tensor) -> None:
        """See `PrefixSource.note_selection`; a recomputed prefix has no averages."""

    def note_whole(self) -> None:
        """See `PrefixSource.note_whole`."""

    def _rows(self, layer: int, stream: Stream, tokens: Tensor | None) -> Tensor:
        whole = self._values[layer] if stream is Stream.VALUES else self._keys[layer]
        rows = whole if tokens is None else whole[tokens]
        return rows[:, list(self._shape.heads(stream))]


def _joined(parts: Sequence[npt.NDArray[_T]], dtype: type[_T]) -> npt.NDArray[_T]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _runs(layer: int, part: _Part, gap_bytes: int) -> list[BlockRun]:
    """The blocks that a part needs from SSD."""
    on_ssd = part.tiers == Tier.SSD
    if not on_ssd.any():
        return []
    plan, segment = part.plan, part.plan.span.segment
    chosen = np.flatnonzero(on_ssd[plan.chunk_of_row])
    chunks = plan.chunks[on_ssd]
    wanted = wanted_blocks(
        segment.layout,
        part.stream,
        chunks,
        part.kept[on_ssd] | (plan.counts[on_ssd] == segment.layout.chunk_tokens),
        part.staged_position()[plan.chunk_of_row[chosen]],
        plan.offset_of_row[chosen],
    )
    return [
        BlockRun(segment, run.offset, part.memory[run.start : run.stop])
        for run in block_runs(segment.layout, layer, part.stream, chunks, wanted, gap_bytes)
    ]


def _kept_chunks(parts: list[_Part]) -> dict[int, Tensor]:
    """Bytes of the chunks that were read whole to be cached, by id."""
    found = {}
    for part in parts:
        if not part.kept.any():
            continue
        staged = torch.frombuffer(part.memory, dtype=torch.uint8).view(-1, part.stride)
        positions = part.staged_position()
        for index in np.flatnonzero(part.kept).tolist():
            found[int(part.ids[index])] = staged[int(positions[index])]
    return found
