"""A min-heap of the chunks of one tier, by priorities that live elsewhere and mostly rise.

Raising a priority touches no heap: the entry of a member may lie below its priority and is
corrected when it comes up. Lowering one adds an entry. So an access costs nothing here, and finding
the lowest costs O(log n) amortised.

Invariant (`check_integrity`): each member has an entry at or below its priority.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

import numpy as np

from impress_sglang.tiers.rules import Floats, Ids


class LowestFirst:
    """Finds the member with the lowest priority."""

    def __init__(self, is_member: Callable[[int], bool]) -> None:
        """`is_member` says whether a chunk is in this tier now."""
        self._is_member = is_member
        self._entries: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Entries, of which some may be out of date."""
        return len(self._entries)

    def push(self, chunk: int, priority: float) -> None:
        """A chunk is a member now, or its priority has fallen."""
        heapq.heappush(self._entries, (priority, chunk))

    def lowest(self, priorities: Floats | memoryview) -> tuple[float, int] | None:
        """Priority and id of the lowest member, None if there is none; it stays."""
        entries = self._entries
        while entries:
            noted, chunk = entries[0]
            if not self._is_member(chunk):
                heapq.heappop(entries)
                continue
            priority = float(priorities[chunk])
            if priority <= noted:
                return priority, chunk
            heapq.heapreplace(entries, (priority, chunk))
        return None

    def pop(self) -> None:
        """Take out what `lowest` has just returned."""
        heapq.heappop(self._entries)

    def scale(self, factor: float) -> None:
        """All priorities were multiplied by `factor` > 0."""
        self._entries = [(noted * factor, chunk) for noted, chunk in self._entries]
        heapq.heapify(self._entries)

    def compact(self, members: Ids, priorities: Floats) -> None:
        """Drop all entries that are out of date."""
        self._entries = list(zip(priorities[members].tolist(), members.tolist(), strict=True))
        heapq.heapify(self._entries)

    def check_integrity(self, members: Iterable[int], priorities: Floats) -> None:
        """Check the invariant.

        Raises:
            AssertionError: it does not hold, which is a bug.
        """
        lowest: dict[int, float] = {}
        for noted, chunk in self._entries:
            lowest[chunk] = min(noted, lowest.get(chunk, np.inf))
        assert all(lowest.get(chunk, np.inf) <= priorities[chunk] for chunk in members)
