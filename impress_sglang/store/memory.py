"""The memory of a store. It is allocated once and outlives the store when weights change.

Linux overcommits, so an allocation that is too large is not refused: the kernel kills a process
when the pages are touched. So the available memory of the host is checked first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from impress_sglang.config import ImpressConfig, bytes_of
from impress_sglang.errors import ConfigError
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape, SegmentLayout
from impress_sglang.store.policies import make_policy
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.wanted import max_pages

# Reserved for everything else that runs on the host.
MARGIN_BYTES = 1 << 30

_ROOT = Path("/")


@dataclasses.dataclass(frozen=True, slots=True)
class StoreMemory:
    """The chunk caches and the read buffers. Thread: the store's."""

    cache: ChunkCache
    buffers: BufferPool

    @classmethod
    def allocate(cls, config: ImpressConfig, shape: KVShape, device: torch.device) -> StoreMemory:
        """Allocate the memory that the options set; attention runs on `device`.

        Raises:
            ConfigError: the host does not have it.
        """
        policy = make_policy(config)
        if policy.stores:
            _check_host(config, device)
        layout = SegmentLayout(shape, config.chunk_tokens, 1, BLOCK_BYTES)
        cache = ChunkCache(
            BLOCK_BYTES,
            max_pages(layout),
            policy.replacement(),
            device=device,
            device_bytes=bytes_of(config.device_gb) if policy.stores else 0,
            host_bytes=bytes_of(config.host_gb) if policy.stores else 0,
        )
        return cls(cache, BufferPool(bytes_of(config.buffer_gb), pin=device.type == "cuda"))

    def emptied(self, config: ImpressConfig) -> StoreMemory:
        """Return the same memory for another store, after the last read of the old one was started;
        buffers that are still being filled are reused when their reads have ended."""
        return StoreMemory(self.cache.emptied(make_policy(config).replacement()), self.buffers)

    def close(self) -> None:
        self.buffers.close()
        self.cache.close()


def _check_host(config: ImpressConfig, device: torch.device) -> None:
    options = {"--impress-host-gb": config.host_gb}
    if device.type == "cpu":
        options["--impress-device-gb"] = config.device_gb
    sizes = {name: gb for name, gb in options.items() if gb}
    try:
        available = available_bytes()
    except OSError:
        return
    if sum(map(bytes_of, sizes.values())) > available:
        raise ConfigError(
            f"caches are to take {sum(sizes.values()):g} GB of the host, of which "
            f"{available / 1e9:.1f} GB are available; lower {' or '.join(sizes)}"
        )


def available_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that may be allocated: the minimum of the available bytes of the machine and
    of each control group of this process, less `MARGIN_BYTES`.

    `root`: where `proc` and `sys` are mounted.

    Raises:
        OSError: this is not known here.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    meminfo = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in meminfo:
        raise OSError("/proc/meminfo does not say MemAvailable")
    machine = int(meminfo["MemAvailable"].split()[0]) * 1024
    return max(0, min([machine, *_group_bytes(root)]) - MARGIN_BYTES)


def _group_bytes(root: Path) -> Iterator[int]:
    """Yield the bytes left below each limit of this process's control groups, version 2 or 1."""
    groups = root / "proc/self/cgroup"
    # A kernel without control groups has no such file.
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        mounted = root / "sys/fs/cgroup"
        if controllers == "":
            limit, usage, kind = "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            mounted /= "memory"
            limit, usage, kind = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        # In a container the path may be the host's; then only the mounted root exists.
        group = mounted / path.lstrip("/")
        for folder in (group, *group.parents):
            value = (folder / limit).read_text().strip() if (folder / limit).exists() else "max"
            if value != "max":
                # The kernel frees file pages when memory is short, and `MemAvailable` includes
                # both kinds. Pages of weights that were read twice are active.
                lines = (folder / "memory.stat").read_text().splitlines()
                stat = dict(line.split() for line in lines)
                files = (stat.get(f"{kind}{name}_file", 0) for name in ("active", "inactive"))
                used = int((folder / usage).read_text()) - sum(map(int, files))
                yield int(value) - used
            if folder == mounted:
                break
