"""What the host can still give, from files as Linux has them, and what a store takes of it.

That is taken when a server starts, or it does not start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ConfigError
from impress_sglang.store import memory as memory_module
from impress_sglang.store.memory import MARGIN_BYTES, StoreMemory, available_bytes
from impress_sglang.tiers.placement import Tier
from tests.unit.kv_factory import make_shape

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


CPU = torch.device("cpu")


def allocate(**options: Any) -> StoreMemory:
    config = ImpressConfig(ssd_dir="unused", buffer_gb=0.1, **options)
    return StoreMemory.allocate(config, make_shape(probe=(), coded=True), CPU)


@pytest.fixture
def gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has one."""
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 10**9)


def test_caches_that_the_host_cannot_hold_are_refused(gigabyte: None) -> None:
    """Before anything is touched, however much it is."""
    with pytest.raises(ConfigError, match=r"600 GB .* 1\.0 GB .* lower --impress-host-gb$"):
        allocate(host_gb=600, device_gb=0)
    with pytest.raises(ConfigError, match=r"1\.1 GB .*--impress-host-gb or --impress-device-gb"):
        allocate(host_gb=0.6, device_gb=0.5)


@pytest.mark.parametrize("known", [True, False])
def test_caches_have_what_options_say(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def available() -> int:
        if known:
            return 10**9
        raise OSError("no /proc")

    monkeypatch.setattr(memory_module, "available_bytes", available)
    memory = allocate(host_gb=0.002, device_gb=0.001)
    capacity = memory.cache.placement.capacity
    assert capacity[Tier.HOST] == 2 * 10**6 // 4096 and capacity[Tier.DEVICE] == 10**6 // 4096
    memory.close()
