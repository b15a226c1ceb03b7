"""Layer buffers: memory that holds an image of a layer of a segment, filled block by block.

A block is placed in its area as in its layer on disk, so that blocks read ahead, blocks read now
and the rows taken out need no copies. Areas are pooled: fresh memory costs as much as reading.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from impress_sglang.errors import PrefixUnreadable, StoreUnavailable
from impress_sglang.loops.types import Indices
from impress_sglang.storage.files import AlignedMemory
from impress_sglang.storage.layout import BLOCK_BYTES, round_up
from impress_sglang.storage.reader import PendingRead
from impress_sglang.storage.segment import OpenSegment
from impress_sglang.tiers.copying import Fence, pin_memory

_GRAIN = 1 << 20
_NO_READ = -1


class PooledMemory(AlignedMemory):
    """The memory of an area, also viewed as blocks."""

    def __init__(self, num_bytes: int, *, pin: bool = False) -> None:
        """`pin` locks it, so that an accelerator can read it by itself."""
        super().__init__(num_bytes)
        self.num_bytes = num_bytes
        self.unused_bytes = 0
        """How many of them the present owner did not ask for."""
        self.fence: Fence | None = None
        """A device may read the memory until this fence is done."""
        if pin:
            pin_memory(self)
        self.blocks = torch.frombuffer(self.view, dtype=torch.uint8).view(-1, BLOCK_BYTES)
        """uint8 [blocks, BLOCK_BYTES]."""


class Tenant(NamedTuple):
    """Who uses memory of a pool; memory is never taken from an owner for the same owner."""

    owner: Hashable
    evict: Callable[[], None]
    """Gives the memory back at once."""
    needs: int = 0
    """Bytes that the owner takes of the pool in all, which must fit."""


class BufferPool:
    """At most `limit_bytes` for areas: open ones, closed ones that are still being filled or read
    by a device, and free ones that are kept for later.

    Reading ahead first asks whether there is room. What a layer cannot do without it gets in any
    case: areas of other owners are taken away, the latest first, which read them again if they
    need them. One thread uses a pool.
    """

    def __init__(self, limit_bytes: int, *, pin: bool = False) -> None:
        """`pin` locks the memory, so that an accelerator can read it by itself."""
        self.limit_bytes = limit_bytes
        self._pin = pin
        self.used_bytes = 0
        self._open: dict[PooledMemory, Tenant] = {}
        self._free: list[PooledMemory] = []
        self._draining: list[tuple[PooledMemory, list[PendingRead]]] = []

    @property
    def held_bytes(self) -> int:
        """All memory of the pool."""
        return self.used_bytes + self._draining_bytes + sum(own.num_bytes for own in self._free)

    def size_of(self, num_bytes: int) -> int:
        """Bytes that an area for `num_bytes` takes of the pool."""
        return round_up(num_bytes, _GRAIN)

    def has_room(self, num_bytes: int) -> bool:
        """Whether areas that take so many bytes (see `size_of`) fit beside those that are open."""
        self._collect()
        return self.used_bytes + self._draining_bytes + num_bytes <= self.limit_bytes

    def take(self, num_bytes: int, tenant: Tenant) -> PooledMemory | None:
        """Take memory of at least `num_bytes`; None if not enough can be taken from others."""
        size = self.size_of(num_bytes)
        for other in reversed(list(self._open.values())):
            if self.used_bytes + size <= self.limit_bytes:
                break
            if other.owner != tenant.owner:
                other.evict()
        if self.used_bytes + size > self.limit_bytes or not self._drain(size):
            return None
        memory = self._free_memory(size, tenant)
        if memory is None:
            while self._free and self.held_bytes + size > self.limit_bytes:
                self._free.pop(0)
            memory = PooledMemory(size, pin=self._pin)
        memory.unused_bytes = memory.num_bytes - size
        self.used_bytes += memory.num_bytes
        self._open[memory] = tenant
        return memory

    def give(self, memory: PooledMemory, reads: list[PendingRead]) -> None:
        """Take memory back; `reads` may still be filling it."""
        del self._open[memory]
        self.used_bytes -= memory.num_bytes
        self._draining.append((memory, reads))
        self._collect()

    def close(self) -> None:
        """Forget all memory, when no device reads it."""
        for memory, _ in self._draining:
            if memory.fence is not None:
                memory.fence.wait()
        self._free.clear()
        self._draining.clear()

    @property
    def _draining_bytes(self) -> int:
        return sum(memory.num_bytes for memory, _ in self._draining)

    def _drain(self, size: int) -> bool:
        """Wait until `size` more bytes fit; False if reads that must end first do not in time."""
        self._collect()
        while self.used_bytes + self._draining_bytes + size > self.limit_bytes:
            memory, reads = self._draining[0]
            if not all(read.ended_in_time() for read in reads):
                return False
            if memory.fence is not None:
                memory.fence.wait()
            self._collect()
        return True

    def _free_memory(self, size: int, tenant: Tenant) -> PooledMemory | None:
        room = self.limit_bytes - self.used_bytes - self._draining_bytes
        mine = [own for own, by in self._open.items() if by.owner == tenant.owner]
        # What else the owner needs must still fit beside areas that are larger than it asked for,
        # and beside those of others.
        asked = sum(own.num_bytes - own.unused_bytes for own in mine)
        spare = max(room - (tenant.needs - asked), 0)
        most = min(2 * size, size + spare, room)
        fitting = [own for own in self._free if size <= own.num_bytes <= most]
        memory = min(fitting, key=lambda own: own.num_bytes, default=None)
        if memory is not None:
            self._free.remove(memory)
        return memory

    def _collect(self) -> None:
        waiting = []
        for memory, reads in self._draining:
            if all(read.done for read in reads) and (memory.fence is None or memory.fence.done):
                memory.fence = None
                self._free.append(memory)
            else:
                waiting.append((memory, reads))
        self._draining = waiting


class LayerBuffer:
    """Holds the blocks of a part of a segment's layer that were read for a request.

    Wanted blocks are int64 [n], ascending, counted from the first block of the part.
    """

    def __init__(
        self,
        segment: OpenSegment,
        offset: int,
        num_bytes: int,
        pool: BufferPool,
        tenant: Tenant,
    ) -> None:
        """Take memory for the part [offset, offset + num_bytes) of the file.

        It raises `StoreUnavailable` if there is none, because reads into it do not end.
        """
        memory = pool.take(num_bytes, tenant)
        if memory is None:
            raise StoreUnavailable(segment.segment_id, "all buffers wait for the device")
        self.memory = memory
        self.ahead_bytes = 0
        self.ahead_used_bytes = 0
        self.reads: list[PendingRead] = []
        """All reads into the area, in the order in which they were submitted."""
        self._segment = segment
        self._offset = offset
        self._pool = pool
        # For each block, the number of the read that brings it.
        self._owner = np.full(num_bytes // BLOCK_BYTES, _NO_READ, np.int16)
        self._wanted = np.zeros(len(self._owner), np.bool_)

    def read_ahead(self, wanted: Indices) -> None:
        """Begin to read blocks that will probably be wanted."""
        self._submit(wanted, 0, ahead=True)

    def read(self, wanted: Indices, *, last: bool = True) -> int:
        """Begin to read the wanted blocks that are missing; returns how many bytes that is.

        `last`: this is the layer's last request, so all that it uses is known, and all reading
        ahead that has not begun is cancelled. Before that, only those reads ahead are cancelled
        that would bring wanted blocks, because these are waited for now.
        """
        if any(read.ahead and not read.done for read in self.reads):
            numbers: Iterable[int] = range(len(self.reads))
            if not last:
                numbers = np.flatnonzero(self._brought(wanted)[1:]).tolist()
            self._stop_reading_ahead(numbers)
        self._forget_failed()
        new = wanted[~self._wanted[wanted]]
        self._wanted[new] = True
        for read, count in zip(self.reads, self._brought(new)[1:].tolist(), strict=True):
            self.ahead_used_bytes += count * BLOCK_BYTES if read.ahead else 0
        gap_bytes: int = self._segment.reader.cost.gap_bytes
        return self._submit(wanted, gap_bytes // BLOCK_BYTES, ahead=False)

    def wait(self, wanted: Indices) -> None:
        """Wait until the wanted blocks, all of which must be submitted, are there; verify them.

        It raises `PrefixUnreadable` if a read that brings them failed, or one is corrupt.
        """
        nobody, *found = self._brought(wanted).tolist()
        assert not nobody, "a block was not asked for"
        errors = []
        for read, brings in zip(self.reads, found, strict=True):
            if brings:
                try:
                    read.arrived()
                except PrefixUnreadable as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        self._segment.check_blocks(self.memory, self._offset, wanted)

    def close(self) -> None:
        """Give the memory back, and cancel reads that have not begun."""
        self._stop_reading_ahead(range(len(self.reads)))
        self.ahead_bytes = sum(read.num_bytes for read in self.reads if read.ahead)
        self._pool.give(self.memory, self.reads)

    def _brought(self, blocks: Indices) -> Indices:
        """How many of these blocks each read brings, int64 [1 + reads]; the first: no read."""
        return np.bincount(1 + self._owner[blocks], minlength=1 + len(self.reads))

    def _stop_reading_ahead(self, numbers: Iterable[int]) -> None:
        """Cancel what has not begun of those of these reads that read ahead."""
        for number in numbers:
            read = self.reads[number]
            if read.ahead and not read.done:
                starts, stops = self._segment.reader.cancel(read)
                for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                    own = self._owner[start // BLOCK_BYTES : stop // BLOCK_BYTES]
                    own[own == number] = _NO_READ

    def _forget_failed(self) -> None:
        """Forget failed reads ahead: their blocks are read again when wanted, and may succeed."""
        for number, read in enumerate(self.reads):
            if read.ahead and read.done and read.error is not None:
                self._owner[self._owner == number] = _NO_READ

    def _submit(self, wanted: Indices, gap_blocks: int, *, ahead: bool) -> int:
        """Submit a read of the missing blocks, if any; returns how many bytes that is."""
        missing = wanted[self._owner[wanted] == _NO_READ]
        if not len(missing):
            return 0
        self._owner[missing] = len(self.reads)
        # A gap that costs less to read than to skip is read through. It may hold what another read
        # brings, too: the same bytes.
        last = np.flatnonzero(np.diff(missing) > 1 + gap_blocks)
        starts = missing[np.append(0, last + 1)] * BLOCK_BYTES
        stops = (missing[np.append(last, -1)] + 1) * BLOCK_BYTES
        where = self._segment, self.memory, self._offset
        read: PendingRead = self._segment.reader.submit(*where, starts, stops, ahead=ahead)
        self.reads.append(read)
        return read.num_bytes
