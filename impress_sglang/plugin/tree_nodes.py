"""Nodes of SGLang's tree that are freed at once: what was purged, and what is not right.

SGLang's eviction chooses nodes itself, and has no name for these. Only nodes that nobody has locked
are freed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from impress_sglang.plugin.sweeps import Sweeps
from impress_sglang.serving.kv_class import unmarked
from impress_sglang.store.prefix_hashes import namespace_text


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


class TreeSweeps(Sweeps):
    """Sweeps in all classes of a prefix."""

    def __init__(self, cache: Any, let_go: Callable[[], None] | None = None) -> None:
        """`let_go` is called before each step, and unlocks what may be freed."""
        super().__init__(cache)
        self._let_go = let_go

    def step(self, order: str, namespace: str | None, prefix: RadixKey | None) -> tuple[int, bool]:
        """See `Sweeps.step`."""
        if self._let_go is not None:
            self._let_go()
        return super().step(order, namespace, prefix)

    def _namespace_of(self, node: Any) -> str | None:
        key = node.key
        return None if key is None else namespace_text(unmarked(key.extra_key), key.cache_salt)

    def _find(self, prefix: RadixKey) -> list[Any]:
        found = []
        # The classes of a prefix differ in their keys, and so does how they begin in the tree.
        keys = {node.key.extra_key for node in self._cache.root_node.children.values()}
        for own in keys:
            if unmarked(own) != prefix.extra_key:
                continue
            key = RadixKey(array("q", prefix.token_ids), own, cache_salt=prefix.cache_salt)
            match = match_resident(self._cache, key)
            # SGLang may have turned it into a key of pairs, whose last page reaches beyond it: what
            # has the pages before goes, too.
            whole = len(key) // self._cache.page_size * self._cache.page_size
            if 0 < whole <= match.device_prefix_len:
                found.append(self._cache.tree_core.node_by_id(match.last_device_node))
        return found

    def _is_there(self, node: Any) -> bool:
        return node.parent is not None and node in node.parent.children.values()

    def _is_locked(self, node: Any) -> bool:
        return is_locked(node)

    def _free(self, node: Any) -> int:
        return free_leaf(self._cache, node)
