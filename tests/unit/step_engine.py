"""Readers of tests: of real engines, and of one that reads when a test says so."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np

from impress_sglang.storage.engines import BlockEngine, Integers, read_exactly
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.reader import BlockReader


def reading(depth: int = 3, engine: str = "auto") -> contextlib.closing[BlockReader]:
    return contextlib.closing(BlockReader(depth, engine=engine))


class StepEngine:
    """Reads one block run for each `allow`, oldest first, and keeps what was asked for.

    `started` are (descriptor, offset, size) in the order in which reads were begun; it was `asked`
    so often which have ended.
    """

    name = "step"

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.started: list[tuple[int, int, int]] = []
        self.asked = 0
        self._waiting: dict[int, tuple[int, int, int, int]] = {}
        self._numbers = iter(range(1 << 62))
        self._allowed = 0
        self._changed = threading.Condition()

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    @property
    def started_bytes(self) -> int:
        return sum(size for _, _, size in self.started)

    def start(
        self, descriptors: Integers, offsets: Integers, addresses: Integers, sizes: Integers
    ) -> Integers:
        numbers = []
        with self._changed:
            columns = (descriptors, offsets, addresses, sizes)
            for read in zip(*(column.tolist() for column in columns), strict=True):
                numbers.append(next(self._numbers))
                self._waiting[numbers[-1]] = read
                self.started.append((read[0], read[1], read[3]))
            assert len(self._waiting) <= self.depth
            self._changed.notify_all()
        return np.array(numbers, np.int64)

    def finish(self, at_least: int = 1) -> tuple[Integers, Integers]:
        with self._changed:
            assert self._waiting
            self.asked += 1
            self._changed.wait_for(lambda: self._allowed)
            self._allowed -= 1
            number = min(self._waiting)
            descriptor, offset, address, size = self._waiting[number]
            target = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            try:
                read_exactly(descriptor, offset, target)
                result = size
            except EOFError:
                result = 0
            except OSError as error:
                result = -(error.errno or 5)
            del self._waiting[number]
            self._changed.notify_all()
        return np.array([number]), np.array([result])

    def close(self) -> None:
        assert not self._waiting

    def allow(self, count: int = 1 << 60) -> None:
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def stop(self) -> None:
        """Let no more reads end than have ended."""
        with self._changed:
            self._allowed = 0

    def wait_started(self, count: int) -> None:
        """Wait until so many reads were begun, in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.started) >= count, timeout=60)


Step = tuple[BlockReader, StepEngine]


class OneEngine(FileSystem):
    """The operating system's files, read by an engine of the test."""

    def __init__(self, engine: BlockEngine) -> None:
        self._engine = engine

    def engine(self, name: str, depth: int) -> BlockEngine:
        return self._engine


@contextlib.contextmanager
def with_engine(engine: StepEngine, *, patience: float = math.inf) -> Iterator[Step]:
    """A reader whose reads end when the test says so; at the end all do."""
    reader = BlockReader(engine.depth, OneEngine(engine), patience=patience)
    try:
        yield reader, engine
    finally:
        engine.allow()
        reader.close()


def stepping(depth: int, *, patience: float = math.inf) -> AbstractContextManager[Step]:
    return with_engine(StepEngine(depth), patience=patience)


def counting() -> AbstractContextManager[Step]:
    """A reader that keeps what it reads, at full speed."""
    engine = StepEngine(3)
    engine.allow()
    return with_engine(engine)
