"""The emulated drive: no faster than told, over all its engines, and hardly slower."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bench.core.emulation import Drive, SlowEngine
from impress_sglang.storage.engines import AioEngine, BlockEngine, ThreadEngine
from impress_sglang.storage.files import AlignedMemory

pytestmark = pytest.mark.alone

BLOCK = 4096
# A busy machine delays the end of a wait, never its beginning.
SLACK_SECONDS = 0.5


@pytest.fixture
def drive() -> Drive:
    """A megabyte a second."""
    drive = Drive()
    drive.set_rate(1e6)
    return drive


def take(drive: Drive, num_bytes: int) -> None:
    drive.wait(int(drive.ask(np.array([num_bytes]))[-1]))


def seconds_of(drive: Drive, sizes: list[int], threads: int = 1) -> float:
    began = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda size: take(drive, size), sizes))
    return time.monotonic() - began


@pytest.mark.parametrize("threads", [1, 4])
def test_bytes_take_their_time_over_all_threads(drive: Drive, threads: int) -> None:
    assert 0.29 <= seconds_of(drive, [10_000] * 30, threads) < 0.3 + SLACK_SECONDS


@pytest.fixture(params=[AioEngine, ThreadEngine])
def kind(request: pytest.FixtureRequest) -> type[AioEngine | ThreadEngine]:
    kind: type[AioEngine | ThreadEngine] = request.param
    try:
        kind(1).close()
    except OSError as error:
        pytest.skip(f"the kernel has no AIO: {error}")
    return kind


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(os.urandom(64 * BLOCK))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def read_blocks(engine: BlockEngine, descriptor: int, count: int, blocks: int) -> float:
    """Seconds for so many reads of so many blocks, as many in flight as the engine takes."""
    memory = AlignedMemory(blocks * BLOCK * engine.depth)
    begun = ended = 0
    began = time.monotonic()
    while ended < count:
        room = min(engine.depth - (begun - ended), count - begun)
        if room > 0:
            sizes = np.full(room, blocks * BLOCK)
            places = np.arange(begun, begun + room) % engine.depth * blocks * BLOCK
            engine.start(np.full(room, descriptor), 0 * sizes, memory.address + places, sizes)
            begun += room
        _, results = engine.finish()
        assert set(results.tolist()) == {blocks * BLOCK}
        ended += len(results)
    return time.monotonic() - began


@pytest.mark.parametrize("blocks", [1, 4])
def test_an_engine_reads_at_the_rate_of_its_drive(
    kind: type[AioEngine | ThreadEngine], file: int, blocks: int
) -> None:
    drive = Drive()
    drive.set_rate(20e6)
    engine = SlowEngine(kind(8), drive)
    count = 2_000 // blocks

    seconds = read_blocks(engine, file, count, blocks)

    engine.close()
    rate = count * blocks * BLOCK / seconds / 1e6
    assert 14 <= rate <= 20.2
