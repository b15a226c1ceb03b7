"""How much memory the host still has.

Linux overcommits, so an allocation that is too large is not refused: the kernel kills a process
when the pages are touched. So code that takes gigabytes asks here before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Left for everything else that runs on the host.
MARGIN_BYTES = 1 << 30

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Bytes that may be taken: the least that the machine and each of our control groups has left.

    `MARGIN_BYTES` are subtracted. `root` is where `proc` and `sys` are mounted.

    Raises:
        OSError: this is not known here.
    """
    found = [_machine_bytes(root), *_group_bytes(root)]
    return max(0, min(found) - MARGIN_BYTES)


def _machine_bytes(root: Path) -> int:
    """Bytes that are available without swapping, as estimated by the kernel."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo does not say MemAvailable")


def _group_bytes(root: Path) -> Iterator[int]:
    """Bytes left below each limit of the control groups that we are in, of version 2 or 1."""
    groups = root / "proc/self/cgroup"
    # A kernel without control groups has no such file.
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        mounted = root / "sys/fs/cgroup"
        if controllers == "":
            names = ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            mounted /= "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        # In a container the path may be the host's; then only the mounted root is there.
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):
            if (folder / names[0]).exists():
                yield from _left_in(folder, *names)
            if folder == mounted:
                break


def _left_in(folder: Path, limit_name: str, usage_name: str, prefix: str) -> Iterator[int]:
    limit = (folder / limit_name).read_text().strip()
    if limit == "max":
        return
    usage = int((folder / usage_name).read_text())
    # The kernel frees file pages when memory is short; `MemAvailable` counts both kinds, too. Those
    # of weights that were read twice are active.
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    yield int(limit) - usage + files
