"""On how many approximations the KVs in each slot of the pool rest.

Within a class, KVs that were loaded from codes and KVs that were computed behind them share
SGLang's tree. What is stored of a request must know what it rests on. So each slot that the tree
owns has a depth: 0 for what was computed behind exact KVs only, or loaded exactly. Slots that were
filled from a store are marked as well: what they hold is not written back. So are those that rest
on text that was reused behind other text: who would not blend as much must not get it back.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOADED = 128
_BLENDED = 64
_DEPTH = _BLENDED - 1


class Provenance:
    """Depths of all slots, on the pool's device; nothing is looked up until codes are loaded."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._marks = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        self.mixed = False
        """Whether any slot of the tree may not be exact."""
        self._loaded = False

    def clear(self) -> None:
        """Note that the tree is empty."""
        self.mixed = self._loaded = False

    def mark(
        self, slots: Tensor, depth: int, *, loaded: bool = True, blended: bool = False
    ) -> None:
        """Note what slots, int64 [n], got: KVs behind which others have this `depth`.

        `loaded` from a store, or `blended` here; or both: stored behind text that was reused.
        """
        if not self._loaded:
            # Marks of slots that the tree got before are out of date.
            self._marks.zero_()
        self._loaded, self.mixed = True, self.mixed or depth > 0
        self._marks[slots] = _LOADED * loaded | _BLENDED * blended | min(depth, _DEPTH)

    def mark_computed(self, prefix: Tensor, fresh: Tensor) -> None:
        """Note that slots `fresh` hold what was computed behind those of `prefix`; int64 each."""
        if not self._loaded:
            return
        if not len(prefix):
            self._marks[fresh] = 0
            return
        marks = self._marks[prefix]
        self._marks[fresh] = (marks & _DEPTH).amax() | (marks & _BLENDED).amax()

    def blended(self, slots: Tensor) -> bool:
        """Whether KVs in slots, int64 [n], rest on text that was reused behind other text."""
        return self.mixed and len(slots) > 0 and bool((self._marks[slots] & _BLENDED).any())

    def depth(self, slots: Tensor) -> int:
        """The depth of KVs that were computed in slots, int64 [n], a path of the tree."""
        if not self.mixed or not len(slots):
            return 0
        return int((self._marks[slots] & _DEPTH).amax())

    def loaded_before(self, slots: Tensor) -> int:
        """Where the last of the slots of a path ends that was loaded; 0 if none was."""
        if not self._loaded:
            return 0
        loaded = (self._marks[slots] >= _LOADED).nonzero()
        return int(loaded[-1]) + 1 if len(loaded) else 0
