"""Gathers the rows that a read wants from device cache, host cache and layer buffers.

Stage: load. Where each vector begins in memory is computed for all three places alike. On a CPU a
compiled loop copies from there into slots; on a GPU a kernel does, from pinned CPU memory over the
bus. tests/unit/triton/test_paths.py compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impress_sglang import loops
from impress_sglang.loops import copies
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

SlotRows = tuple[Slots, Indices]
"""Slots, and addresses int64 [n, v] of the v vectors of each row that goes there."""


def make_gatherer(cache: ChunkCache) -> RowGatherer:
    """The gatherer that fits the device of the cache."""
    return KernelGatherer(cache) if cache.device.type == "cuda" else RowGatherer(cache)


class RowGatherer:
    """Gathers with a compiled loop: all is copied when it returns.

    Rows are copied bit for bit, into pools in the dtype of the cache. Chunks may move between
    caches right after a call; layer buffers are protected by `PooledMemory.fence`.
    """

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache
        page, size = cache.page, cache.page.dtype.itemsize
        # Elements of a vector: the largest of which rows, pages and blocks are made.
        self._unit = math.gcd(page.unit * size, BLOCK_BYTES) // size

    def gather(self, reads: Sequence[SpanMemory], keys: Slots | None, values: Slots | None) -> None:
        """Put the wanted rows of a layer into slots.

        Args:
            reads: for all spans: of keys, of values, or of both.
            keys: slots for the heads of the key columns; None if keys are not read.
            values: slots for the values; None if values are not read.
        """
        # There are no parts where keys are read alone, and all heads are probe heads.
        if any(read.parts for read, _ in reads):
            self._cache.copy_stream.join()
            self._gather(reads, keys, values)

    def gather_chunks(self, part: GroupPart, memory: PooledMemory | None) -> Tensor:
        """Gather all rows of neighbouring chunks of a group that has one column.

        Returns:
            [chunks * rows of a chunk, heads * dim] on the device of the cache; rows that a short
            last chunk lacks are undefined. May share the memory of a layer buffer.
        """
        cache, page, group = self._cache, self._cache.page, part.group
        staged = part.chunks_by_tier[Tier.SSD] == len(part.chunks)
        if cache.copier.in_place and staged and group.unbroken:
            assert memory is not None
            return self._staged_chunks(part, memory)
        size = (len(part.chunks) * group.chunk_rows, group.heads * group.head_dim)
        rows = torch.empty(size, dtype=page.dtype, device=cache.device)
        cache.copy_stream.join()
        if group.chunk_rows == page.page_vectors:
            addresses = self._page_addresses(part, memory)
            targets = np.arange(len(addresses)) * page.page_bytes + rows.data_ptr()
            fence = cache.copier.copy(addresses, targets)
        else:
            fence = self._copy([(Slots.of(rows[:, None]), self._all_rows(part, memory))])
        self._note_reading(fence, [memory])
        return rows

    def _gather(
        self, reads: Sequence[SpanMemory], keys: Slots | None, values: Slots | None
    ) -> None:
        wanted = []
        for slots, is_values in ((keys, False), (values, True)):
            found = self._addresses(reads, is_values=is_values)
            if slots is not None and found:
                wanted.append((slots, np.concatenate(found)))
        # Either one span has all rows, or each span has the positions of its rows.
        positions = [
            read.rows.positions
            for read, _ in reads
            if read.rows is not None and read.rows.positions is not None
        ]
        fence = self._copy(wanted, np.concatenate(positions) if positions else None)
        self._note_reading(fence, [memory for _, memory in reads])

    def _copy(self, wanted: Sequence[SlotRows], positions: Indices | None = None) -> Fence:
        """Copy rows to slots: position p is token p // head groups of head group p % head groups.

        `positions` int64 [n], those of the rows, for all slots; None: row i has position i.
        """
        for slots, addresses in wanted:
            pool, unit, places = slots.pool, self._unit, slots.rows
            size, head_vectors = pool.element_size(), pool.shape[2] // unit
            assert pool.dtype == self._cache.page.dtype
            assert pool.stride(2) == 1 and not pool.shape[2] % unit
            if positions is None:
                assert addresses.size == len(slots) * len(slots.heads) * head_vectors
            copies.copy_rows(
                addresses,
                np.arange(len(addresses)) if positions is None else positions,
                np.arange(len(pool)) if places is None else places.numpy(),
                np.array(slots.heads),
                pool.data_ptr(),
                pool.stride(0) * size,
                pool.stride(1) * size,
                head_vectors,
                unit * size,
            )
        return Fence(self._device)

    @property
    def _device(self) -> torch.device:
        return self._cache.device

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

    def _all_rows(self, part: GroupPart, memory: PooledMemory | None) -> Indices:
        """Addresses of all rows, for a store with another chunk size: pages do not end with chunks.

        Those that a short last chunk lacks are that of its last row.
        """
        group = part.group
        chunks = np.repeat(part.chunks, group.chunk_rows)
        inside = np.tile(np.arange(group.chunk_rows), len(part.chunks))
        number = np.minimum(chunks * group.chunk_rows + inside, group.rows - 1)
        return self._row_addresses(part, memory, np.zeros_like(number), number)

    def _staged_chunks(self, part: GroupPart, memory: PooledMemory) -> Tensor:
        """Rows of chunks of an unbroken group, where they are in a layer buffer."""
        group, dtype = part.group, self._cache.page.dtype
        flat = memory.vectors(dtype, dtype.itemsize).view(-1)
        begin = group.start + int(part.chunks[0]) * group.stride
        stop = begin + len(part.chunks) * group.stride
        rows = flat[begin // dtype.itemsize : stop // dtype.itemsize]
        return rows.view(-1, group.heads * group.head_dim)

    def _note_reading(self, fence: Fence, memories: Sequence[PooledMemory | None]) -> None:
        """Protect caches and layer buffers from changes until what was launched is done."""
        self._cache.copy_stream.note_reading(fence)
        for memory in memories:
            if memory is not None:
                memory.fence = fence


class KernelGatherer(RowGatherer):
    """Gathers keys and values of all spans in one launch from all tiers; nothing is waited for."""

    def __init__(self, cache: ChunkCache) -> None:
        # Imported only where it is used: Triton is not needed on a CPU.
        from impress_sglang.triton import chunk_rows, gather

        super().__init__(cache)
        self._kernels = gather
        self._chunk_rows = chunk_rows
        # Layer buffers begin at memory pages, so they do not limit the alignment.
        self._grain = math.gcd(self._unit * cache.page.dtype.itemsize, *cache.begins().tolist())

    def _gather(
        self, reads: Sequence[SpanMemory], keys: Slots | None, values: Slots | None
    ) -> None:
        if not self._are_whole([read for read, _ in reads]):
            super()._gather(reads, keys, values)
            return
        for read in reads:
            self._gather_whole(read, keys, values)

    def _copy(self, wanted: Sequence[SlotRows], positions: Indices | None = None) -> Fence:
        indices = [addresses for _, addresses in wanted]
        joined = [] if positions is None else [positions]
        left = self._cache.staging.leave([*indices, *joined])
        targets = [
            self._target(slots, addresses, left[-1] if joined else None)
            for (slots, _), addresses in zip(wanted, left, strict=False)
        ]
        self._kernels.gather(targets, self._unit, grain_bytes=self._grain)
        fence = Fence(self._device)
        self._cache.staging.protect(fence)
        return fence

    def _target(self, slots: Slots, addresses: Tensor, positions: Tensor | None) -> Any:
        assert slots.pool.dtype == self._cache.page.dtype
        columns = self._kernels.head_columns(slots.pool, slots.heads, self._unit)
        head_groups = columns.offsets.numel() // addresses.shape[1]
        return self._kernels.Target(
            slots.pool, columns, addresses, slots.rows, positions, head_groups
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
