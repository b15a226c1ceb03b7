"""What hooks, routes and orders need of a tree cache of ours, whichever kind of server it is in.

A tree cache has it as `impress`; SGLang's own ones have no such attribute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.plugin.checking import IntegrityCheck
from impress_sglang.plugin.weights import WeightWatch
from impress_sglang.serving.recent import RecentRequests
from impress_sglang.serving.scheduling import QueueOrder
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.storage.segment import Tokens


class ServedCache(ABC):
    """What one tree cache serves; owned by the scheduler's thread."""

    def __init__(
        self,
        served: ServedStore,
        recent: RecentRequests,
        check: IntegrityCheck,
        weights: WeightWatch,
        page_size: int,
        queue_order: QueueOrder | None,
    ) -> None:
        """`page_size`: of SGLang's pool; `queue_order` is None if the queue is not reordered."""
        self.served = served
        self.recent = recent
        self.check = check
        self.weights = weights
        self.page_size = page_size
        self.queue_order = queue_order

    def attach(self, scheduler: Any) -> None:  # noqa: B027
        """Begin to serve, for a scheduler of SGLang's that is complete."""

    @abstractmethod
    def prefetch(self, req: Any, *, again: bool = False) -> None:
        """Note what a waiting request will use, and begin to read it; `again`: it is not new."""

    @abstractmethod
    def note_queue(self, rids: Sequence[str]) -> None:
        """Note the final order of the waiting queue."""

    @abstractmethod
    def tell_idle(self) -> None:
        """Tell the metrics what has happened, before the scheduler has nothing to do."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""

    @abstractmethod
    def foretell(self, namespace: str, tokens: Tokens, *, exactly: bool = False) -> dict[str, Any]:
        """What is stored of a prompt that is not being served, and why no more of it.

        `exactly`: of KVs that were computed exactly, and not of those that a usual request takes.
        """

    @abstractmethod
    def sweep(self, order: str, namespace: str | None, key: RadixKey | None) -> tuple[int, bool]:
        """Take a step of freeing what SGLang's tree has of purged prefixes.

        Args:
            order: identifies the order; it is repeated until it is done.
            namespace: from `namespace_of`; None for all.
            key: free only what begins with it; None: all of the namespace.

        Returns:
            How many slots came free, and whether there is more to do.
        """


def served_cache_of(tree_cache: Any) -> ServedCache | None:
    """What a tree cache of SGLang's serves from our store; None if it is not ours."""
    cache: ServedCache | None = getattr(tree_cache, "impress", None)
    return cache
