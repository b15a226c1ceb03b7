"""What SGLang's pool has of purged prefixes is freed, as far as nobody uses it.

Else a later request would be served from there, and stored again. Many nodes are freed in several
steps, between which requests are served: nodes may be split, evicted or added meanwhile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from impress_sglang.integration.prompt_saves import namespace_of
from impress_sglang.management.begun import Begun

# Of one step: nodes that are freed, and that are looked at.
MOST_FREED = 64
MOST_LOOKS = 2048


@dataclasses.dataclass(slots=True)
class _Sweep:
    """Nodes to look at; `end` is above them all, and stays."""

    waiting: list[Any]
    end: Any
    namespace: str | None
    """Only nodes of this one are meant; None: all."""


class PoolSweeps:
    """Those of one tree cache; the scheduler's thread owns them."""

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._sweeps = Begun[str, _Sweep]()

    def step(self, order: str, namespace: str | None, prefix: RadixKey | None) -> tuple[int, bool]:
        """Go on with what an order says, or begin with it.

        Args:
            order: tells it from others; who has given it goes on until it is done.
            namespace: as of `namespace_of`; None: all.
            prefix: only what begins like this, in whole pages; None: all of the namespace.

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
        """The tree is another one."""
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
        # Together: an allocator copies all of its free slots each time.
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
                # What is above goes with the last that is below, also where it was split off.
                while node is not sweep.end and not node.children and not node.lock_ref:
                    tokens += self._free(node)
                    left -= 1
                    node = node.parent
        finally:
            allocator.free_group_end()
        return tokens

    def _is_there(self, node: Any) -> bool:
        """Whether a node is in the tree yet."""
        key = node.key.child_key(self._cache.page_size)
        return node.parent.children.get(key) is node

    def _free(self, node: Any) -> int:
        """As in SGLang's `evict`."""
        cache = self._cache
        cache.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
        cache._delete_leaf(node)
        cache.kv_events.record_remove(node)
        return len(node.value)
