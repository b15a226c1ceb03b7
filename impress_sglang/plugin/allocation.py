"""Slots of SGLang's pool, also where other layers keep something in rows of their own.

With sliding windows the last tokens of a prefix have such rows beside their slots, and SGLang's
table says which. A state is one row at the end of a prefix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from torch import Tensor


class Slots(NamedTuple):
    """Slots int64 [n] of tokens, and `rows` int64 of the last of them in layers with windows, or of
    a state; there are none without these.
    """

    whole: Tensor
    rows: Tensor


class Allocation:
    """Takes slots and gives them back; the scheduler's thread owns it."""

    def __init__(self, cache: Any, window: int, *, states: bool = False) -> None:
        """`window`: how many of the last tokens have rows, in whole pages; 0: none.

        `states`: whether the model has any.
        """
        self._cache = cache
        self._own = cache.token_to_kv_pool_allocator
        self._states = cache.req_to_token_pool.mamba_allocator if states else None
        self.window = window

    @property
    def has_rows(self) -> bool:
        """Whether there are any but slots."""
        return bool(self.window) or self._states is not None

    def protected_rows(self) -> int:
        """Rows that are locked in SGLang's tree."""
        core = self._cache.tree_core
        return int(core.swa_protected_size() if self.window else core.mamba_protected_size())

    def room(self, slots: int, rows: int) -> EvictParams:
        """What SGLang is to evict."""
        if self._states is not None:
            return EvictParams(slots, mamba_num=rows)
        return EvictParams(slots, rows)

    def available(self) -> tuple[int, int]:
        """Slots and rows that nobody has."""
        if not self.window:
            rows = 0 if self._states is None else self._states.available_size()
            return int(self._own.available_size()), int(rows)
        return int(self._own.full_available_size()), int(self._own.swa_available_size())

    @property
    def is_empty(self) -> bool:
        """Whether nobody has any."""
        own = self._own
        all_rows = own.size_swa if self.window else 0
        if self._states is not None:
            all_rows = self._states.size
        return self.available() == (own.size_full, all_rows)

    def take(self, count: int) -> Slots | None:
        """Slots for so many tokens, evicting others if need be; None without room."""
        wanted = count, min(self.window, count) if self._states is None else 1
        missing = [max(own - free, 0) for own, free in zip(wanted, self.available(), strict=True)]
        if any(missing):
            self._cache.evict(self.room(*missing))
        if any(own > free for own, free in zip(wanted, self.available(), strict=True)):
            return None
        if not self.window:
            slots = self._own.alloc(count)
            if slots is None:
                return None
            rows = slots[:0] if self._states is None else self._states.alloc(1).to(torch.int64)
            return Slots(slots.to(torch.int64), rows)
        slots, rows = (
            pool.alloc(own).to(torch.int64)
            for pool, own in zip(
                (self._own.full_attn_allocator, self._own.swa_attn_allocator), wanted, strict=True
            )
        )
        self._own.set_full_to_swa_mapping(slots[-len(rows) :], rows)
        return Slots(slots, rows)

    def give_back(self, slots: Slots) -> None:
        """Free slots that are in nobody's tree."""
        if not self.window:
            self._own.free(slots.whole)
            self.give_rows_back(slots.rows)
            return
        self._own.free_swa(slots.whole[-len(slots.rows) :])
        self._own.free_full(slots.whole)

    def give_rows_back(self, rows: Tensor) -> None:
        """Free a state that is in nobody's tree."""
        if self._states is not None:
            self._states.free(rows)
