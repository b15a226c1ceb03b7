"""Finds, locks and frees nodes of SGLang's tree, for purges and failed loads.

SGLang's eviction chooses nodes itself, and has no interface for this. Only unlocked nodes are
freed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import BASE_COMPONENT_TYPE, ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from torch import Tensor

from impress_sglang.serving.kv_class import request_extra_key
from impress_sglang.store.orders import MultiStepJobs
from impress_sglang.store.prefix_hashes import namespace_text

# Most nodes that one step of a sweep frees, and visits.
MAX_FREED = 64
MAX_VISITED = 2048


def match_resident(cache: UnifiedRadixCache, key: RadixKey) -> MatchResult:
    """Match a key with the resident tokens, without a request."""
    return cache._match_tree(MatchPrefixParams(key=key))


def last_node(cache: UnifiedRadixCache, key: RadixKey) -> tuple[Any, int]:
    """Return the last resident node of a key, and the number of resident tokens."""
    match = match_resident(cache, key)
    node, length = cache.tree_core.node_by_id(match.last_device_node), match.device_prefix_len
    while length < match.full_kv_hit_length:
        # Not usable now: layers with windows lack the KVs before the next token.
        node = node.children[key.child_key_at(length, cache.page_size)]
        length += len(node.key)
    return node, length


def is_locked(node: Any) -> bool:
    return bool(node.component_data[BASE_COMPONENT_TYPE].lock_ref)


def lock_windows(cache: UnifiedRadixCache, last: Any, since: int) -> tuple[list[Any], int]:
    """Lock the SWA KVs of the tokens from `since` on up to the node `last`.

    A lock holds those of few tokens before its node. Returns the locks, and the first token from
    which on all KVs are present.
    """
    locks, first = list[Any](), len(cache.path_device_indices(last))
    node = cache.tree_core.node_by_id(last)
    while first > since and node.component_data[ComponentType.SWA].value is not None:
        locks.append(cache.lock(node.id))
        first -= len(node.key)
        node = node.parent
    return locks, first


def lock_states(cache: UnifiedRadixCache, last: Any) -> list[Any]:
    """Lock the states before the node `last`, as a lock holds only the state of its node."""
    locks, node = list[Any](), cache.tree_core.node_by_id(last).parent
    while node is not None:
        if node.component_data[ComponentType.MAMBA].value is not None:
            locks.append(cache.lock(node.id))
        node = node.parent
    return locks


def last_state(cache: UnifiedRadixCache, last: Any, limit: int) -> tuple[Any, int, Tensor | None]:
    """Find the last state up to a node of the tree, after at most `limit` tokens.

    Returns its node, the number of tokens up to it, and its slot, int64 [1].
    """
    count, node = len(cache.path_device_indices(last)), cache.tree_core.node_by_id(last)
    while count:
        slot = node.component_data[ComponentType.MAMBA].value
        if count <= limit and slot is not None:
            return node.id, count, slot.long()
        count -= len(node.key)
        node = node.parent
    return last, 0, None


def free_leaf(cache: UnifiedRadixCache, node: Any) -> int:
    """Free an unlocked leaf, as SGLang's eviction does; returns its tokens."""
    tracker = dict.fromkeys(cache.tree_components, 0)
    cache._evict_device_leaf(node.id, tracker)
    return int(tracker[BASE_COMPONENT_TYPE])


def drop_below(cache: UnifiedRadixCache, key: RadixKey, start: int) -> None:
    """Free the nodes below the leading tokens of a key, from token `start` on."""
    (node, stop), nodes = last_node(cache, key), []
    while stop > start:
        stop, nodes = stop - len(node.key), [node]
        node = node.parent
    for node in nodes:
        nodes.extend(node.children.values())
    for node in reversed(nodes):
        assert not is_locked(node), "what is not right is in use"
        free_leaf(cache, node)


class Sweeps(MultiStepJobs[str, Iterator[tuple[int, bool]]]):
    """Frees the resident nodes of purged prefixes, in steps between which requests are served.

    Otherwise a later request would use them, and store them again. Nodes may be split, evicted or
    added meanwhile. Cleared with a new tree. Thread: scheduler.
    """

    def __init__(self, cache: Any, let_go: Callable[[], None] | None = None) -> None:
        """For SGLang's tree; before each step `let_go` unlocks nodes that may be freed."""
        super().__init__()
        self._cache, self._give_up_saves = cache, let_go

    def step(self, name: str, namespace: str | None, prefix: RadixKey | None) -> tuple[int, bool]:
        """Take a step of the sweep of this name, which begins if it is new.

        Sweeps nodes that begin with `prefix`, in whole pages, in any class, and in a `namespace`
        (`namespace_of`); None: all. Returns the slots freed, and whether there is more to do, by
        the same name.
        """
        if self._give_up_saves is not None:
            self._give_up_saves()
        sweep = self.get_or_begin(name, lambda: self._sweep(namespace, prefix))
        # A sweep that fails starts again.
        del self[name]
        freed, more = next(sweep)
        if more:
            self[name] = sweep
        return freed, more

    def _sweep(self, namespace: str | None, prefix: RadixKey | None) -> Iterator[tuple[int, bool]]:
        """Yield the result of each `step` of a sweep."""
        allocator, waiting = self._cache.token_to_kv_pool_allocator, self._tops(prefix)
        # Nodes above all of them stay.
        ends = list(dict.fromkeys(node.parent for node in waiting))
        while True:
            visits, frees, tokens = MAX_VISITED, MAX_FREED, 0
            # As a group: each free of an allocator copies all of its free slots.
            allocator.free_group_begin()
            try:
                while waiting and visits > 0 and frees > 0:
                    node = waiting.pop()
                    visits -= 1
                    if node.parent is None or node not in node.parent.children.values():
                        continue
                    key = node.key
                    found_in = namespace_text(request_extra_key(key.extra_key), key.cache_salt)
                    if namespace not in (None, found_in):
                        continue
                    waiting.extend(node.children.values())
                    # Free a node after the last node below it, even if it was split off meanwhile.
                    while node not in ends and not node.children and not is_locked(node):
                        parent = node.parent
                        tokens += free_leaf(self._cache, node)
                        frees -= 1
                        node = parent
            finally:
                allocator.free_group_end()
            yield tokens, bool(waiting)

    def _tops(self, prefix: RadixKey | None) -> list[Any]:
        """Return the uppermost nodes that begin with a prefix."""
        tops, matching = list(self._cache.root_node.children.values()), list[Any]()
        if prefix is None:
            return tops
        # Each class of a prefix has its own key, and top node. All ranks need the same order, which
        # a set does not have.
        for extra_key in dict.fromkeys(node.key.extra_key for node in tops):
            if request_extra_key(extra_key) != prefix.extra_key:
                continue
            key = RadixKey(array("q", prefix.token_ids), extra_key, cache_salt=prefix.cache_salt)
            node, length = last_node(self._cache, key)
            # SGLang may have made it a key of pairs, whose last page reaches beyond it: nodes with
            # the pages before are freed, too.
            whole = len(key) // self._cache.page_size * self._cache.page_size
            if 0 < whole <= length:
                matching.append(node)
        return matching
