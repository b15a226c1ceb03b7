"""A min-heap of the chunks of one tier, by priorities that live elsewhere and mostly rise.

Raising a priority touches no heap: the entry of a member may lie below its priority and is
corrected when it comes up. Lowering one adds an entry only if it falls below what is noted in the
heap. So an access costs next to nothing here, and finding the lowest O(log n) amortised.

Invariants (`check_integrity`): each member has an entry at or below its priority; the one that
`_noted` names is such an entry.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from impress_sglang import loops
from impress_sglang.tiers.rules import Floats, Ids


class LowestFirst:
    """Finds the member with the lowest priority."""

    def __init__(self, is_member: Callable[[int], bool]) -> None:
        """`is_member` says whether a chunk is in this tier now."""
        self._is_member = is_member
        self._entries: list[tuple[float, int]] = []
        # Of each member an entry that it has; infinity, or out of date, for others.
        self._noted: Floats = np.empty(0)
        # The same bytes: single elements are read faster.
        self._noted_of: Any = self._noted.data

    def __len__(self) -> int:
        """Entries, of which some may be out of date."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Memory; an entry is a tuple of two objects."""
        return 120 * len(self._entries) + self._noted.nbytes

    def resize(self, num_chunks: int) -> None:
        """Make room for the chunks [0, num_chunks)."""
        noted = np.full(num_chunks, np.inf)
        noted[: len(self._noted)] = self._noted
        self._noted, self._noted_of = noted, noted.data

    def push(self, chunk: int, priority: float) -> None:
        """A chunk is a member now."""
        heapq.heappush(self._entries, (priority, chunk))
        if priority < self._noted_of[chunk]:
            self._noted_of[chunk] = priority

    def note_falls(
        self, ids: Ids, tiers: npt.NDArray[np.uint8], tier: int, priorities: Floats
    ) -> None:
        """Priorities may have fallen: of those of the chunks that stand in this tier."""
        fallen = loops.fallen_members(ids, tiers, tier, priorities, self._noted)
        if len(fallen):
            lower = priorities[fallen].tolist()
            for chunk, priority in zip(fallen.tolist(), lower, strict=True):
                self.push(chunk, priority)

    def lowest(self, priorities: Floats | memoryview) -> tuple[float, int] | None:
        """Priority and id of the lowest member, None if there is none; it stays."""
        entries = self._entries
        while entries:
            noted, chunk = entries[0]
            if not self._is_member(chunk):
                self.pop()
                continue
            priority = float(priorities[chunk])
            if priority <= noted:
                return priority, chunk
            heapq.heapreplace(entries, (priority, chunk))
            if self._noted_of[chunk] == noted:
                self._noted_of[chunk] = priority
        return None

    def pop(self) -> None:
        """Take out what `lowest` has just returned."""
        _, chunk = heapq.heappop(self._entries)
        self._noted_of[chunk] = math.inf

    def scale(self, factor: float) -> None:
        """All priorities were multiplied by `factor` > 0."""
        self._entries = [(noted * factor, chunk) for noted, chunk in self._entries]
        heapq.heapify(self._entries)
        self._noted *= factor

    def compact(self, members: Ids, priorities: Floats) -> None:
        """Drop all entries that are out of date."""
        self._entries = list(zip(priorities[members].tolist(), members.tolist(), strict=True))
        heapq.heapify(self._entries)
        self._noted[:] = np.inf
        self._noted[members] = priorities[members]

    def check_integrity(self, members: Iterable[int], priorities: Floats) -> None:
        """Check the invariant.

        Raises:
            AssertionError: it does not hold, which is a bug.
        """
        entries: dict[int, set[float]] = {}
        for priority, chunk in self._entries:
            entries.setdefault(chunk, set()).add(priority)
        for chunk in members:
            own = entries.get(chunk, {np.inf})
            assert min(own) <= priorities[chunk]
            assert self._noted[chunk] in own
            assert self._noted[chunk] <= priorities[chunk]
