"""What servers take while the randomised run goes on, memory and disk, as the kernel says."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

PERIOD_SECONDS = 0.5
# Between two looks for new files.
ARRIVAL_SECONDS = 0.03
# What is no file with KVs: the index, pins, folders.
BESIDE = "beside"
# Until this share of a life is over, caches fill and code is loaded; the end is as long.
WARM_UP = 0.1
# A shorter life is all warm-up, and may be compared with others only.
LONG_SECONDS = 300
MOST_GROWTH = 0.03
# Medians of fewer lives say nothing.
LEAST_LIVES = 6


@dataclasses.dataclass(frozen=True)
class Look:
    """Seconds since the life began, resident bytes of all its processes, and bytes that the file
    system has allocated, by store and what they are for."""

    seconds: float
    resident: int
    allocated: Counter[tuple[str, str]]

    @property
    def stored(self) -> int:
        """Bytes of files with KVs."""
        return sum(size for (_, kind), size in self.allocated.items() if kind != BESIDE)

    @property
    def beside(self) -> int:
        """Bytes of all other files."""
        return sum(size for (_, kind), size in self.allocated.items() if kind == BESIDE)


@dataclasses.dataclass
class Record:
    """What was seen of one life; `quota` in bytes.

    `returned` are bytes of files that came back after the server had given them up: until the next
    start nobody knows them.
    """

    quota: float
    looks: list[Look] = dataclasses.field(default_factory=list)
    returned: int = 0

    @property
    def is_long(self) -> bool:
        return self.looks[-1].seconds >= LONG_SECONDS

    @property
    def fullest(self) -> Look:
        """When most was stored."""
        return max(self.looks, key=lambda look: look.stored)

    @property
    def fullness(self) -> float:
        """Most that was stored, of the quota or of what an earlier life has left above it."""
        return self.fullest.stored / max(self.quota, self.looks[0].stored)

    def resident(self, first: float, last: float) -> float:
        """Median between two shares of the life."""
        low, high = (share * self.looks[-1].seconds for share in (first, last))
        return statistics.median(o.resident for o in self.looks if low <= o.seconds <= high)

    @property
    def end(self) -> float:
        """Resident bytes in the end."""
        return self.resident(1 - WARM_UP, 1)

    @property
    def growth(self) -> float:
        """Of resident bytes from the end of the warm-up on."""
        return self.end / self.resident(WARM_UP, 2 * WARM_UP) - 1


class Watch:
    """Looks at the server of each life, on a thread of its own."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self.records: list[Record] = []
        self.current = Record(0)

    @contextlib.contextmanager
    def life(self, pid: int, quota_gb: float) -> Iterator[None]:
        """Look for the time of a `with` block at a server, which may be killed meanwhile."""
        record, stopped = Record(quota_gb * 1e9), threading.Event()
        self.current = record
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(self._look_on, pid, record, stopped)
            try:
                yield
            finally:
                stopped.set()
                if record.looks:
                    self.records.append(record)
            # Who stops looking has seen nothing wrong, which is no finding.
            looking.result()

    def _look_on(self, pid: int, record: Record, stopped: threading.Event) -> None:
        began = time.monotonic()
        while not stopped.wait(PERIOD_SECONDS):
            try:
                resident = resident_bytes(pid)
            except psutil.NoSuchProcess:
                return
            if self._store.exists():
                now = time.monotonic() - began
                allocated = allocated_bytes(self._store)
                allocated["", "returned"] = -record.returned
                record.looks.append(Look(now, resident, allocated))

    def comes_back(self, away: Path) -> None:
        """The store's directory is about to be put back, which was given up."""
        self.current.returned += Look(0, 0, allocated_bytes(away)).stored

    def growths(self) -> dict[str, float]:
        """Of resident bytes: in lives that are long, and from the first to the last third of lives,
        where there are enough."""
        found = {
            f"in a life of {own.looks[-1].seconds / 60:.0f} min": own.growth
            for own in self.records
            if own.is_long
        }
        ends = [own.end for own in self.records if not own.is_long]
        if (third := len(ends) // 3) >= LEAST_LIVES:
            last, first = statistics.median(ends[-third:]), statistics.median(ends[:third])
            found[f"over {len(ends)} lives"] = last / first - 1
        return found

    def problems(self) -> list[str]:
        """What may not be."""
        grown = [
            f"memory grew by {share:.1%} {where}"
            for where, share in self.growths().items()
            if share > MOST_GROWTH
        ]
        full = [
            f"life {number} had {own.fullness:.2%} of its quota on the disk: {own.fullest}"
            for number, own in enumerate(self.records)
            if own.fullness > 1
        ]
        return [*grown, *full]

    def summary(self) -> str:
        """In figures."""
        looks = [look for own in self.records for look in own.looks]
        grown = ", ".join(f"{share:+.2%} {where}" for where, share in self.growths().items())
        return (
            f"resident {min(own.end for own in self.records) / 1e6:.0f} to "
            f"{max(own.end for own in self.records) / 1e6:.0f} MB ({grown or 'no long life'}); "
            f"{max(own.fullness for own in self.records):.1%} of the quota on the disk at most in "
            f"{len(looks)} looks, {max(look.beside for look in looks) / 1e6:.1f} MB beside it"
        )


class Arrivals:
    """Files with KVs that appear below a folder for the time of a `with` block, whole ones.

    One that is gone again before anybody looks is missed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = segment_sizes(folder)
        self.found: dict[str, int] = {}
        """Their bytes by their names."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> Arrivals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def count(self) -> int:
        """Bytes of all that came; nobody looks any more."""
        self.__exit__()
        self._look()
        return sum(self.found.values())

    def _look_on(self) -> None:
        while not self._ended.wait(ARRIVAL_SECONDS):
            self._look()

    def _look(self) -> None:
        now = segment_sizes(self._folder)
        self.found |= {name: now[name] for name in now.keys() - self._before.keys()}


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
    for own in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += own.memory_info().rss
    return total


def allocated_bytes(folder: Path) -> Counter[tuple[str, str]]:
    """What files below a folder take of the disk, by store and what they are for.

    Files come and go while the folders are walked: those count that two walks have found, and so
    were there together.
    """
    first, second = _allocated(folder), _allocated(folder)
    found: Counter[tuple[str, str]] = Counter()
    for path in first.keys() & second.keys():
        store, *below = path.relative_to(folder).parts
        kind = below[0] if len(below) > 1 and ".kv" in path.name else BESIDE
        found[store[:4] if below else "", kind] += min(first[path], second[path])
    return found


def _allocated(folder: Path) -> dict[Path, int]:
    """By path; a file that is being written has the name that it is going to have."""
    found = {}
    # It passes over folders that are gone by then.
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                own = Path(parent, name)
                found[own.with_name(name.removesuffix(".tmp"))] = os.stat(own).st_blocks * 512
    return found
