"""What clients ask for, what they get and when, and what servers read for it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import psutil

from bench.core.servers import Piece, RunningServer
from bench.core.session import BenchFailed


class Stream:
    """An answer that is streamed by a thread; see `Server.stream`."""

    def __init__(self, server: RunningServer, *asked: Any) -> None:
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


def file_bytes(pid: int) -> tuple[int, int]:
    """What the processes of a server have read from files and written to them, be it to and from
    the page cache."""
    main, read, written = psutil.Process(pid), 0, 0
    for process in (main, *main.children(recursive=True)):
        # It has ended, or the kernel does not say.
        with contextlib.suppress(psutil.Error, NotImplementedError):
            own = process.io_counters()
            read += max(own.read_bytes, own.read_chars)
            written += max(own.write_bytes, own.write_chars)
    return read, written
