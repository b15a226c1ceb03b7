"""Frees what SGLang's pool has of purged prefixes, as far as no request uses it.

Otherwise a later request would be served from there, and stored again. Many nodes are freed in
several steps, between which requests are served: nodes may be split, evicted or added meanwhile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from impress_sglang.integration.keys import namespace_of
from impress_sglang.management.begun import Begun

# Most nodes that one step frees, and that it looks at.
MOST_FREED = 64
MOST_LOOKS = 2048


@dataclasses.dataclass(slots=True)
class _Sweep:
    """The nodes that are left to look at; `end` is above them all, and stays."""

    waiting: list[Any]
    end: Any
    namespace: str | None
    """Only nodes of this namespace are freed; None for all."""


class PoolSweeps:
    """The sweeps of one tree cache; owned by the scheduler's thread."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._sweeps = Begun[str, _Sweep]()

    def step(self, order: str, namespace: str | None, prefix: RadixKey | None) -> tuple[int, bool]:
        """Take a step of the sweep that an order asks for; begin it if it is new.

        Args:
            order: identifies the order; whoever gave it repeats it until it is done.
            namespace: from `namespace_of`; None for all.
            prefix: sweep only what begins with it, in whole pages; None: all of the namespace.

        Returns:
            How many slots came free, and whether there is more to do.
        """
        sweep = self._sweeps.get(order)
        if sweep is None:
            sweep = self._sweeps.begin(order, self._begin(namespace, prefix))
        freed = self._go_on(sweep)
        if not sweep.waiting:
            self._sweeps.end(order)
        return freed, bool(sweep.waiting)

    def clear(self) -> None:
        """Drop all sweeps: the tree is a new one."""
        self._sweeps.clear()

    def _begin(self, namespace: str | None, prefix: RadixKey | None) -> _Sweep:
        root = self._cache.root_node
        if prefix is None:
            return _Sweep(list(root.children.values()), root, namespace)
        match = RadixCache.match_prefix(self._cache, MatchPrefixParams(key=prefix))
        if match.device_prefix_len < len(prefix):
            return _Sweep([], root, namespace)
        last = match.last_device_node
        return _Sweep([last], last.parent, namespace)

    def _go_on(self, sweep: _Sweep) -> int:
        looks, left, tokens = MOST_LOOKS, MOST_FREED, 0
        # As a group: an allocator copies all of its free slots each time it frees.
        allocator = self._cache.token_to_kv_pool_allocator
        allocator.free_group_begin()
        try:
            while sweep.waiting and looks > 0 and left > 0:
                node = sweep.waiting.pop()
                looks -= 1
                others = sweep.namespace not in (None, namespace_of(node.key))
                if others or not self._is_there(node):
                    continue
                sweep.waiting.extend(node.children.values())
                # A node goes with the last node below it, even if it was split off meanwhile.
                while node is not sweep.end and not node.children and not node.lock_ref:
                    tokens += self._free(node)
                    left -= 1
                    node = node.parent
        finally:
            allocator.free_group_end()
        return tokens

    def _is_there(self, node: Any) -> bool:
        """Whether a node is still in the tree."""
        key = node.key.child_key(self._cache.page_size)
        return node.parent.children.get(key) is node

    def _free(self, node: Any) -> int:
        """Free a leaf as SGLang's `evict` does; returns its number of slots."""
        cache = self._cache
        cache.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
        cache._delete_leaf(node)
        cache.kv_events.record_remove(node)
        return len(node.value)
