"""Areas and their pool: what is read into them, by whom it is counted, and when memory is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.errors import StoreUnavailable
from impress_sglang.loops.types import Indices
from impress_sglang.storage.reader import BlockReader
from impress_sglang.transfer.buffers import BufferPool, LayerBuffer, PooledMemory
from tests.faults import FaultyFileSystem, Rule
from tests.unit.source_factory import BLOCK
from tests.unit.step_engine import Step, stepping
from tests.unit.test_reader import Stored as StoredFile
from tests.unit.waiting import wait_until

MIB = 1 << 20


def take(pool: BufferPool, num_bytes: int) -> PooledMemory:
    """Memory that nobody takes away."""
    memory = pool.take(num_bytes, lambda: None)
    assert memory is not None
    return memory


def these(*blocks: int) -> Indices:
    return np.array(sorted(blocks), np.int64)


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
    reader, engine = step
    buffer = stored.buffer(reader)
    buffer.read(these(1, 2))
    memory, size = buffer.memory, len(memory_of(buffer))
    engine.wait_started(2)

    buffer.close()
    assert stored.pool.used_bytes == 0
    others = [take(stored.pool, size) for _ in range(3)]
    assert all(other is not memory for other in others)
    engine.allow(1)
    assert take(stored.pool, size) is not memory
    engine.allow()
    wait_until(lambda: is_quiet(buffer))

    assert take(stored.pool, size) is memory
    stored.check_in(buffer, 1, 2)


class Renter:
    """Has memory of a pool until that is taken away."""

    def __init__(self, pool: BufferPool, name: str, log: list[str]) -> None:
        self.pool, self.name, self.log = pool, name, log
        self.memory: PooledMemory | None = None

    def take(self, num_bytes: int) -> bool:
        self.memory = self.pool.take(num_bytes, self.evict)
        return self.memory is not None

    def evict(self) -> None:
        self.log.append(self.name)
        self.give()

    def give(self) -> None:
        assert self.memory is not None
        self.pool.give(self.memory, [])
        self.memory = None


def test_what_others_hold_is_taken_away_the_latest_first() -> None:
    log: list[str] = []
    pool = BufferPool(4 * MIB)
    renters = [Renter(pool, name, log) for name in "abcd"]
    for renter in renters:
        assert renter.take(MIB)
    new = Renter(pool, "e", log)

    assert new.take(2 * MIB)

    assert log == ["d", "c"]
    assert pool.used_bytes == pool.held_bytes == 4 * MIB


def closed_while_it_is_filled(stored: Stored, step: Step) -> LayerBuffer:
    buffer = stored.buffer(step[0])
    buffer.read(these(1, 2))
    stored.pool.limit_bytes = len(memory_of(buffer))
    step[1].wait_started(2)
    buffer.close()
    return buffer


def test_memory_that_is_still_filled_is_waited_for(stored: Stored, step: Step) -> None:
    buffer = closed_while_it_is_filled(stored, step)
    assert not stored.pool.has_room(1), "it is not there before the reads have ended"
    waiting = threading.Timer(0.2, step[1].allow)
    waiting.start()

    assert take(stored.pool, len(memory_of(buffer))) is buffer.memory

    assert is_quiet(buffer)
    waiting.join()


def test_memory_that_a_stopped_device_fills_is_not_waited_for(stored: Stored) -> None:
    with stepping(4, patience=0.2) as step:
        buffer = closed_while_it_is_filled(stored, step)

        with pytest.raises(StoreUnavailable, match="wait for the device"):
            stored.buffer(step[0]).read(these(1))

        step[1].allow()
        wait_until(lambda: is_quiet(buffer))
        assert take(stored.pool, len(memory_of(buffer))) is buffer.memory


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 5 * MIB)), max_size=60)


@given(limit=st.integers(5 * MIB, 12 * MIB), steps=STEPS)
def test_no_more_memory_is_held_than_the_limit(
    limit: int, steps: list[tuple[bool, int, int]]
) -> None:
    """And who must have some gets it, if others do with less."""
    pool, log = BufferPool(limit), list[str]()
    renters = [Renter(pool, str(number), log) for number in range(6)]
    for wants, number, num_bytes in steps:
        renter = renters[number]
        if renter.memory is not None:
            renter.give()
        elif wants:
            assert renter.take(num_bytes)
        open_bytes = sum(len(renter.memory) for renter in renters if renter.memory is not None)
        assert pool.used_bytes == open_bytes <= pool.held_bytes <= limit
    pool.close()
