"""The memory of a store. It is allocated once and outlives the store when weights change."""

from __future__ import annotations

import dataclasses

import torch

from impress_sglang.config import ImpressConfig, bytes_of
from impress_sglang.errors import ConfigError
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape, SegmentLayout
from impress_sglang.store.policies import make_policy
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.tiers.host_memory import available_bytes
from impress_sglang.transfer.buffers import BufferPool
from impress_sglang.transfer.wanted import most_pages


@dataclasses.dataclass(frozen=True, slots=True)
class StoreMemory:
    """The caches of chunks, and the buffers for reads; the store's thread owns it."""

    cache: ChunkCache
    pool: BufferPool

    @classmethod
    def allocate(cls, config: ImpressConfig, shape: KVShape, device: torch.device) -> StoreMemory:
        """Allocate as much as the options say; `device` is where attention runs.

        Raises:
            ConfigError: there is not enough.
        """
        policy = make_policy(config)
        if policy.stores:
            _check_host(config, device)
        layout = SegmentLayout(shape, config.chunk_tokens, 1, BLOCK_BYTES)
        cache = ChunkCache(
            BLOCK_BYTES,
            most_pages(layout),
            policy.replacement(),
            device=device,
            device_bytes=bytes_of(config.device_gb) if policy.stores else 0,
            host_bytes=bytes_of(config.host_gb) if policy.stores else 0,
        )
        return cls(cache, BufferPool(bytes_of(config.buffer_gb), pin=device.type == "cuda"))

    def emptied(self, config: ImpressConfig) -> StoreMemory:
        """The same memory, emptied for another store; the old store must not read any more.

        Buffers that reads are still filling are used again when these reads have ended.
        """
        return StoreMemory(self.cache.emptied(make_policy(config).replacement()), self.pool)

    def close(self) -> None:
        """Free the memory."""
        self.pool.close()
        self.cache.close()


def _check_host(config: ImpressConfig, device: torch.device) -> None:
    """Check that the host has the memory of the caches, before any of it is touched.

    Raises:
        ConfigError: it has less.
    """
    options = {"--impress-host-gb": config.host_gb}
    if device.type == "cpu":
        options["--impress-device-gb"] = config.device_gb
    wanted = {name: gb for name, gb in options.items() if gb}
    try:
        available = available_bytes()
    except OSError:
        return
    if sum(map(bytes_of, wanted.values())) > available:
        raise ConfigError(
            f"caches are to take {sum(wanted.values()):g} GB of the host, of which "
            f"{available / 1e9:.1f} GB are available; lower {' or '.join(wanted)}"
        )
