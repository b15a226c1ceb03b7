"""What clients ask for, what they get and when, and what servers read for it."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from bench.core.servers import Piece, Server
from bench.core.session import BenchFailed


def draw(chance: random.Random, count: int) -> list[int]:
    """So many ids of ordinary words of the demo's model."""
    return chance.choices(range(100, 40000), k=count)


class Stream:
    """An answer that is streamed by a thread; see `Server.stream`."""

    def __init__(self, server: Server, *asked: Any) -> None:
        self.came: list[Piece] = []
        self._changed = threading.Condition()
        self._error: BenchFailed | None = None
        self._ended = False
        self._pieces = server.stream(*asked)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def wait(self, tokens: int) -> None:
        """Until so many have come, or it has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or bool(self.came and self.came[-1].tokens >= tokens)
            )

    def join(self) -> Sequence[Piece]:
        """Wait until it has ended.

        Raises:
            BenchFailed: it did not end well.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.came

    def _follow(self) -> None:
        try:
            for piece in self._pieces:
                with self._changed:
                    self.came.append(piece)
                    self._changed.notify_all()
        except BenchFailed as error:
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def gaps_of(came: Sequence[Piece]) -> list[float]:
    """Seconds between pieces."""
    return [after.at - before.at for before, after in itertools.pairwise(came)]


def tokens_between(came: Sequence[Piece], began: float, ended: float) -> int:
    """How many tokens came after `began`, by `ended`."""
    before, by = (
        max((own.tokens for own in came if own.at <= edge), default=0) for edge in (began, ended)
    )
    return by - before


class Counts:
    """Counters of a server since the last look.

    `read_bytes` are those of its totals, which count requests that have ended well; `drive_bytes`
    is what the kernel says that its processes read from a drive, for whomever.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = self._look()

    def since(self) -> dict[str, float]:
        """What was counted since the last call."""
        before, self._before = self._before, self._look()
        return {name: value - before[name] for name, value in self._before.items()}

    def _look(self) -> dict[str, float]:
        totals = self._server.stats()["totals"]
        drive = sum(own.read_bytes for own in _counters(self._server.pid))
        found = {"read_bytes": totals["ssd_bytes"], "loads": totals["requests_ssd"]}
        return {**found, "drive_bytes": drive}


def file_bytes(pid: int) -> tuple[int, int]:
    """What the processes of a server have read from files and written to them, be it to and from
    the page cache."""
    found = list(_counters(pid))
    read = sum(max(own.read_bytes, own.read_chars) for own in found)
    return read, sum(max(own.write_bytes, own.write_chars) for own in found)


def _counters(pid: int) -> Iterator[Any]:
    main = psutil.Process(pid)
    for process in (main, *main.children(recursive=True)):
        # It has ended, or the kernel does not say.
        with contextlib.suppress(psutil.Error, NotImplementedError):
            yield process.io_counters()
