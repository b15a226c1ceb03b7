"""Layer buffers: memory for images of a layer of some segments, filled block by block.

A block has the same offset in its image as in its layer on disk, so that blocks read ahead, blocks
read now and the rows taken out need no copies. Areas are pooled: fresh memory costs as much as
reading.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from impress_sglang.errors import StoreUnavailable
from impress_sglang.loops.types import Indices
from impress_sglang.storage.files import AlignedMemory
from impress_sglang.storage.layout import BLOCK_BYTES, round_up
from impress_sglang.storage.reader import PendingRead
from impress_sglang.storage.segment import OpenSegment
from impress_sglang.tiers.copying import Fence, pin_memory

_GRAIN = 1 << 20
_NO_READ = -1


class PooledMemory(AlignedMemory):
    """Memory of an area, also viewed as blocks."""

    def __init__(self, num_bytes: int, *, pin: bool = False) -> None:
        """`pin` locks it, so that an accelerator can read it by itself."""
        super().__init__(num_bytes)
        self.num_bytes = num_bytes
        self.fence: Fence | None = None
        """A device may read the memory until this fence is done."""
        if pin:
            pin_memory(self)
        self.blocks = torch.frombuffer(self.view, dtype=torch.uint8).view(-1, BLOCK_BYTES)
        """uint8 [blocks, BLOCK_BYTES]."""


class BufferPool:
    """At most `limit_bytes` of areas: open ones, closed ones that are still being filled or read
    by a device, and free ones kept for reuse.

    Reading ahead first checks for room. Memory that a layer cannot do without is always found:
    other areas are taken away, the latest first, and read again if necessary. One thread uses a
    pool.
    """

    def __init__(self, limit_bytes: int, *, pin: bool = False) -> None:
        """`pin` locks the memory, so that an accelerator can read it by itself."""
        self.limit_bytes = limit_bytes
        self._pin = pin
        self.used_bytes = 0
        self._open: dict[PooledMemory, Callable[[], None]] = {}
        self._free: list[PooledMemory] = []
        self._draining: list[tuple[PooledMemory, list[PendingRead]]] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of all memory of the pool."""
        return (
            self.used_bytes + self._draining_bytes + sum(memory.num_bytes for memory in self._free)
        )

    def size_of(self, num_bytes: int) -> int:
        """Bytes of the pool that an area for `num_bytes` takes."""
        return round_up(num_bytes, _GRAIN)

    def has_room(self, num_bytes: int) -> bool:
        """Whether areas of `num_bytes` (see `size_of`) fit in addition to the open ones."""
        self._collect()
        return self.used_bytes + self._draining_bytes + num_bytes <= self.limit_bytes

    def take(self, num_bytes: int, evict: Callable[[], None]) -> PooledMemory | None:
        """Take memory of at least `num_bytes`; `evict` gives it back immediately, for another area.

        Returns None if evicting other areas does not free enough.
        """
        size = self.size_of(num_bytes)
        for evict_other in reversed(list(self._open.values())):
            if self.used_bytes + size <= self.limit_bytes:
                break
            evict_other()
        if self.used_bytes + size > self.limit_bytes or not self._drain(size):
            return None
        memory = self._free_memory(size)
        if memory is None:
            while self._free and self.held_bytes + size > self.limit_bytes:
                self._free.pop(0)
            memory = PooledMemory(size, pin=self._pin)
        self.used_bytes += memory.num_bytes
        self._open[memory] = evict
        return memory

    def put_back(self, memory: PooledMemory, reads: list[PendingRead]) -> None:
        """Take memory back; `reads` may still be filling it."""
        del self._open[memory]
        self.used_bytes -= memory.num_bytes
        self._draining.append((memory, reads))
        self._collect()

    def close(self) -> None:
        """Free all memory once no device reads it."""
        for memory, _ in self._draining:
            if memory.fence is not None:
                memory.fence.wait()
        self._free.clear()
        self._draining.clear()

    @property
    def _draining_bytes(self) -> int:
        return sum(memory.num_bytes for memory, _ in self._draining)

    def _drain(self, size: int) -> bool:
        """Wait until `size` more bytes fit; False if reads that must end first time out."""
        self._collect()
        while self.used_bytes + self._draining_bytes + size > self.limit_bytes:
            memory, reads = self._draining[0]
            if not all(read.wait_idle() for read in reads):
                return False
            if memory.fence is not None:
                memory.fence.wait()
            self._collect()
        return True

    def _free_memory(self, size: int) -> PooledMemory | None:
        """The smallest free area that is large enough, and not far too large."""
        max_bytes = min(2 * size, self.limit_bytes - self.used_bytes - self._draining_bytes)
        fitting = [memory for memory in self._free if size <= memory.num_bytes <= max_bytes]
        memory = min(fitting, key=lambda memory: memory.num_bytes, default=None)
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
    """Blocks of a layer of some segments that were read for a source.

    It has one part for each segment, one after another. Wanted blocks are int64 [n], ascending,
    numbered through all parts.
    """

    def __init__(
        self,
        parts: Sequence[tuple[OpenSegment, int, int]],
        pool: BufferPool,
        evict: Callable[[], None],
    ) -> None:
        """`parts`: segment, offset and num_bytes of each part in the segment's file.

        `evict` closes it when others need its memory, which it takes when it first reads.
        """
        sizes = (num_bytes // BLOCK_BYTES for _, _, num_bytes in parts)
        self.firsts = list(itertools.accumulate(sizes, initial=0))
        """The first block of each part, and the number of all blocks."""
        self.memory: PooledMemory | None = None
        self.ahead_bytes = 0
        self.ahead_used_bytes = 0
        self.reads: list[PendingRead] = []
        """All reads into the memory, in the order in which they were submitted."""
        self._parts, self._pool, self._evict = parts, pool, evict
        # For each block, the number of the read that loads it.
        self._owner = np.full(self.firsts[-1], _NO_READ, np.int16)
        self._wanted = np.zeros(len(self._owner), np.bool_)

    def read_ahead(self, wanted: Indices) -> int:
        """Begin to read blocks that will probably be wanted; returns and raises as `read`."""
        return self._submit(wanted, ahead=True)

    def read(self, wanted: Indices, *, last: bool = True) -> int:
        """Begin to read the missing wanted blocks; returns their number of bytes.

        `last`: whether this is the layer's last request; all its blocks are known then, and reads
        ahead that have not begun are cancelled. Earlier requests cancel only reads ahead of wanted
        blocks, because these are waited for now. It raises `StoreUnavailable` if there is no
        memory, because reads into it do not end.
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
        return self._submit(wanted, ahead=False)

    def wait(self, wanted: Indices) -> None:
        """Wait for the wanted blocks, all of which must be submitted, and verify them.

        It raises `PrefixUnreadable` if a read of them failed, or a block is corrupt.
        """
        nobody, *sources = self._brought(wanted).tolist()
        assert not nobody, "a block was not asked for"
        for read, brings in zip(self.reads, sources, strict=True):
            if brings:
                # The first error ends it: each read of a device that has stopped is waited for.
                read.wait()
        for segment, offset, blocks in self._of_parts(wanted):
            assert self.memory is not None
            segment.check_blocks(self.memory, offset, blocks)

    def close(self) -> None:
        """Give the memory back, and cancel reads that have not begun."""
        self._stop_reading_ahead(range(len(self.reads)))
        self.ahead_bytes = sum(read.num_bytes for read in self.reads if read.ahead)
        if self.memory is not None:
            self._pool.put_back(self.memory, self.reads)

    def _of_parts(self, blocks: Indices) -> Iterator[tuple[OpenSegment, int, Indices]]:
        """For each part with some of these blocks: its segment, the offset in its file at which the
        memory would begin, and these blocks."""
        edges = itertools.pairwise(np.searchsorted(blocks, self.firsts).tolist())
        parts = zip(self._parts, self.firsts[:-1], edges, strict=True)
        for (segment, offset, _), first, (start, stop) in parts:
            if start < stop:
                yield segment, offset - first * BLOCK_BYTES, blocks[start:stop]

    def _brought(self, blocks: Indices) -> Indices:
        """Number of these blocks that each read loads, int64 [1 + reads]; first: without a read."""
        return np.bincount(1 + self._owner[blocks], minlength=1 + len(self.reads))

    def _stop_reading_ahead(self, numbers: Iterable[int]) -> None:
        """Cancel those of these reads that read ahead, as far as they have not begun."""
        for number in numbers:
            read = self.reads[number]
            if read.ahead and not read.done:
                starts, stops = read.segment.reader.cancel(read)
                for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                    owners = self._owner[start // BLOCK_BYTES : stop // BLOCK_BYTES]
                    owners[owners == number] = _NO_READ

    def _forget_failed(self) -> None:
        """Forget failed reads ahead: their blocks are read again when wanted, and may succeed."""
        for number, read in enumerate(self.reads):
            if read.ahead and read.done and read.error is not None:
                self._owner[self._owner == number] = _NO_READ

    def _submit(self, wanted: Indices, *, ahead: bool) -> int:
        """Submit reads of the missing blocks, if any; returns their number of bytes."""
        num_bytes = 0
        for segment, offset, missing in self._of_parts(wanted[self._owner[wanted] == _NO_READ]):
            if self.memory is None:
                self.memory = self._pool.take(self.firsts[-1] * BLOCK_BYTES, self._evict)
            if self.memory is None:
                raise StoreUnavailable(segment.segment_id, "all buffers wait for the device")
            self._owner[missing] = len(self.reads)
            # A gap that costs less to read than to skip is read through. Another read may load the
            # same bytes there.
            gap_blocks = 0 if ahead else segment.reader.cost.gap_bytes // BLOCK_BYTES
            last = np.flatnonzero(np.diff(missing) > 1 + gap_blocks)
            starts = missing[np.append(0, last + 1)] * BLOCK_BYTES
            stops = (missing[np.append(last, -1)] + 1) * BLOCK_BYTES
            where = segment, self.memory, offset
            self.reads.append(segment.reader.submit(*where, starts, stops, ahead=ahead))
            num_bytes += self.reads[-1].num_bytes
        return num_bytes
