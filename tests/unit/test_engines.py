"""Engines: one contract for all, which one is chosen, and the rate of an emulated drive."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.core import emulation
from bench.core.emulation import Drive, SlowEngine
from impress_sglang.errors import ConfigError
from impress_sglang.storage import engines
from impress_sglang.storage.engines import AioEngine, BlockEngine, ThreadEngine, make_engine
from impress_sglang.storage.files import AlignedMemory, FileSystem

BLOCK = 4096
BLOCKS = 128
DEPTH = 7

KINDS = ("aio", "threads", "aio at full speed", "threads at full speed", "aio slowly")


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[BlockEngine]:
    engine = one_of(request.param, DEPTH)
    yield engine
    engine.close()


def one_of(kind: str, depth: int) -> BlockEngine:
    name, _, speed = kind.partition(" ")
    if speed:
        drive = Drive()
        drive.set_rate(40e6 if speed == "slowly" else 0.0)
        return SlowEngine(one_of(name, depth), drive)
    if name == "threads":
        return ThreadEngine(depth)
    try:
        return AioEngine(depth)
    except OSError as error:
        pytest.skip(f"the kernel has no AIO: {error}")


class File:
    """Random bytes, their file, and memory whose place `i` takes reads of the file's block `i`."""

    def __init__(self, path: Path, *, direct: bool) -> None:
        self.content = os.urandom(BLOCKS * BLOCK)
        path.write_bytes(self.content)
        self.descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        # Reads may go on beyond the end of the file.
        self.memory = AlignedMemory(2 * BLOCKS * BLOCK)
        self.memory.view[:] = b"\xee" * len(self.memory)

    def close(self) -> None:
        os.close(self.descriptor)

    def start(
        self,
        engine: BlockEngine,
        reads: list[tuple[int, int]],
        descriptors: list[int] | None = None,
    ) -> dict[int, tuple[int, int]]:
        """Begin reads of (first block, blocks), of this file or others; these by number."""
        offsets, sizes = np.array(reads, np.int64).reshape(-1, 2).T * BLOCK
        files = np.array(descriptors or [self.descriptor] * len(reads))
        numbers = engine.start(files, offsets, self.memory.address + offsets, sizes)
        found = dict(zip(numbers.tolist(), reads, strict=True))
        assert len(found) == len(reads), "numbers are unique"
        return found

    def check(self, first: int, count: int) -> None:
        place = slice(first * BLOCK, (first + count) * BLOCK)
        assert self.memory.view[place] == self.content[place]

    def untouched(self, first: int, count: int) -> bool:
        return set(self.memory.view[first * BLOCK : (first + count) * BLOCK]) <= {0xEE}


@pytest.fixture(params=["buffered", "O_DIRECT"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[File]:
    direct = request.param == "O_DIRECT"
    if direct and not FileSystem().supports_direct_io(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    file = File(tmp_path / "file", direct=direct)
    yield file
    file.close()


def finish_all(engine: BlockEngine, count: int) -> dict[int, int]:
    """Results of so many reads, by number."""
    results: dict[int, int] = {}
    while len(results) < count:
        numbers, found = engine.finish()
        assert len(numbers) == len(found)
        assert not set(numbers.tolist()) & set(results), "told twice"
        results |= dict(zip(numbers.tolist(), found.tolist(), strict=True))
    return results


@pytest.mark.parametrize("seed", range(4))
def test_any_reads_in_any_batches(engine: BlockEngine, file: File, seed: int) -> None:
    """Room is used again as soon as there is any; numbers are unique among reads in flight."""
    random = np.random.default_rng(seed)
    todo = [(6 * place, int(random.integers(1, 7))) for place in random.permutation(20).tolist()]
    wanted, flying = list(todo), dict[int, tuple[int, int]]()
    while todo or flying:
        room = engine.depth - len(flying)
        count = min(int(random.integers(0, room + 1)), len(todo))
        if count:
            begun = file.start(engine, todo[:count])
            assert not set(begun) & set(flying)
            flying |= begun
            del todo[:count]
        if flying:
            numbers, results = engine.finish()
            for number, result in zip(numbers.tolist(), results.tolist(), strict=True):
                first, size = flying.pop(number)
                assert result == size * BLOCK
                file.check(first, size)
    for first, size in wanted:
        file.check(first, size)
        assert file.untouched(first + size, 6 - size), "and nothing else"


@pytest.mark.parametrize("bad", [{0}, {2}, {5}, {0, 1, 4}, set(range(6))])
def test_a_bad_descriptor_hurts_no_other_read_of_its_batch(
    engine: BlockEngine, file: File, tmp_path: Path, bad: set[int]
) -> None:
    """One that was closed, and one that is open for writing only."""
    closed = os.open(tmp_path / "closed", os.O_CREAT | os.O_RDWR)
    os.close(closed)
    blind = os.open(tmp_path / "blind", os.O_CREAT | os.O_WRONLY)
    descriptors = [(closed, blind)[n % 2] if n in bad else file.descriptor for n in range(6)]
    begun = file.start(engine, [(3 * n, 2) for n in range(6)], descriptors)

    results = finish_all(engine, 6)

    for number, (first, count) in begun.items():
        if first // 3 in bad:
            assert results[number] == -errno.EBADF
            assert file.untouched(first, count)
        else:
            assert results[number] == count * BLOCK
            file.check(first, count)
    os.close(blind)


@pytest.mark.parametrize(("first", "count"), [(BLOCKS - 2, 5), (BLOCKS, 1), (BLOCKS + 7, 2)])
def test_a_read_beyond_the_end_gives_fewer_bytes(
    engine: BlockEngine, file: File, first: int, count: int
) -> None:
    begun = file.start(engine, [(first, count), (0, 3)])

    results = finish_all(engine, 2)

    short, good = begun
    assert 0 <= results[short] <= max(BLOCKS - first, 0) * BLOCK
    assert results[good] == 3 * BLOCK
    file.check(first, results[short] // BLOCK)
    file.check(0, 3)


@pytest.mark.parametrize("why", ["pdp11", os.strerror(errno.EAGAIN)])
def test_where_there_is_no_aio_it_is_refused_and_auto_takes_threads(
    why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EAGAIN)
        return -1

    if why == "pdp11":
        monkeypatch.setattr(engines.platform, "machine", lambda: why)
    else:
        library = SimpleNamespace(syscall=refuse)
        monkeypatch.setattr(engines.ctypes, "CDLL", lambda *_, **__: library)
    with pytest.raises(ConfigError, match=f"--impress-io-engine aio.*{why}"):
        make_engine("aio", 4)
    engine = make_engine("auto", 4)
    assert (engine.name, engine.depth) == ("threads", 4)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and why in caplog.text
    engine.close()


def test_aio_is_taken_where_there_is_any() -> None:
    one_of("aio", 2).close()
    for name in ("aio", "auto"):
        engine = make_engine(name, 5)
        assert (engine.name, engine.depth) == ("aio", 5)
        engine.close()


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("kind", ["aio", "threads"])
def test_an_emulated_drive_has_the_rate_that_it_was_told(
    kind: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many reads in flight as there may be, by a clock that only goes on for who waits."""
    drive, file = Drive(), File(tmp_path / "file", direct=False)
    clock = SimpleNamespace(now=10**12, monotonic_ns=lambda: clock.now)
    monkeypatch.setattr(emulation, "time", clock)
    monkeypatch.setattr(drive, "wait", lambda end: setattr(clock, "now", end))
    drive.set_rate(10e6)
    engine = SlowEngine(one_of(kind, 8), drive)
    todo, flying, began = 500 // blocks, 0, clock.now
    while todo or flying:
        count = min(engine.depth - flying, todo)
        file.start(engine, [(place * blocks, blocks) for place in range(count)])
        todo -= count
        _, results = engine.finish()
        assert set(results.tolist()) <= {blocks * BLOCK}
        flying += count - len(results)
    engine.close()
    file.close()
    assert 500 * BLOCK / (clock.now - began) * 1e9 == pytest.approx(10e6, rel=0.01)
