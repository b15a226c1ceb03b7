"""Frees what a tree of SGLang's has of purged prefixes, in steps."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.serving.kv_class import unmarked
from impress_sglang.store.prefix_hashes import namespace_text
from impress_sglang.store.purging import MultiStepJobs

# Most nodes that one step of a sweep frees, and that it looks at.
MOST_FREED = 64
MOST_LOOKS = 2048


@dataclasses.dataclass(slots=True)
class Sweep:
    """The nodes that are left to look at; `ends` are above them all, and stay."""

    waiting: list[Any]
    ends: list[Any]
    namespace: str | None
    """Only nodes of this namespace are freed; None for all."""


class Sweeps:
    """Frees what a tree has of purged prefixes, in steps between which requests are served.

    Otherwise a later request would be served from there, and stored again. Nodes may be split,
    evicted or added meanwhile. The scheduler's thread owns it.
    """

    def __init__(
        self,
        cache: Any,
        match: Callable[[RadixKey], tuple[Any, int]],
        is_locked: Callable[[Any], bool],
        free: Callable[[Any], int],
        let_go: Callable[[], None] | None = None,
    ) -> None:
        """`cache`: SGLang's tree cache.

        `match` returns the last resident node of a key, and how many tokens are resident; `free`
        frees a leaf that nobody has locked, and returns its tokens. `let_go` is called before each
        step, and unlocks what may be freed.
        """
        self._cache, self._let_go = cache, let_go
        self._match, self._is_locked, self._free = match, is_locked, free
        self._sweeps = MultiStepJobs[str, Sweep]()

    def step(self, name: str, namespace: str | None, prefix: RadixKey | None) -> tuple[int, bool]:
        """Take a step of the sweep of this name, which begins if it is new.

        Only what begins with `prefix` is swept, in whole pages, in any class, and only of a
        `namespace` (`namespace_of`); None: all. Returns how many slots came free, and whether there
        is more to do, by the same name.
        """
        if self._let_go is not None:
            self._let_go()
        sweep = self._sweeps.go_on(name, lambda: self._begin(namespace, prefix))
        freed = self._go_on(sweep)
        if not sweep.waiting:
            self._sweeps.pop(name, None)
        return freed, bool(sweep.waiting)

    def clear(self) -> None:
        """Drop all sweeps: the tree is a new one."""
        self._sweeps.clear()

    def _begin(self, namespace: str | None, prefix: RadixKey | None) -> Sweep:
        root = self._cache.root_node
        if prefix is None:
            return Sweep(list(root.children.values()), [root], namespace)
        found = []
        # The classes of a prefix differ in their keys, and so does how they begin in the tree.
        # In their order, which is the same on all ranks, as that of a set is not.
        for own in dict.fromkeys(node.key.extra_key for node in root.children.values()):
            if unmarked(own) != prefix.extra_key:
                continue
            key = RadixKey(array("q", prefix.token_ids), own, cache_salt=prefix.cache_salt)
            node, length = self._match(key)
            # SGLang may have turned it into a key of pairs, whose last page reaches beyond it: what
            # has the pages before goes, too.
            whole = len(key) // self._cache.page_size * self._cache.page_size
            if 0 < whole <= length:
                found.append(node)
        return Sweep(found, [node.parent for node in found], namespace)

    def _go_on(self, sweep: Sweep) -> int:
        looks, left, tokens = MOST_LOOKS, MOST_FREED, 0
        # As a group: an allocator copies all of its free slots each time it frees.
        allocator = self._cache.token_to_kv_pool_allocator
        allocator.free_group_begin()
        try:
            while sweep.waiting and looks > 0 and left > 0:
                node = sweep.waiting.pop()
                looks -= 1
                others = sweep.namespace not in (None, _namespace_of(node.key))
                if others or node.parent is None or node not in node.parent.children.values():
                    continue
                sweep.waiting.extend(node.children.values())
                # A node goes with the last node below it, even if it was split off meanwhile.
                while node not in sweep.ends and not node.children and not self._is_locked(node):
                    above = node.parent
                    tokens += self._free(node)
                    left -= 1
                    node = above
        finally:
            allocator.free_group_end()
        return tokens


def _namespace_of(key: RadixKey | None) -> str | None:
    return None if key is None else namespace_text(unmarked(key.extra_key), key.cache_salt)
