"""Frees what SGLang's pool has of purged prefixes, as far as no request uses it."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from impress_sglang.plugin.sweeps import Sweeps


class PoolSweeps(Sweeps):
    """Sweeps of a `RadixCache`."""

    def _find(self, prefix: RadixKey) -> list[Any]:
        match = RadixCache.match_prefix(self._cache, MatchPrefixParams(key=prefix))
        return [] if match.device_prefix_len < len(prefix) else [match.last_device_node]

    def _is_there(self, node: Any) -> bool:
        key = node.key.child_key(self._cache.page_size)
        return node.parent.children.get(key) is node

    def _is_locked(self, node: Any) -> bool:
        return bool(node.lock_ref)

    def _free(self, node: Any) -> int:
        cache = self._cache
        cache.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
        cache._delete_leaf(node)
        cache.kv_events.record_remove(node)
        return len(node.value)
