"""What a store takes of memory. It is allocated once and outlives a store of other weights."""

from __future__ import annotations

import dataclasses

import torch

from impress_sglang.config import ImpressConfig
from impress_sglang.management.policies import make_policy
from impress_sglang.storage.layout import KVShape
from impress_sglang.tiers.cache import ChunkCache
from impress_sglang.transfer.area import AreaPool


@dataclasses.dataclass(frozen=True, slots=True)
class StoreMemory:
    """The chunk caches, and the buffers that reads fill; belongs to the store's thread."""

    cache: ChunkCache
    pool: AreaPool

    @classmethod
    def allocate(cls, config: ImpressConfig, shape: KVShape, device: torch.device) -> StoreMemory:
        """As large as the options say; `device` is where attention runs.

        Raises:
            ConfigError: there is not enough.
        """
        policy = make_policy(config)
        cache = ChunkCache(
            shape,
            config.chunk_tokens,
            policy.replacement_rule(),
            device=device,
            device_bytes=config.device_bytes if policy.stores else 0,
            host_bytes=config.host_bytes - config.buffer_bytes if policy.stores else 0,
        )
        # Chunks are cached by whole pages, also where they end inside one.
        pool = AreaPool(
            config.buffer_bytes, pin=device.type == "cuda", spare_bytes=cache.page.page_bytes
        )
        return cls(cache, pool)

    def emptied(self, config: ImpressConfig) -> StoreMemory:
        """The same memory for another store; the one that had it must not read any more.

        Buffers that reads are still filling are used again when these have ended.
        """
        return StoreMemory(self.cache.emptied(make_policy(config).replacement_rule()), self.pool)

    def close(self) -> None:
        """Give it back."""
        self.pool.close()
        self.cache.close()
