"""A block engine whose reads fail, are late, hang or bring wrong bits; see `tests.faults`."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from impress_sglang.storage.engines import WAIT_SECONDS, BlockEngine, Integers

if TYPE_CHECKING:
    from tests.faults import FaultyFileSystem, Rule

POLL_SECONDS = 0.001
BLOCK_BYTES = 4096


@dataclasses.dataclass
class _Read:
    """A read in flight: what will be told of it, and when."""

    address: int
    retry_poll: float
    hangs_by: Rule | None
    flips: bool
    result: int | None = None


class FaultyEngine:
    """Keeps the contract of `BlockEngine` with reads that end as the rules say.

    Late and hung reads are begun at once and told late, so the memory is written behind the back of
    whoever thinks that a hung read does nothing.
    """

    def __init__(self, inner: BlockEngine, files: FaultyFileSystem) -> None:
        self._inner, self._files = inner, files
        self.name, self.depth = inner.name, inner.depth
        self._next = 0
        self._flying: dict[int, _Read] = {}
        # Our numbers of the reads that the real engine has under way, by its numbers.
        self._begun: dict[int, int] = {}

    def start(
        self, descriptors: Integers, offsets: Integers, addresses: Integers, sizes: Integers
    ) -> Integers:
        self._files.enter("start", None)
        numbers = np.arange(self._next, self._next + len(sizes))
        self._next += len(sizes)
        lengths = np.array(sizes, np.int64)
        for place, number in enumerate(numbers.tolist()):
            path = self._files.path_of(int(descriptors[place]))
            lengths[place] = self._plan(number, path, int(addresses[place]), int(sizes[place]))
        real = lengths > 0
        if real.any():
            columns = (np.asarray(c)[real] for c in (descriptors, offsets, addresses, lengths))
            begun = self._inner.start(*columns)
            self._begun |= dict(zip(begun.tolist(), numbers[real].tolist(), strict=True))
        return numbers

    def finish(self, at_least: int = 1) -> tuple[Integers, Integers]:
        self._files.enter("finish", None)
        assert at_least <= len(self._flying), "would wait for ever"
        deadline = time.monotonic() + WAIT_SECONDS
        while len(ended := self._ended()) < at_least and time.monotonic() < deadline:
            self._files.check_alive()
            if self._begun:
                self._collect()
            else:
                time.sleep(POLL_SECONDS)
        results = [self._flying.pop(number).result for number in ended]
        return np.array(ended, np.int64), np.array(results, np.int64)

    def close(self) -> None:
        """Reads of a killed process are waited for, not told."""
        while self._begun:
            self._collect()
        self._inner.close()

    def _plan(self, number: int, path: Path | None, address: int, size: int) -> int:
        """Note a read; returns how many bytes of it are really read."""
        rules = self._files.faults.pick("block", str(path or ""))
        late = sum(rule.seconds for rule in rules if rule.fault == "delay")
        hangs_by = next((rule for rule in rules if rule.fault == "hang"), None)
        fault = next((rule.fault for rule in rules if not rule.waits), None)
        read = _Read(address, time.monotonic() + late, hangs_by, fault == "flip")
        self._flying[number] = read
        if fault == "kill":
            self._files.kill_process()
        if fault == "short":
            size = size // 2 // BLOCK_BYTES * BLOCK_BYTES
            read.result = None if size else 0
        elif fault is not None and fault != "flip":
            read.result = -getattr(errno, fault, errno.EIO)
            return 0
        return size

    def _collect(self) -> None:
        numbers, results = self._inner.finish(1)
        for number, result in zip(numbers.tolist(), results.tolist(), strict=True):
            read = self._flying[self._begun.pop(number)]
            read.result = result
            if read.flips and result > 0:
                ctypes.c_ubyte.from_address(read.address + result // 2).value ^= 1

    def _ended(self) -> list[int]:
        now = time.monotonic()
        return [
            number
            for number, read in self._flying.items()
            if read.result is not None
            and read.retry_poll <= now
            and not (read.hangs_by is not None and self._files.faults.active(read.hangs_by))
        ]
