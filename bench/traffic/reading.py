"""What a server has read and loaded between two looks at it."""

from __future__ import annotations

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
    main = psutil.Process(pid)
    count = 0
    for process in (main, *main.children(recursive=True)):
        try:
            count += process.io_counters().read_bytes
        except (psutil.Error, NotImplementedError):
            # It has ended, or the kernel does not say.
            continue
    return count
