"""Slots of SGLang's pool, also where layers with sliding windows keep tokens in rows of their own.

There the last tokens of a prefix have such rows beside their slots, and SGLang's table says which.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from torch import Tensor


class Slots(NamedTuple):
    """Slots int64 [n] of tokens, and `rows` int64 of the last of them in layers with windows.

    There are none if no layer has windows.
    """

    whole: Tensor
    rows: Tensor


class Allocation:
    """Takes slots and gives them back; the scheduler's thread owns it."""

    def __init__(self, cache: Any, window: int) -> None:
        """`window`: how many of the last tokens have rows, in whole pages; 0: none."""
        self._cache = cache
        self._own = cache.token_to_kv_pool_allocator
        self.window = window

    def available(self) -> tuple[int, int]:
        """Slots and rows that nobody has."""
        if not self.window:
            return int(self._own.available_size()), 0
        return int(self._own.full_available_size()), int(self._own.swa_available_size())

    @property
    def is_empty(self) -> bool:
        """Whether nobody has any."""
        own = self._own
        all_rows = own.size_swa if self.window else 0
        return self.available() == (own.size_full, all_rows)

    def take(self, count: int) -> Slots | None:
        """Slots for so many tokens, evicting others if need be; None without room."""
        wanted = count, min(self.window, count)
        missing = [max(own - free, 0) for own, free in zip(wanted, self.available(), strict=True)]
        if any(missing):
            self._cache.evict(EvictParams(*missing))
        if any(own > free for own, free in zip(wanted, self.available(), strict=True)):
            return None
        if not self.window:
            slots = self._own.alloc(count)
            return slots if slots is None else Slots(slots.to(torch.int64), slots[:0])
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
            return
        self._own.free_swa(slots.whole[-len(slots.rows) :])
        self._own.free_full(slots.whole)
