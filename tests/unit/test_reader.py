"""The reader: what arrives, in which order, what is cancelled, and what is said of damage."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.storage import reader as reader_module
from impress_sglang.storage.engines import Integers, ThreadEngine, read_exactly
from impress_sglang.storage.files import AlignedMemory, FileSystem
from impress_sglang.storage.reader import BlockReader
from impress_sglang.storage.segment import OpenSegment
from tests.faults import FaultyFileSystem, Rule
from tests.unit import step_engine as steps
from tests.unit.kv_factory import BLOCK, make_info, make_shape, random_kvs, write_kvs
from tests.unit.step_engine import Step, StepEngine
from tests.unit.waiting import wait_until


class Stored:
    """A segment of `blocks` blocks behind its header, and memory for them."""

    def __init__(self, directory: Path, *, name: str = "ab12", direct: bool = False) -> None:
        shape = make_shape(layers=1, query_heads=2, kv_heads=2, key_dim=64, value_dim=64)
        info = make_info(shape, range(240), segment_id=name)
        kvs = random_kvs(shape, 240, seed=len(name))
        self.path = write_kvs(directory, info, *kvs, direct=direct)
        self.segment = OpenSegment(self.path, FileSystem(), direct=direct)
        self.offset = self.segment.layout.layer_offset(0)
        self.content = self.path.read_bytes()[self.offset :]
        self.blocks = len(self.content) // BLOCK
        self.memory = AlignedMemory(len(self.content))
        self.memory.view[:] = b"\xee" * len(self.memory)

    def runs(self, *runs: tuple[int, int]) -> tuple[Any, ...]:
        """Runs of blocks (first, stop), for `submit`."""
        starts, stops = np.array(runs, np.int64).reshape(-1, 2).T * BLOCK
        return self.segment, self.memory, self.offset, starts, stops

    def read(self, reader: BlockReader, *runs: tuple[int, int]) -> int:
        read = reader.submit(*self.runs(*runs))
        read.wait()
        return read.num_bytes

    def check(self, *runs: tuple[int, int]) -> None:
        """These blocks are there, and the memory of all others is untouched."""
        wanted = {block for run in runs for block in range(*run)}
        for block in range(self.blocks):
            place = slice(block * BLOCK, (block + 1) * BLOCK)
            expected = self.content[place] if block in wanted else b"\xee" * BLOCK
            assert self.memory.view[place] == expected, block

    def close(self) -> None:
        self.segment.close()


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    stored = Stored(tmp_path)
    assert stored.blocks >= 60
    yield stored
    stored.close()


@pytest.fixture(params=["auto", "threads"])
def reader(request: pytest.FixtureRequest) -> Iterator[BlockReader]:
    with steps.reading(4, request.param) as reader:
        yield reader


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("piece", [BLOCK, 3 * BLOCK, 256 << 10])
def test_runs_are_filled_and_nothing_else(
    reader: BlockReader, tmp_path: Path, direct: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if direct and not FileSystem().supports_direct_io(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    monkeypatch.setattr(reader_module, "PIECE_BYTES", piece)
    stored = Stored(tmp_path, direct=direct)
    runs = [(0, 1), (3, 10), (11, 12), (20, 47), (stored.blocks - 2, stored.blocks)]

    read = reader.submit(*stored.runs(*runs))
    read.wait()

    assert read.done and read.num_bytes == sum(stop - first for first, stop in runs) * BLOCK
    stored.check(*runs)
    stored.close()


@pytest.mark.usefixtures("single_blocks")
def test_what_is_waited_for_overtakes_what_is_read_ahead(step: Step, stored: Stored) -> None:
    """Reads ahead have half of the queue; what is waited for takes all that is free."""
    reader, engine = step
    ahead = reader.submit(*stored.runs((0, 6)), ahead=True)
    engine.wait_started(2)
    needs = reader.submit(*stored.runs((30, 36)))
    assert engine.in_flight == 2, "as many as reading ahead may have"

    for begun in range(5, 9):
        engine.allow(1)
        engine.wait_started(begun)
    engine.allow()
    needs.wait()
    ahead.wait()

    order = [(offset - stored.offset) // BLOCK for _, offset, _ in engine.started]
    assert order[:8] == [0, 1, 30, 31, 32, 33, 34, 35]
    assert order[8:] == [2, 3, 4, 5]
    stored.check((0, 6), (30, 36))


def listed(rest: tuple[Integers, Integers]) -> list[int]:
    """The blocks of what was cancelled."""
    return [
        block
        for start, stop in zip(*map(np.ndarray.tolist, rest), strict=True)
        for block in range(start // BLOCK, stop // BLOCK)
    ]


@pytest.mark.usefixtures("single_blocks")
def test_a_cancelled_read_brings_what_was_begun(step: Step, stored: Stored) -> None:
    reader, engine = step
    read = reader.submit(*stored.runs((0, 2), (7, 9), (13, 16)), ahead=True)
    engine.wait_started(2)
    engine.allow(1)
    engine.wait_started(3)

    rest = reader.cancel(read)

    assert listed(rest) == [8, 13, 14, 15]
    assert read.num_bytes == 3 * BLOCK and not read.done
    assert listed(reader.cancel(read)) == []
    engine.allow()
    read.wait()
    assert read.done
    stored.check((0, 2), (7, 8))
    # And the reader goes on.
    assert stored.read(reader, (13, 16)) == 3 * BLOCK
    stored.check((0, 2), (7, 8), (13, 16))
    assert len(engine.started) == 6


@pytest.mark.usefixtures("single_blocks")
@pytest.mark.parametrize("seed", range(8))
def test_many_threads_read_and_cancel(reader: BlockReader, tmp_path: Path, seed: int) -> None:
    """What a cancelled read gave up is untouched, and all else is there."""
    several = [Stored(tmp_path, name=f"{seed}{'x' * n}") for n in range(4)]

    def work(number: int) -> None:
        file, random = several[number], np.random.default_rng(10 * seed + number)
        expected = set()
        for part in range(6):
            first = 10 * part
            read = reader.submit(*file.runs((first, first + 3), (first + 4, first + 9)), ahead=True)
            time.sleep(float(random.choice([0.0, 0.0, 1e-4, 1e-3])))
            rest = set(listed(reader.cancel(read)))
            file.read(reader, (first + 9, first + 10))
            read.wait()
            kept = {first, first + 1, first + 2, *range(first + 4, first + 10)} - rest
            assert read.num_bytes == (len(kept) - 1) * BLOCK
            expected |= kept
        file.check(*((block, block + 1) for block in expected))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for file in several:
        file.close()


@pytest.mark.parametrize("left", [7 * BLOCK + 100, -BLOCK])
@pytest.mark.parametrize("piece", [BLOCK, 256 << 10])
def test_a_file_that_ends_early_is_found(
    reader: BlockReader, tmp_path: Path, left: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So much behind its header is left; nothing else is hurt."""
    monkeypatch.setattr(reader_module, "PIECE_BYTES", piece)
    stored, good = Stored(tmp_path), Stored(tmp_path, name="good")
    os.truncate(stored.path, stored.offset + left)

    reads = [reader.submit(*stored.runs(run)) for run in ((5, 9), (7, 8))]
    other = reader.submit(*good.runs((3, 6)))
    for read in (*reads, reads[0]):
        with pytest.raises(SegmentUnreadable) as caught:
            read.wait()
        assert caught.value.segment_id == "ab12" and read.done

    other.wait()
    if left > 0:
        assert stored.read(reader, (0, 7)) == 7 * BLOCK
    stored.close()
    good.close()


@pytest.mark.usefixtures("single_blocks")
def test_a_read_that_ended_early_is_completed(stored: Stored) -> None:
    """A system may give fewer bytes than there are; the rest is read, and all of it verified."""

    class Hasty(StepEngine):
        def finish(self, at_least: int = 1) -> tuple[Integers, Integers]:
            numbers, _ = super().finish()
            return numbers, np.array([int(numbers[0]) % 4096])

    engine = Hasty(3)
    engine.allow()
    with steps.with_engine(engine) as (reader, _):
        stored.read(reader, (0, 9))
        stored.check((0, 9))


@pytest.mark.usefixtures("single_blocks")
@pytest.mark.parametrize("hung", [1, 9])
@pytest.mark.parametrize("others", [0, 3])
def test_reads_that_hang_delay_no_others(stored: Stored, hung: int, others: int) -> None:
    """Neither those that begin with them, nor those that come when nothing else is in flight."""
    going = threading.Event()

    def read(descriptor: int, offset: int, target: memoryview) -> None:
        assert offset < stored.offset + 20 * BLOCK or going.wait(60.0)
        read_exactly(descriptor, offset, target)

    engine = ThreadEngine(16, read, 16)
    with contextlib.closing(BlockReader(16, steps.OneEngine(engine))) as reader:
        with_others = reader.submit(*stored.runs((20 - others, 20 + hung)))
        wait_until(lambda: with_others.in_flight == hung or others)
        later = [reader.submit(*stored.runs((block, block + 1))) for block in range(3)]
        done = [read.ended.wait(30.0) for read in later]
        going.set()
        with_others.wait()
    assert all(done)
    stored.check((0, 3), (20 - others, 20 + hung))


def test_a_device_that_answers_again_is_waited_for_anew(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while reads of the time before hang: what begins now may take longer than one look."""
    now = [1000.0]
    monkeypatch.setattr(reader_module, "time", mock.Mock(wraps=time, monotonic=lambda: now[0]))
    with steps.stepping(4, patience=100.0) as (reader, engine):
        hangs = reader.submit(*stored.runs((0, 1)))
        now[0] += 101.0
        with pytest.raises(StoreUnavailable, match="does not answer"):
            hangs.wait()

        reader.revive()
        # Nothing is read for a while.
        now[0] += 101.0
        later = reader.submit(*stored.runs((1, 2)))
        assert not later._has_stopped() and not later.done
        engine.allow()
        later.wait()


@pytest.mark.usefixtures("single_blocks")
@pytest.mark.parametrize(
    ("method", "call"),
    [("start", 1), ("start", 2), ("start", 5), ("finish", 1), ("finish", 3), ("check", 1)],
)
@pytest.mark.parametrize("blocks", [1, 3, 30])
def test_nobody_waits_for_a_reader_that_has_failed(
    stored: Stored, method: str, call: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits is told, and so is who comes later; reads of one piece are like all others."""
    files = FaultyFileSystem()
    files.faults.add(Rule("raise", method, after=call - 1, count=1))
    if method == "check":
        fail = mock.Mock(side_effect=RuntimeError("injected"))
        monkeypatch.setattr(BlockReader, "_take_in", fail)
    reader = BlockReader(4, files)
    reads = []
    for n in range(7):
        reads.append(reader.submit(*stored.runs((n, n + blocks)), ahead=n in (3, 5)))
        if n % 2:
            # Some come while others are in flight, and some when all is quiet.
            reads[-1].ended.wait(2.0)

    late = reader.submit(*stored.runs((0, 3)))

    assert all(read.ended.wait(60.0) for read in (*reads, late))
    failed = [read for read in (*reads, late) if read.error is not None]
    assert late in failed
    for read in failed:
        with pytest.raises(StoreUnavailable, match="injected"):
            read.wait()
        assert listed(reader.cancel(read)) == []
    reader.close()


@pytest.mark.parametrize(("seconds", "noted"), [(0.0, 1), (60.0, 0)])
def test_a_drive_that_is_slow_is_noticed_before_it_is_idle(
    seconds: float, noted: int, step: Step, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "OBSERVED_SECONDS", seconds)
    reader, engine = step
    # It finds both at once.
    with reader._changed:
        first, second = (reader.submit(*stored.runs(run)) for run in ((0, 1), (10, 11)))
    engine.wait_started(2)
    engine.allow(1)
    first.wait()
    # Behind what is noted of the first it waits for the second.
    wait_until(lambda: engine.asked == 2)
    assert reader.cost.observations == noted
    engine.allow()
    second.wait()
