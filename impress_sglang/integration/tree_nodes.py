"""Nodes of SGLang's tree that are freed at once: what was purged, and what is not right.

SGLang's eviction chooses nodes itself, and has no name for these. Only nodes that nobody has locked
are freed.
"""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from impress_sglang.management.begun import Begun
from impress_sglang.management.digests import namespace_text
from impress_sglang.serving.kv_class import unmarked

# Most nodes that one step of a sweep frees, and that it looks at.
MOST_FREED = 64
MOST_LOOKS = 2048


def match_resident(cache: UnifiedRadixCache, key: RadixKey) -> MatchResult:
    """What is resident of a key, for nobody's request."""
    return cache._match_tree(MatchPrefixParams(key=key))


def is_locked(node: Any) -> bool:
    """Whether somebody has locked a node."""
    return bool(node.component_data[BASE_COMPONENT_TYPE].lock_ref)


def free_leaf(cache: UnifiedRadixCache, node: Any) -> int:
    """Free a leaf that nobody has locked, as SGLang's eviction does; returns its tokens."""
    tracker = dict.fromkeys(cache.tree_components, 0)
    cache._evict_device_leaf(node.id, tracker)
    return int(tracker[BASE_COMPONENT_TYPE])


def drop_below(cache: UnifiedRadixCache, key: RadixKey, start: int) -> None:
    """Free what begins with the first tokens of a key, from token `start` on."""
    match = match_resident(cache, key)
    node, top = cache.tree_core.node_by_id(match.last_device_node), match.device_prefix_len
    while top > start:
        top -= len(node.key)
        end, node = node, node.parent
        if top <= start:
            _drop_subtree(cache, end)


def _drop_subtree(cache: UnifiedRadixCache, top: Any) -> None:
    nodes = [top]
    for node in nodes:
        nodes.extend(node.children.values())
    for node in reversed(nodes):
        assert not is_locked(node), "what is not right is in use"
        free_leaf(cache, node)


@dataclasses.dataclass(slots=True)
class _Sweep:
    """The nodes that are left to look at; `ends` are above them all, and stay."""

    waiting: list[Any]
    ends: list[Any]
    namespace: str | None
    """Only nodes of this namespace are freed; None for all."""


class Sweeps:
    """Frees what a tree has of purged prefixes, in steps between which requests are served.

    Otherwise a later request would be served from there, and stored again. Nodes may be split,
    evicted or added meanwhile.
    """

    def __init__(self, cache: UnifiedRadixCache) -> None:
        self._cache = cache
        self._sweeps = Begun[str, _Sweep]()

    def step(self, order: str, namespace: str | None, prefix: RadixKey | None) -> tuple[int, bool]:
        """Take a step of the sweep that an order asks for; begin it if it is new.

        Args:
            order: identifies the order; whoever gave it repeats it until it is done.
            namespace: from `namespace_of`; None for all.
            prefix: sweep only what begins with it, in whole pages, in any class; None: all.

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
            return _Sweep(list(root.children.values()), [root], namespace)
        found, ends = [], []
        # The classes of a prefix differ in their keys, and so does how they begin in the tree.
        keys = {node.key.extra_key for node in root.children.values()}
        for own in keys:
            if unmarked(own) != prefix.extra_key:
                continue
            key = RadixKey(array("q", prefix.token_ids), own, cache_salt=prefix.cache_salt)
            match = match_resident(self._cache, key)
            if match.device_prefix_len >= len(prefix):
                node = self._cache.tree_core.node_by_id(match.last_device_node)
                found.append(node)
                ends.append(node.parent)
        return _Sweep(found, ends, namespace)

    def _go_on(self, sweep: _Sweep) -> int:
        looks, left, tokens = MOST_LOOKS, MOST_FREED, 0
        # As a group: an allocator copies all of its free slots each time it frees.
        allocator = self._cache.token_to_kv_pool_allocator
        allocator.free_group_begin()
        try:
            while sweep.waiting and looks > 0 and left > 0:
                node = sweep.waiting.pop()
                looks -= 1
                key = node.key
                own = (
                    None if key is None else namespace_text(unmarked(key.extra_key), key.cache_salt)
                )
                if sweep.namespace not in (None, own) or not self._is_there(node):
                    continue
                sweep.waiting.extend(node.children.values())
                # A node goes with the last node below it, even if it was split off meanwhile.
                while node not in sweep.ends and not node.children and not is_locked(node):
                    above = node.parent
                    tokens += free_leaf(self._cache, node)
                    left -= 1
                    node = above
        finally:
            allocator.free_group_end()
        return tokens

    def _is_there(self, node: Any) -> bool:
        """Whether a node is still in the tree."""
        return node.parent is not None and node in node.parent.children.values()
