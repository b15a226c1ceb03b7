"""Areas and their pool: what is read into them, by whom it is counted, and when memory is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.errors import StoreUnavailable
from impress_sglang.loops.types import Indices
from impress_sglang.storage.reader import BlockReader, PendingRead
from impress_sglang.transfer.buffers import BufferPool, LayerBuffer, PooledMemory
from tests.faults import FaultyFileSystem, Rule
from tests.unit.kv_factory import BLOCK
from tests.unit.step_engine import Step, stepping
from tests.unit.test_reader import Stored as StoredFile
from tests.unit.waiting import wait_until

MIB = 1 << 20


def these(*blocks: int) -> Indices:
    return np.array(blocks, np.int64)


def memory_of(buffer: LayerBuffer) -> PooledMemory:
    assert buffer.memory is not None
    return buffer.memory


def is_quiet(buffer: LayerBuffer) -> bool:
    return all(read.done for read in buffer.reads)


class Stored(StoredFile):
    """In areas of a pool."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.pool = BufferPool(32 * MIB)

    def buffer(self, reader: BlockReader) -> LayerBuffer:
        self.segment.reader = reader
        part = self.segment, self.offset, self.blocks * BLOCK
        return LayerBuffer([part], self.pool, lambda: None)

    def buffer_that_is_filled(self, step: Step) -> LayerBuffer:
        """Two reads into it have begun."""
        buffer = self.buffer(step[0])
        buffer.read(these(1, 2))
        step[1].wait_started(2)
        return buffer

    def take(self, buffer: LayerBuffer) -> PooledMemory:
        """Memory as large as that of a buffer."""
        memory = self.pool.take(len(memory_of(buffer)), lambda: None)
        assert memory is not None
        return memory

    def check_in(self, buffer: LayerBuffer, *blocks: int) -> None:
        """These blocks stand where they stand in the layer."""
        for block in blocks:
            place = slice(block * BLOCK, (block + 1) * BLOCK)
            assert memory_of(buffer).view[place] == self.content[place], block


@pytest.fixture
def stored(tmp_path: Path, single_blocks: None) -> Iterator[Stored]:
    stored = Stored(tmp_path)
    yield stored
    stored.close()


def test_what_could_not_be_read_ahead_is_read_when_it_is_wanted(stored: Stored) -> None:
    """The disk answers again: who was under way when it failed must not say it had not."""
    files = FaultyFileSystem()
    reader = BlockReader(4, files)
    buffer, wanted = stored.buffer(reader), these(4, 5, 6, 20)
    with files.faults.injected(Rule("EIO", "block")):
        buffer.read_ahead(these(4, 5, 6, 7))
        wait_until(lambda: is_quiet(buffer))

    buffer.read(wanted)
    buffer.wait(wanted)

    stored.check_in(buffer, 4, 5, 6, 20)
    buffer.close()
    reader.close()


def test_memory_is_not_given_again_while_it_is_filled(stored: Stored, step: Step) -> None:
    buffer = stored.buffer_that_is_filled(step)

    buffer.close()
    assert stored.pool.used_bytes == 0
    assert all(stored.take(buffer) is not buffer.memory for _ in range(3))
    step[1].allow(1)
    assert stored.take(buffer) is not buffer.memory
    step[1].allow()
    wait_until(lambda: is_quiet(buffer))

    assert stored.take(buffer) is buffer.memory
    stored.check_in(buffer, 1, 2)


def test_memory_that_is_still_filled_is_waited_for(stored: Stored, step: Step) -> None:
    buffer = stored.buffer_that_is_filled(step)
    stored.pool.limit_bytes = len(memory_of(buffer))
    buffer.close()
    assert not stored.pool.has_room(1), "it is not there before the reads have ended"
    waiting = threading.Timer(0.2, step[1].allow)
    waiting.start()

    assert stored.take(buffer) is buffer.memory

    assert is_quiet(buffer)
    waiting.join()


def test_memory_that_a_stopped_device_fills_is_not_waited_for(stored: Stored) -> None:
    with stepping(4, patience=0.2) as step:
        buffer = stored.buffer_that_is_filled(step)
        stored.pool.limit_bytes = len(memory_of(buffer))
        buffer.close()

        with pytest.raises(StoreUnavailable, match="wait for the device"):
            stored.buffer(step[0]).read(these(1))

        step[1].allow()
        wait_until(lambda: is_quiet(buffer))
        assert stored.take(buffer) is buffer.memory


def test_of_many_reads_of_a_stopped_device_one_is_waited_for(stored: Stored, step: Step) -> None:
    """There is one for each segment of a prefix, and each wait takes a while."""
    buffer = stored.buffer(step[0])
    for block in range(9):
        buffer.read(these(block))

    failure = pytest.raises(StoreUnavailable, match="does not answer")
    with mock.patch.object(PendingRead, "wait_idle", return_value=False) as wait, failure:
        buffer.wait(these(*range(9)))
    assert wait.call_count == 1

    buffer.close()


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5 * MIB)), max_size=60)


@given(limit=st.integers(5 * MIB, 12 * MIB), steps=STEPS)
def test_no_more_memory_is_held_than_the_limit(limit: int, steps: list[tuple[int, int]]) -> None:
    """And who must have some gets it: it is taken away from others, the latest first."""
    pool, held = BufferPool(limit), dict[int, PooledMemory]()
    for who, num_bytes in steps:
        if who in held:
            pool.put_back(held.pop(who), [])
            continue
        free, kept = limit - pool.size_of(num_bytes), list(held)
        while sum(len(held[other]) for other in kept) > free:
            kept.pop()
        memory = pool.take(num_bytes, lambda who=who: pool.put_back(held.pop(who), []))
        assert memory is not None and list(held) == kept
        held[who] = memory
        assert pool.used_bytes == sum(map(len, held.values())) <= pool.held_bytes <= limit
    pool.close()
