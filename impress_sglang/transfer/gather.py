"""Gathers the rows that a read wants from device cache, host cache and layer buffers.

Stage: load. `RowGatherer` is the contract: `IndexedGatherer` indexes tensors, tier by tier, on any
device; `KernelGatherer`, for GPUs, lets one kernel read all three places, those in pinned CPU
memory over the bus, and write into slots. tests/unit/triton/test_paths.py compares them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from impress_sglang import loops
from impress_sglang.loops.types import Indices
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.fence import Fence
from impress_sglang.tiers.placement import Tier
from impress_sglang.transfer.buffers import PooledMemory
from impress_sglang.transfer.read_planner import GroupPart, SpanRead
from impress_sglang.transfer.slots import Slots

# The host prepares a launch for a span in the time that it takes for rows of so many tokens.
LAUNCH_TOKENS = 512

SpanMemory = tuple[SpanRead, PooledMemory | None]
"""A read of a span, and the memory of its layer buffer; None if nothing is taken from SSD."""


class RowGatherer(Protocol):
    """The contract.

    Implementations must not change what they read, and must copy rows bit for bit. Chunks may move
    between caches right after the call; layer buffers are protected by `PooledMemory.fence`.
    """

    def gather(self, reads: Sequence[SpanMemory], keys: Slots | None, values: Slots | None) -> None:
        """Put the wanted rows of a layer into slots.

        Args:
            reads: for all spans: of keys, of values, or of both.
            keys: slots for the heads of the key columns; None if keys are not read.
            values: slots for the values; None if values are not read.
        """
        ...

    def gather_chunks(self, part: GroupPart, memory: PooledMemory | None) -> Tensor:
        """Gather all rows of neighbouring chunks of a group that has one column.

        Returns:
            [chunks * rows of a chunk, heads * dim] on the device of the cache; rows that a short
            last chunk lacks are undefined. May share the memory of a layer buffer.
        """
        ...


def make_gatherer(cache: ChunkCache) -> RowGatherer:
    """The gatherer that fits the device of the cache."""
    return KernelGatherer(cache) if cache.device.type == "cuda" else IndexedGatherer(cache)


class IndexedGatherer:
    """Gathers rows by tensor indexing, tier by tier."""

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache

    def gather(self, reads: Sequence[SpanMemory], keys: Slots | None, values: Slots | None) -> None:
        """See `RowGatherer`."""
        for read, memory in reads:
            for part in read.parts:
                slots = values if part.is_values(read.span) else keys
                assert slots is not None and read.rows is not None
                rows = self._gather_part(read, part, memory)
                if read.rows.positions is None:
                    slots.put(rows.view(len(slots), -1, part.group.head_dim))
                else:
                    own = rows.view(len(rows), -1, part.group.head_dim)
                    slots.put_at(read.rows.positions, own, part.group.head_groups)

    def gather_chunks(self, part: GroupPart, memory: PooledMemory | None) -> Tensor:
        """See `RowGatherer`."""
        group, width = part.group, part.group.heads * part.group.head_dim
        found = [tier for tier, chunks in enumerate(part.chunks_by_tier) if chunks]
        if found == [Tier.SSD]:
            assert memory is not None
            return self._staged_chunks(part, memory).to(self._cache.device)
        size = (len(part.chunks), group.chunk_rows * width)
        chunks = torch.empty(size, dtype=self._cache.page.dtype, device=self._cache.device)
        for tier in found:
            place = np.flatnonzero(part.tiers == tier)
            if tier == Tier.SSD:
                assert memory is not None
                contents = self._staged_chunks(part, memory).view(size)[torch.from_numpy(place)]
            else:
                contents = self._cached_chunks(tier, part, place)
            chunks[torch.from_numpy(place).to(chunks.device)] = contents.to(chunks.device)
        return chunks.view(-1, width)

    def _gather_part(self, read: SpanRead, part: GroupPart, memory: PooledMemory | None) -> Tensor:
        plan, device = read.rows, self._cache.device
        assert plan is not None
        found = [tier for tier, chunks in enumerate(part.chunks_by_tier) if chunks]
        if len(found) == 1:
            own = self._gather_tier(part, found[0], plan.head_groups, plan.rows, memory)
            return own.to(device)
        chunks = part.group.chunks_of_rows(plan.head_groups, plan.rows)
        tier_of_row = part.tiers[part.place_of_chunk()[chunks]]
        chosen = [np.flatnonzero(tier_of_row == tier) for tier in found]
        by_tier = [
            self._gather_tier(part, tier, plan.head_groups[rows], plan.rows[rows], memory).to(
                device
            )
            for tier, rows in zip(found, chosen, strict=True)
        ]
        # Joining and reordering is faster than writing scattered rows.
        position = np.empty(len(plan.rows), np.int64)
        position[np.concatenate(chosen)] = np.arange(len(plan.rows))
        return torch.cat(by_tier).index_select(0, torch.from_numpy(position).to(device))

    def _gather_tier(
        self,
        part: GroupPart,
        tier: int,
        head_groups: Indices,
        rows: Indices,
        memory: PooledMemory | None,
    ) -> Tensor:
        """Gather rows [n, heads * dim] that are all in one tier, on the device of that tier."""
        group, page = part.group, self._cache.page
        if tier == Tier.SSD:
            assert memory is not None
            vector = math.gcd(group.row_bytes, BLOCK_BYTES)
            first = (group.row_offsets(head_groups, rows) + group.start) // vector
            index = _vector_index(first, group.row_bytes // vector)
            vectors = memory.vectors(page.dtype, vector)
            return vectors.index_select(0, index).view(len(rows), -1)
        pages = part.pages[part.place_of_chunk()[group.chunks_of_rows(head_groups, rows)]]
        width = page.row_vectors_of(group.heads * group.head_dim)
        return self._cache.slabs[tier].read_rows(pages, rows % group.chunk_rows, width)

    def _cached_chunks(self, tier: int, part: GroupPart, place: Indices) -> Tensor:
        """Chunks of one column, [chunks, chunk rows * heads * dim]; missing rows are undefined."""
        group, page = part.group, self._cache.page
        vectors = page.row_vectors_of(group.heads * group.head_dim)
        if group.chunk_rows != page.page_vectors:
            # The store has another chunk size than the cache: pages do not end where chunks do.
            rows = np.tile(np.arange(group.chunk_rows), len(place))
            held = group.rows_of_chunk[part.chunks[place]].astype(np.int64)
            offsets = np.minimum(rows, np.repeat(held, group.chunk_rows) - 1)
            pages = np.repeat(part.pages[place], group.chunk_rows, axis=0)
            return self._cache.slabs[tier].read_rows(pages, offsets, vectors).view(len(place), -1)
        pages = _owned_pages(part, place, vectors, page.page_vectors)
        return self._cache.slabs[tier].read_pages(pages.reshape(-1)).view(len(place), -1)

    def _staged_chunks(self, part: GroupPart, memory: PooledMemory) -> Tensor:
        """Rows of chunks in a layer buffer; those that were not read are undefined."""
        group, dtype = part.group, self._cache.page.dtype
        width, first, count = group.heads * group.head_dim, int(part.chunks[0]), len(part.chunks)
        flat = memory.vectors(dtype, dtype.itemsize).view(-1)
        stride = group.stride // dtype.itemsize
        start = group.start // dtype.itemsize + first * stride
        if group.unbroken:
            return flat[start : start + count * stride].view(-1, width)
        shape = (count, group.chunk_rows * width)
        return flat.as_strided(shape, (stride, 1), start).reshape(-1, width)


class KernelGatherer:
    """Gathers keys and values of all spans from all tiers in one kernel launch."""

    def __init__(self, cache: ChunkCache) -> None:
        # Imported only where it is used: Triton is not needed on a CPU.
        from impress_sglang.triton import chunk_rows, gather

        self._kernels = gather
        self._chunk_rows = chunk_rows
        self._cache = cache
        page, size = cache.page, cache.page.dtype.itemsize
        # Elements of the kernel's vectors: the largest of which rows, pages and blocks are made.
        self._unit = math.gcd(page.unit * size, BLOCK_BYTES) // size
        # Layer buffers begin at memory pages, so they do not limit the alignment.
        self._grain = math.gcd(self._unit * size, *cache.begins().tolist())

    def gather(self, reads: Sequence[SpanMemory], keys: Slots | None, values: Slots | None) -> None:
        """See `RowGatherer`; nothing is waited for: see `Fence`."""
        if not any(read.parts for read, _ in reads):
            # As for keys where all heads are probe heads.
            return
        self._cache.copy_stream.join()
        if self._are_whole([read for read, _ in reads]):
            for read in reads:
                self._gather_whole(read, keys, values)
            return
        wanted, indices = [], []
        for slots, is_values in ((keys, False), (values, True)):
            found = self._addresses(reads, is_values=is_values)
            if slots is not None and found:
                wanted.append(slots)
                indices.append(np.concatenate(found))
        # Either one span has all rows, or each span has the positions of its rows.
        positions = [
            read.rows.positions
            for read, _ in reads
            if read.rows is not None and read.rows.positions is not None
        ]
        joined = [np.concatenate(positions)] if positions else []
        left = self._cache.staging.leave([*indices, *joined])
        targets = [
            self._target(slots, addresses, left[-1] if joined else None)
            for slots, addresses in zip(wanted, left, strict=False)
        ]
        self._launch(targets, [memory for _, memory in reads])

    def gather_chunks(self, part: GroupPart, memory: PooledMemory | None) -> Tensor:
        """See `RowGatherer`; nothing is waited for."""
        page, group = self._cache.page, part.group
        width = group.heads * group.head_dim
        size = (len(part.chunks) * group.chunk_rows, width)
        rows = torch.empty(size, dtype=page.dtype, device=self._device)
        self._cache.copy_stream.join()
        if group.chunk_rows == page.page_vectors:
            addresses = self._page_addresses(part, memory)
            targets = np.arange(len(addresses)) * page.page_bytes + rows.data_ptr()
            self._note_reading(self._cache.copier.copy(addresses, targets), [memory])
        else:
            self._gather_all_rows(part, memory, rows)
        return rows

    @property
    def _device(self) -> torch.device:
        return self._cache.device

    def _target(self, slots: Slots, addresses: Tensor, positions: Tensor | None) -> Any:
        assert slots.pool.dtype == self._cache.page.dtype
        columns = self._kernels.head_columns(slots.pool, slots.heads, self._unit)
        head_groups = columns.offsets.numel() // addresses.shape[1]
        return self._kernels.Target(
            slots.pool, columns, addresses, slots.rows, positions, head_groups
        )

    def _addresses(self, reads: Sequence[SpanMemory], *, is_values: bool) -> list[Indices]:
        """Addresses of the wanted rows of keys or of values, span by span; see `_row_addresses`."""
        found = []
        for read, memory in reads:
            for part in read.parts:
                if part.is_values(read.span) == is_values:
                    assert read.rows is not None
                    found.append(
                        self._row_addresses(part, memory, read.rows.head_groups, read.rows.rows)
                    )
        return found

    def _row_addresses(
        self, part: GroupPart, memory: PooledMemory | None, head_groups: Indices, rows: Indices
    ) -> Indices:
        """Addresses of the vectors of some rows, int64 [n, vectors of a row]."""
        group, page, unit = part.group, self._cache.page, self._unit
        vectors = group.heads * group.head_dim // unit
        flat = loops.vector_addresses(
            head_groups,
            rows,
            part.tiers,
            part.place_of_chunk(),
            part.pages,
            group.chunks,
            group.chunk_rows,
            vectors,
            page.elements // unit,
            unit * page.dtype.itemsize,
            group.start,
            group.column_bytes,
            group.stride,
            self._begins(memory),
        )
        return flat.reshape(len(rows), vectors)

    def _begins(self, memory: PooledMemory | None) -> Indices:
        return self._cache.begins(0 if memory is None else memory.address)

    def _page_addresses(self, part: GroupPart, memory: PooledMemory | None) -> Indices:
        """Addresses of the pages of whole chunks, int64 [pages], chunk after chunk."""
        group, page = part.group, self._cache.page
        vectors = page.row_vectors_of(group.heads * group.head_dim)
        last_rows = group.rows - (group.chunks - 1) * group.chunk_rows
        return loops.chunk_pages(
            part.chunks,
            part.tiers,
            part.pages,
            self._begins(memory),
            group.chunks,
            group.column_bytes,
            group.start,
            group.stride,
            vectors,
            -(-last_rows * vectors // page.page_vectors),
            page.page_bytes,
        )

    def _are_whole(self, reads: Sequence[SpanRead]) -> bool:
        """Whether all want neighbouring rows of chunks of the cache's size, each for a launch."""
        if len(reads) > 1 and sum(len(own.span) for own in reads) < LAUNCH_TOKENS * len(reads):
            return False
        starts = (None if own.rows is None else own.rows.start for own in reads)
        if any(start is None for start in starts):
            return False
        parts = (part for own in reads for part in own.parts)
        return all(part.group.chunk_rows == self._cache.page.page_vectors for part in parts)

    def _gather_whole(self, read: SpanMemory, keys: Slots | None, values: Slots | None) -> None:
        """Put all rows of a span into slots: the kernel finds them in their chunks."""
        (own, memory), staging = read, self._cache.staging
        assert own.rows is not None and own.rows.start is not None
        start, stop = own.first, own.first + len(own.span)
        found, chosen = [self._page_addresses(part, memory) for part in own.parts], []
        # Many programs look at each: too many for the bus.
        pages = staging.upload(np.concatenate(found)).split([len(pages) for pages in found])
        for part, addresses in zip(own.parts, pages, strict=True):
            slots = values if part.is_values(own.span) else keys
            assert slots is not None and slots.pool.dtype == self._cache.page.dtype
            slots, groups = slots.part(start, stop), part.group.head_groups
            columns = self._kernels.head_columns(slots.pool, slots.heads, self._unit)
            by_chunk = addresses.view(groups, len(part.chunks) // groups, -1)
            chosen.append(self._chunk_rows.ChunkRows(slots.pool, columns, by_chunk, slots.rows))
        group = own.parts[0].group
        rows = own.rows.start - int(own.parts[0].chunks[0]) * group.chunk_rows, len(own.span)
        self._chunk_rows.gather_chunks(
            chosen, rows, group.chunk_rows, self._unit, grain_bytes=self._grain
        )
        self._note_reading(Fence(self._device), [memory])

    def _gather_all_rows(self, part: GroupPart, memory: PooledMemory | None, rows: Tensor) -> None:
        """Gather row by row, for a store with another chunk size: pages do not end with chunks."""
        group = part.group
        chunks = np.repeat(part.chunks, group.chunk_rows)
        inside = np.tile(np.arange(group.chunk_rows), len(part.chunks))
        number = np.minimum(chunks * group.chunk_rows + inside, group.rows - 1)
        found = self._row_addresses(part, memory, np.zeros_like(number), number)
        (addresses,) = self._cache.staging.leave([found])
        columns = self._kernels.even_columns(addresses.shape[1], self._unit, self._device)
        target = self._kernels.Target(rows, columns, addresses)
        self._launch([target], [memory])

    def _launch(self, targets: Sequence[Any], memories: Sequence[PooledMemory | None]) -> None:
        self._kernels.gather(targets, self._unit, grain_bytes=self._grain)
        fence = Fence(self._device)
        self._cache.staging.protect(fence)
        self._note_reading(fence, memories)

    def _note_reading(self, fence: Fence, memories: Sequence[PooledMemory | None]) -> None:
        """Protect caches and layer buffers from changes until what was launched is done."""
        self._cache.copy_stream.note_reading(fence)
        for memory in memories:
            if memory is not None:
                memory.fence = fence


def _vector_index(first: Indices, count: int) -> Tensor:
    """The numbers of `count` consecutive vectors from each number in `first` on, flattened."""
    if count == 1:
        return torch.from_numpy(first)
    return torch.from_numpy((first[:, None] + np.arange(count)).reshape(-1))


def _owned_pages(part: GroupPart, place: Indices, vectors: int, page_vectors: int) -> Any:
    """Pages int32 [chunks, pages of a chunk] of some of the touched chunks of one column.

    A short chunk has fewer pages; the entries behind them are 0 and mean nothing.
    """
    owned = np.ceil(part.group.rows_of_chunk[part.chunks[place]] * vectors / page_vectors)
    known = part.pages[place, :vectors]
    pages = np.zeros((len(place), vectors), np.int32)
    pages[:, : known.shape[1]] = known
    pages[np.arange(vectors) >= owned[:, None]] = 0
    return pages
