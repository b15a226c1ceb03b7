"""What servers hold while the randomised run goes on and after it: memory, descriptors, files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

# Until this share of a life is over, caches fill and code is loaded; the end is as long.
WARM_UP = 0.1
# A shorter life is all warm-up.
LONG_SECONDS = 300
MOST_GROWTH = 0.03
# Caches of these servers are far smaller; the rest is what allocators keep.
MOST_GROWTH_BYTES = 300 << 20


class Watch:
    def __init__(self) -> None:
        # Of each life: seconds since it began, and resident bytes of all its processes then.
        self.lives: list[list[tuple[float, int]]] = []

    def begin(self) -> None:
        self.lives.append([])
        self._began = time.monotonic()

    def look(self, pid: int) -> None:
        self.lives[-1].append((time.monotonic() - self._began, resident_bytes(pid)))

    def growths(self) -> dict[str, float]:
        """Of resident bytes, in lives that are long, from the end of the warm-up on."""
        return {
            f"in a life of {looks[-1][0] / 60:.0f} min": _resident(looks, 1 - WARM_UP)
            / _resident(looks, WARM_UP)
            - 1
            for looks in self.lives
            if looks and looks[-1][0] >= LONG_SECONDS
        }

    def problems(self) -> list[str]:
        grown = self.growths().items()
        return [
            f"memory grew by {share:.1%} {where}" for where, share in grown if share > MOST_GROWTH
        ]

    def summary(self) -> str:
        grown = ", ".join(f"{share:+.2%} {where}" for where, share in self.growths().items())
        ends = [_resident(looks, 1 - WARM_UP) / 1e6 for looks in self.lives if looks]
        return f"resident {min(ends):.0f} to {max(ends):.0f} MB ({grown or 'no long life'})"


def _resident(looks: Sequence[tuple[float, int]], share: float) -> float:
    """Median from this share of a life on, for as long as its warm-up."""
    first, last = (part * looks[-1][0] for part in (share, share + WARM_UP))
    return statistics.median(size for at, size in looks if first <= at <= last + 1e-9)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What a process holds: open descriptors, segments among them, resident bytes."""

    descriptors: int
    segments: frozenset[str]
    resident: int

    @classmethod
    def of(cls, process: psutil.Process) -> Footprint:
        folder = Path(f"/proc/{process.pid}/fd")
        targets = []
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                targets.append(os.readlink(path))
        segments = frozenset(target for target in targets if ".kv" in target)
        return cls(len(targets), segments, process.memory_info().rss)

    def beyond(self, start: Footprint) -> str:
        """What an idle process still holds that it did not hold at its start."""
        if self.segments:
            return f"segments are open in an idle server: {sorted(self.segments)[:5]}"
        grown = self.resident > start.resident + MOST_GROWTH_BYTES
        return f"{start} became {self}" if grown or self.descriptors > start.descriptors + 2 else ""


def segment_sizes(folder: Path) -> dict[str, int]:
    """Bytes of the whole files with KVs of all stores below a folder, by their names."""
    found = {}
    for parent, _, files in os.walk(folder):
        for name in files:
            if name.endswith(".kv") and Path(parent).parent.name == "segments":
                with contextlib.suppress(FileNotFoundError):
                    found[name] = os.stat(Path(parent, name)).st_size
    return found


def resident_bytes(pid: int) -> int:
    """Of a process and all below it."""
    process = psutil.Process(pid)
    total = 0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += member.memory_info().rss
    return total
