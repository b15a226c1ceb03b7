"""Takes the wanted rows of a span from where they stand: device cache, host cache, area.

Stage: load. `RowGatherer` is the contract: `IndexedGatherer` indexes tensors, tier by tier, on any
device; `KernelGatherer` lets one kernel read all three places, those in pinned CPU memory over the
bus, and is what a GPU uses. tests/unit/triton/test_paths.py compares them.
"""

from __future__ import annotations

import math
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
from impress_sglang.transfer.area import PooledMemory
from impress_sglang.transfer.planner import GroupPart, SpanRead


class RowGatherer(Protocol):
    """The contract.

    Implementations must not change what they read from, and must have rows bit for bit.
    """

    def gather(self, read: SpanRead, memory: PooledMemory | None) -> list[Tensor]:
        """The wanted rows of each part of a read.

        Args:
            read: of keys, of values, or of both.
            memory: of the area of the layer; None if nothing is taken from SSD.

        Returns:
            For each part [n, heads * dim] on the device of the cache, in the order of `read.rows`.
        """
        ...


def make_gatherer(cache: ChunkCache) -> RowGatherer:
    """What fits the device of the cache."""
    return KernelGatherer(cache) if cache.device.type == "cuda" else IndexedGatherer(cache)


class IndexedGatherer:
    """Tensor indexing, tier by tier."""

    def __init__(self, cache: ChunkCache) -> None:
        self._cache = cache

    def gather(self, read: SpanRead, memory: PooledMemory | None) -> list[Tensor]:
        """See `RowGatherer`."""
        return [self._gather_part(read, part, memory) for part in read.parts]

    def _gather_part(self, read: SpanRead, part: GroupPart, memory: PooledMemory | None) -> Tensor:
        plan, device = read.rows, self._cache.device
        assert plan is not None
        found = [tier for tier, chunks in enumerate(part.chunks_by_tier) if chunks]
        if len(found) == 1:
            own = self._gather_tier(part, found[0], plan.lanes, plan.rows, memory)
            return own.to(device)
        chunks = part.group.chunks_of_rows(plan.lanes, plan.rows)
        tier_of_row = part.tiers[part.place_of_chunk()[chunks]]
        chosen = [np.flatnonzero(tier_of_row == tier) for tier in found]
        by_tier = [
            self._gather_tier(part, tier, plan.lanes[rows], plan.rows[rows], memory).to(device)
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
        lanes: Indices,
        rows: Indices,
        memory: PooledMemory | None,
    ) -> Tensor:
        """Rows [n, heads * dim] that stand in one tier, where it is."""
        group, page = part.group, self._cache.page
        if tier == Tier.SSD:
            assert memory is not None
            vector = math.gcd(group.row_bytes, BLOCK_BYTES)
            first = (group.row_offsets(lanes, rows) + group.start) // vector
            index = _vector_index(first, group.row_bytes // vector)
            vectors = memory.vectors(page.dtype, vector)
            return vectors.index_select(0, index).view(len(rows), -1)
        pages = part.pages[part.place_of_chunk()[group.chunks_of_rows(lanes, rows)]]
        width = page.row_vectors_of(group.heads * group.head_dim)
        return self._cache.read_rows(tier, pages, rows % group.chunk_rows, width)


def _vector_index(first: Indices, count: int) -> Tensor:
    """The numbers of `count` neighbouring vectors from each first one on, one after another."""
    if count == 1:
        return torch.from_numpy(first)
    return torch.from_numpy((first[:, None] + np.arange(count)).reshape(-1))


class KernelGatherer:
    """One launch for keys and values, which reads all tiers."""

    def __init__(self, cache: ChunkCache) -> None:
        # Only where it is used: Triton is not needed on a CPU.
        from impress_sglang.triton import gather

        self._kernels = gather
        self._cache = cache
        page = cache.page
        # A vector of the kernel: the largest that rows, pages and blocks are made of.
        size = page.dtype.itemsize
        self._unit = math.gcd(page.unit * size, BLOCK_BYTES) // size
        space = gather.Space
        spaces = {Tier.SSD: space.STAGING, Tier.HOST: space.HOST, Tier.DEVICE: space.DEVICE}
        numbers = np.array([spaces[tier] for tier in Tier], np.int64)
        self._space_of_tier = gather.pack_index(numbers, np.zeros(len(Tier), np.int64))

    def gather(self, read: SpanRead, memory: PooledMemory | None) -> list[Tensor]:
        """See `RowGatherer`; nothing is waited for: see `Fence`."""
        cache, plan = self._cache, read.rows
        assert plan is not None
        found, indices = [], []
        for part in read.parts:
            index = self._index(read, part).reshape(len(plan.rows), -1)
            indices.append(self._on_device(index))
            size = (*index.shape, self._unit)
            found.append(torch.empty(size, dtype=cache.page.dtype, device=cache.device))
        self._kernels.gather_layer(found, indices, self._spaces(memory))
        fence = Fence(cache.device)
        cache.note_reading(fence)
        if memory is not None:
            memory.fence = fence
        return [rows.view(len(plan.rows), -1) for rows in found]

    def _index(self, read: SpanRead, part: GroupPart) -> Indices:
        """Where each vector of each row is, for the kernel: int64 [n * vectors of a row]."""
        plan, group, page = read.rows, part.group, self._cache.page
        assert plan is not None
        size, finer = page.dtype.itemsize, page.unit // self._unit
        return loops.vector_index(
            plan.lanes,
            plan.rows,
            part.tiers,
            part.place_of_chunk(),
            part.pages,
            group.chunks,
            group.chunk_rows,
            group.heads * group.head_dim // self._unit,
            page.page_vectors * finer,
            self._unit * size,
            group.start,
            group.stream_bytes,
            group.stride,
            self._space_of_tier,
        )

    def _on_device(self, index: Indices) -> Tensor:
        on_cpu = torch.from_numpy(index)
        if self._cache.device.type != "cuda":
            return on_cpu
        return on_cpu.pin_memory().to(self._cache.device, non_blocking=True)

    def _spaces(self, memory: PooledMemory | None) -> Any:
        cache, unit = self._cache, self._unit
        nothing = torch.empty(0, unit, dtype=cache.page.dtype, device=cache.device)
        vector_bytes = unit * cache.page.dtype.itemsize
        return self._kernels.Spaces(
            device=cache.vectors(Tier.DEVICE, unit),
            host=cache.vectors(Tier.HOST, unit),
            staging=(nothing if memory is None else memory.vectors(cache.page.dtype, vector_bytes)),
        )
