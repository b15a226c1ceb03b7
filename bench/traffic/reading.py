"""What a server has read and loaded between two looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil

from bench.core.servers import Server


class Counts:
    """Counters of a server since the last look.

    `read_bytes` are those of its totals, which count requests that have ended well; `drive_bytes`
    is what the kernel says that its processes read from a drive, for whomever.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before: dict[str, float] = {}
        self.since()

    def since(self) -> dict[str, float]:
        """What was counted since the last call."""
        totals = self._server.stats()["totals"]
        now = {
            "read_bytes": float(totals["ssd_bytes"]),
            "loads": float(totals["requests_ssd"]),
            "drive_bytes": float(drive_bytes(self._server.pid)),
        }
        found = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        self._before = now
        return found


def drive_bytes(pid: int) -> int:
    """What the processes of a server have read from drives so far, as the kernel counts it."""
    return sum(own.read_bytes for own in _counters(pid))


def file_bytes(pid: int) -> tuple[int, int]:
    """What they have read from files and written to them, be it to and from the page cache."""
    found = list(_counters(pid))
    read = sum(max(own.read_bytes, own.read_chars) for own in found)
    return read, sum(max(own.write_bytes, own.write_chars) for own in found)


def _counters(pid: int) -> Iterator[Any]:
    main = psutil.Process(pid)
    for process in (main, *main.children(recursive=True)):
        # It has ended, or the kernel does not say.
        with contextlib.suppress(psutil.Error, NotImplementedError):
            yield process.io_counters()
