"""Tracks how many approximations the KVs in each slot of the pool rest on.

Within a class, KVs loaded from codes and KVs computed after them share SGLang's tree. Stored KVs of
a request must record what they rest on. So each slot of the tree has a depth: 0 for KVs computed
after exact KVs only, or loaded exactly. Slots filled from a store are marked as well: their content
is not written back. So are slots that rest on text reused after other text: a request that accepts
less blending must not get them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOADED = 128
_BLENDED = 64
_DEPTH = _BLENDED - 1


class Provenance:
    """Depths of all slots, on the pool's device; nothing is read until codes are loaded."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._marks = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        self.mixed = False
        """Whether any slot of the tree may not be exact."""
        self._loaded = False

    def clear(self) -> None:
        """Forget all marks, as the tree is empty."""
        self.mixed = self._loaded = False

    def mark(
        self, slots: Tensor, depth: int, *, loaded: bool = True, blended: bool = False
    ) -> None:
        """Mark slots, int64 [n]; KVs computed after them have this `depth`.

        `loaded` from a store, or `blended` here; or both: stored after reused text.
        """
        if not self._loaded:
            # Marks from before are out of date.
            self._marks.zero_()
        self._loaded, self.mixed = True, self.mixed or depth > 0
        self._marks[slots] = _LOADED * loaded | _BLENDED * blended | min(depth, _DEPTH)

    def mark_computed(self, prefix: Tensor, fresh: Tensor) -> None:
        """Mark slots `fresh` as computed after those of `prefix`; int64 each."""
        if not self._loaded:
            return
        if not len(prefix):
            self._marks[fresh] = 0
            return
        marks = self._marks[prefix]
        self._marks[fresh] = (marks & _DEPTH).amax() | (marks & _BLENDED).amax()

    def blended(self, slots: Tensor) -> bool:
        """Whether KVs in slots, int64 [n], rest on text that was reused after other text."""
        return self.mixed and len(slots) > 0 and bool((self._marks[slots] & _BLENDED).any())

    def depth(self, slots: Tensor) -> int:
        """Return the depth of KVs computed in slots, int64 [n], a path of the tree."""
        if not self.mixed or not len(slots):
            return 0
        return int((self._marks[slots] & _DEPTH).amax())

    def loaded_before(self, slots: Tensor) -> int:
        """Return the end of the last loaded slot of a path; 0 if none was loaded."""
        if not self._loaded:
            return 0
        loaded = (self._marks[slots] >= _LOADED).nonzero()
        return int(loaded[-1]) + 1 if len(loaded) else 0
