"""Areas and their pool: what is read into them, by whom it is counted, and when memory is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.loops.types import Indices
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import OpenSegment
from impress_sglang.transfer.buffers import BufferPool, LayerBuffer, PooledMemory, Tenant
from tests.faults import FaultyFileSystem, Rule
from tests.unit.kv_factory import flip_byte, make_info, make_shape, random_kvs, write_kvs
from tests.unit.source_factory import BLOCK
from tests.unit.step_engine import Step, StepEngine, reading, stepping
from tests.unit.waiting import wait_until

MIB = 1 << 20


def take(pool: BufferPool, num_bytes: int, owner: object = None) -> PooledMemory:
    """Memory that nobody takes away."""
    memory = pool.take(num_bytes, Tenant(owner, lambda: None))
    assert memory is not None
    return memory


def these(*blocks: int) -> Indices:
    return np.array(sorted(blocks), np.int64)


def is_quiet(buffer: LayerBuffer) -> bool:
    return all(read.done for read in buffer.reads)


class Stored:
    """The second layer of a segment, in areas of a pool."""

    def __init__(self, directory: Path) -> None:
        shape = make_shape(layers=2, query_heads=2, key_dim=64, value_dim=64)
        info = make_info(shape, range(120))
        self.path = write_kvs(directory, info, *random_kvs(shape, 120, seed=1))
        self.segment = OpenSegment(self.path, FileSystem(), direct=False)
        layout = self.segment.layout
        self.offset = layout.layer_offset(1)
        self.content = self.path.read_bytes()[self.offset :][: layout.layer_bytes(0)]
        self.blocks = layout.layer_bytes(0) // BLOCK
        self.pool = BufferPool(32 * MIB)

    def buffer(self) -> LayerBuffer:
        size, owner = self.blocks * BLOCK, Tenant(object(), lambda: None)
        buffer = LayerBuffer(self.segment, self.offset, size, self.pool, owner)
        buffer.memory.view[:] = b"\xee" * len(buffer.memory)
        return buffer

    def check(self, buffer: LayerBuffer, *blocks: int) -> None:
        """These blocks stand where they stand in the layer."""
        for block in blocks:
            place = slice(block * BLOCK, (block + 1) * BLOCK)
            assert buffer.memory.view[place] == self.content[place], block

    def started(self, engine: StepEngine) -> list[int]:
        """Blocks of the layer in the order in which they were read."""
        return [(offset - self.offset) // BLOCK for _, offset, _ in engine.started]


@pytest.fixture
def stored(tmp_path: Path, single_blocks: None) -> Iterator[Stored]:
    stored = Stored(tmp_path)
    assert stored.blocks >= 30
    yield stored
    stored.segment.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_damage_is_told_to_who_wants_it(stored: Stored, ahead: bool) -> None:
    """Nothing that is wanted is in flight any more when it is told."""
    flip_byte(stored.path, stored.offset + 5 * BLOCK + 77)
    with reading() as reader:
        buffer, wanted = stored.buffer(), these(4, 5, 6, 20, 21)
        if ahead:
            buffer.read_ahead(these(4, 5, 6), reader)
            wait_until(lambda: is_quiet(buffer))
        buffer.read(wanted, 0, reader)
        with pytest.raises(SegmentUnreadable, match=f"block at {stored.offset + 5 * BLOCK} "):
            buffer.wait(wanted)

        assert all(read.done for read in buffer.reads)
        buffer.read(these(8), 0, reader)
        buffer.wait(these(8))
        buffer.close(reader)


def test_what_could_not_be_read_ahead_is_read_when_it_is_wanted(stored: Stored) -> None:
    """The disk answers again: who was under way when it failed must not say it had not."""
    files = FaultyFileSystem()
    reader = BlockReader(4, files)
    buffer, wanted = stored.buffer(), these(4, 5, 6, 20)
    with files.faults.injected(Rule("EIO", "block")):
        buffer.read_ahead(these(4, 5, 6, 7), reader)
        wait_until(lambda: is_quiet(buffer))

    buffer.read(wanted, 0, reader)
    buffer.wait(wanted)

    stored.check(buffer, 4, 5, 6, 20)
    buffer.close(reader)
    reader.close()


def test_memory_is_not_given_again_while_it_is_filled(stored: Stored, step: Step) -> None:
    reader, engine = step
    buffer = stored.buffer()
    memory, size = buffer.memory, len(buffer.memory)
    buffer.read(these(1, 2), 0, reader)
    engine.wait_started(2)

    buffer.close(reader)
    assert stored.pool.used_bytes == 0
    others = [take(stored.pool, size) for _ in range(3)]
    assert all(other is not memory for other in others)
    engine.allow(1)
    assert take(stored.pool, size) is not memory
    engine.allow()
    wait_until(lambda: is_quiet(buffer))

    assert take(stored.pool, size) is memory
    stored.check(buffer, 1, 2)


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_reads(stored: Stored, seed: int) -> None:
    """Wanted blocks are there, no block is read twice, and every byte is counted once."""
    random = np.random.default_rng(seed)
    gap = int(random.choice([0, 0, 2 * BLOCK]))
    with stepping(4) as (reader, engine):
        buffer, counted, wanted_ever = stored.buffer(), 0, np.zeros(stored.blocks, np.bool_)
        for _ in range(8):
            blocks = random.random(stored.blocks) < random.choice([0.1, 0.5])
            if random.random() < 0.6:
                buffer.read_ahead(np.flatnonzero(blocks), reader)
                engine.allow(int(random.integers(0, 6)))
            else:
                # A layer wants a block once.
                blocks &= ~wanted_ever
                wanted_ever |= blocks
                counted += buffer.read(np.flatnonzero(blocks), gap, reader)
                engine.allow()
                buffer.wait(np.flatnonzero(blocks))
                stored.check(buffer, *np.flatnonzero(blocks).tolist())
                engine.stop()
        engine.allow()
        buffer.close(reader)
        wait_until(lambda: is_quiet(buffer))
        stored.check(buffer, *np.flatnonzero(wanted_ever).tolist())
        assert counted + buffer.ahead_bytes == engine.started_bytes
        assert 0 <= buffer.ahead_used_bytes <= buffer.ahead_bytes
        if not gap:
            started = stored.started(engine)
            assert len(set(started)) == len(started)
            in_vain = set(started) - set(np.flatnonzero(wanted_ever).tolist())
            assert buffer.ahead_bytes - buffer.ahead_used_bytes == len(in_vain) * BLOCK


class Renter:
    """Has memory of a pool until that is taken away."""

    def __init__(self, pool: BufferPool, name: str, log: list[str], owner: object = None) -> None:
        self.pool, self.name, self.log = pool, name, log
        self.owner = name if owner is None else owner
        self.memory: PooledMemory | None = None

    def take(self, num_bytes: int) -> bool:
        self.memory = self.pool.take(num_bytes, Tenant(self.owner, self.evict))
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
    buffer = stored.buffer()
    stored.pool.limit_bytes = len(buffer.memory)
    buffer.read(these(1, 2), 0, step[0])
    step[1].wait_started(2)
    buffer.close(step[0])
    return buffer


def test_memory_that_is_still_filled_is_waited_for(stored: Stored, step: Step) -> None:
    buffer = closed_while_it_is_filled(stored, step)
    assert not stored.pool.has_room(1), "it is not there before the reads have ended"
    waiting = threading.Timer(0.2, step[1].allow)
    waiting.start()

    assert take(stored.pool, len(buffer.memory)) is buffer.memory

    assert is_quiet(buffer)
    waiting.join()


def test_memory_that_a_stopped_device_fills_is_not_waited_for(stored: Stored) -> None:
    with stepping(4, patience=0.2) as step:
        buffer = closed_while_it_is_filled(stored, step)

        with pytest.raises(StoreUnavailable, match="wait for the device"):
            stored.buffer()

        step[1].allow()
        wait_until(lambda: is_quiet(buffer))
        assert take(stored.pool, len(buffer.memory)) is buffer.memory


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
        open_bytes = sum(len(own.memory) for own in renters if own.memory is not None)
        assert pool.used_bytes == open_bytes <= pool.held_bytes <= limit
    pool.close()
