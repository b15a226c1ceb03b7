"""What the host can still give, from files as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from impress_sglang.tiers.host_memory import MARGIN_BYTES, available_bytes

GIB = 1 << 30


def machine(root: Path, available: int, groups: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    kib = available // 1024
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {kib} kB\nBuffers: 1 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    return root


def group(folder: Path, limit: object, usage: int, cache: int, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {
        2: ("memory.max", "memory.current", ""),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    }[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    kinds = f"{names[2]}active_file {cache // 4}\n{names[2]}inactive_file {cache - cache // 4}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{kinds}")


@pytest.mark.parametrize(
    ("version", "line", "mounted"),
    [(2, "0::/a/b\n", "sys/fs/cgroup"), (1, "4:cpu,memory:/a/b\n", "sys/fs/cgroup/memory")],
)
def test_the_tightest_limit_above_us_decides(
    tmp_path: Path, version: int, line: str, mounted: str
) -> None:
    root = machine(tmp_path, 50 * GIB, "9:cpu:/elsewhere\n" + line)
    base = root / mounted
    group(base / "a/b", 40 * GIB, 30 * GIB, 8 * GIB, version)
    assert available_bytes(root) == 18 * GIB - MARGIN_BYTES, "cached files are given up"
    group(base / "a", 20 * GIB, 17 * GIB, 0, version)
    assert available_bytes(root) == 3 * GIB - MARGIN_BYTES
    group(base / "other", GIB, GIB, 0, version)
    assert available_bytes(root) == 3 * GIB - MARGIN_BYTES


def test_in_a_container_the_limit_is_at_the_root(tmp_path: Path) -> None:
    """The path is the host's, and not there."""
    root = machine(tmp_path, 50 * GIB, "4:memory:/docker/0123\n0::/\n")
    group(root / "sys/fs/cgroup/memory", 8 * GIB, 2 * GIB, 0, 1)
    assert available_bytes(root) == 6 * GIB - MARGIN_BYTES
