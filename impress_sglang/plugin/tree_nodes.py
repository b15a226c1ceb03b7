"""Nodes of SGLang's tree that are freed at once: what was purged, and what is not right.

SGLang's eviction chooses nodes itself, and has no name for these. Only nodes that nobody has locked
are freed.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE, ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


def match_resident(cache: UnifiedRadixCache, key: RadixKey) -> MatchResult:
    """What is resident of a key, for nobody's request."""
    return cache._match_tree(MatchPrefixParams(key=key))


def last_node(cache: UnifiedRadixCache, key: RadixKey) -> tuple[Any, int]:
    """The last resident node of a key, and how many of its tokens are resident."""
    match = match_resident(cache, key)
    node, length = cache.tree_core.node_by_id(match.last_device_node), match.device_prefix_len
    while length < match.full_kv_hit_length:
        # Nobody can use it now: layers with windows have lost what is before the next token.
        node = node.children[key.child_key_at(length, cache.page_size)]
        length += len(node.key)
    return node, length


def is_locked(node: Any) -> bool:
    """Whether somebody has locked a node."""
    return bool(node.component_data[BASE_COMPONENT_TYPE].lock_ref)


def lock_windows(cache: UnifiedRadixCache, last: Any, since: int) -> tuple[list[Any], int]:
    """Lock what layers with windows have of the tokens from `since` on up to the node `last`.

    A lock holds this of few tokens before its node. Returns the locks, and where the tokens begin
    that have all KVs up to the last one.
    """
    locks, first = list[Any](), len(cache.path_device_indices(last))
    node = cache.tree_core.node_by_id(last)
    while first > since and node.component_data[ComponentType.SWA].value is not None:
        locks.append(cache.lock(node.id))
        first -= len(node.key)
        node = node.parent
    return locks, first


def lock_states(cache: UnifiedRadixCache, last: Any) -> list[Any]:
    """Lock the states before the node `last`, as a lock holds only that of its node."""
    locks, node = list[Any](), cache.tree_core.node_by_id(last).parent
    while node is not None:
        if node.component_data[ComponentType.MAMBA].value is not None:
            locks.append(cache.lock(node.id))
        node = node.parent
    return locks


def free_leaf(cache: UnifiedRadixCache, node: Any) -> int:
    """Free a leaf that nobody has locked, as SGLang's eviction does; returns its tokens."""
    tracker = dict.fromkeys(cache.tree_components, 0)
    cache._evict_device_leaf(node.id, tracker)
    return int(tracker[BASE_COMPONENT_TYPE])


def drop_below(cache: UnifiedRadixCache, key: RadixKey, start: int) -> None:
    """Free what begins with the first tokens of a key, from token `start` on."""
    node, top = last_node(cache, key)
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
