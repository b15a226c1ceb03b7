"""What leaves a tier: policies behind one contract, and the tiers that ask them.

An item is used as a whole or not at all, and moves as a whole (AttentionStore 3.3.2). It is in one
tier at most. What a tier has no room for goes to the next one, and from the last one out of the
system; one policy decides both.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from bench.policies.sessions import Item, Request

# After so many seconds a use counts half in a score.
HALF_LIFE = 3600.0
Key = tuple[float, ...]


class Policy:
    """The contract, and FIFO: the item with the lowest key goes first.

    The key of an item may rise at any time, and fall when a request for it is admitted.
    """

    def key(self, item: Item) -> Key:
        """What the item is worth."""
        return (item.entered,)

    def use(self, item: Item, now: float) -> None:
        """Note that a request for the item is admitted."""
        item.used = now
        item.uses += 1
        # Uses weigh more with time, instead of old ones less: no score moves by itself.
        weight = now / HALF_LIFE
        high, low = max(item.log_score, weight), min(item.log_score, weight)
        item.log_score = high + math.log2(1 + 2 ** (low - high))

    def wait(self, request: Request, size: int) -> None:
        """Note that a request was queued, whose history would take `size` bytes."""

    def leave(self, request: Request, size: int) -> None:
        """Note that it has left the queue."""


class LRU(Policy):
    """What was used the longest ago."""

    def key(self, item: Item) -> Key:
        """See `Policy`."""
        return (item.used,)


class LFU(Policy):
    """What was used least often; counts stay when an item leaves."""

    def key(self, item: Item) -> Key:
        """See `Policy`."""
        return (item.uses, item.used)


class Score(Policy):
    """Uses that count half after HALF_LIFE: the store's score where all rows are important."""

    def key(self, item: Item) -> Key:
        """See `Policy`."""
        return (item.log_score, item.used)


class Belady(Policy):
    """What is wanted the latest: the optimum if all items have one size, and no real policy."""

    def key(self, item: Item) -> Key:
        """See `Policy`."""
        return (-item.next_use, item.used)


class LookAhead(Policy):
    """First what no request in a window of the queue waits for, by a base policy; then the tail.

    The window ends where the histories of its requests fill `capacity` bytes (AttentionStore
    3.3.2).
    """

    def __init__(self, base: Policy, capacity: float) -> None:
        """An infinite capacity is for the whole queue."""
        self._base = base
        self._room = capacity
        self._beyond: deque[tuple[Request, int]] = deque()

    def key(self, item: Item) -> Key:
        """See `Policy`."""
        if item.inside:
            return (1.0, -item.waiting[0].position)
        return (0.0, *self._base.key(item))

    def wait(self, request: Request, size: int) -> None:
        """See `Policy`."""
        self._beyond.append((request, size))
        self._extend()

    def leave(self, request: Request, size: int) -> None:
        """See `Policy`."""
        if request.inside:
            request.item.inside -= 1
            self._room += 0 if request.item.inside else size
            self._extend()

    def _extend(self) -> None:
        while self._beyond:
            request, size = self._beyond[0]
            if request.queued:
                more = 0 if request.item.inside else size
                if more > self._room:
                    return
                self._room -= more
                request.inside = True
                request.item.inside += 1
            self._beyond.popleft()


BASES = {"fifo": Policy, "lru": LRU, "lfu": LFU, "score": Score, "belady": Belady}


def make_policy(name: str, capacity: float) -> Policy:
    """One of BASES, or `window+BASE` and `queue+BASE`: look-ahead with and without an end.

    `capacity` is that of all tiers, in bytes.
    """
    ahead, plus, base = name.rpartition("+")
    if not plus:
        return BASES[name]()
    return LookAhead(BASES[base](), {"window": capacity, "queue": math.inf}[ahead])


class Tier:
    """A capacity in bytes, and the items in it."""

    def __init__(self, level: int, name: str, capacity: float, policy: Policy) -> None:
        self.level = level
        self.name = name
        self.capacity = capacity
        self.bytes = 0
        self._policy = policy
        # With keys that are at most those of now; other versions of an item are outdated.
        self._heap: list[tuple[Key, int, int, Item]] = []

    def add(self, item: Item) -> None:
        """Take an item in, also if there is no room."""
        item.level = self.level
        self.bytes += item.bytes
        self.weigh(item)

    def remove(self, item: Item) -> None:
        """Give an item away."""
        assert item.level == self.level
        item.level = None
        item.version += 1
        self.bytes -= item.bytes

    def weigh(self, item: Item) -> None:
        """The key of an item may have fallen, or it is held, or not any more."""
        item.version += 1
        if not item.held:
            heapq.heappush(self._heap, (self._policy.key(item), item.number, item.version, item))

    def lowest(self) -> Item:
        """The item with the lowest key that is not held."""
        while True:
            key, number, version, item = self._heap[0]
            now = self._policy.key(item)
            if version != item.version:
                heapq.heappop(self._heap)
            elif now == key:
                return item
            else:
                heapq.heapreplace(self._heap, (now, number, version, item))


class Hierarchy:
    """Tiers from the fastest to the slowest one: any of device, host and ssd."""

    def __init__(self, capacities: Sequence[tuple[str, float]], policy: Policy) -> None:
        """Names and bytes; what has no capacity is left out."""
        self.policy = policy
        real = [(name, capacity) for name, capacity in capacities if capacity]
        self.tiers = [Tier(level, *sizes, policy) for level, sizes in enumerate(real)]
        # Bytes that each tier took from the one before it.
        self.demoted = dict.fromkeys((tier.name for tier in self.tiers), 0)

    def tier_of(self, item: Item) -> Tier | None:
        """Where it is."""
        return None if item.level is None else self.tiers[item.level]

    def put(self, item: Item, size: int, level: int, now: float) -> None:
        """Place an item, from wherever it is, with a new size."""
        if item.level is None:
            item.entered = now
        else:
            self.tiers[item.level].remove(item)
        item.bytes = size
        self._place(item, level)

    def weigh(self, item: Item, *, held: bool) -> None:
        """The key of an item may have fallen; hold it, or do not."""
        item.held = held
        if item.level is not None:
            self.tiers[item.level].weigh(item)

    def _place(self, item: Item, level: int) -> None:
        while level < len(self.tiers) and item.bytes > self.tiers[level].capacity:
            level += 1
        if level == len(self.tiers):
            return
        tier = self.tiers[level]
        tier.add(item)
        while tier.bytes > tier.capacity:
            lowest = tier.lowest()
            tier.remove(lowest)
            self._place(lowest, level + 1)
            if lowest.level is not None:
                self.demoted[self.tiers[lowest.level].name] += lowest.bytes
