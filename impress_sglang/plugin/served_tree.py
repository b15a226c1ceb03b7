"""What hooks, routes and admin requests need of the tree cache that loads beside passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from impress_sglang.options import OFF
from impress_sglang.plugin.checking import IntegrityCheck
from impress_sglang.plugin.known import KnownRequests
from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.plugin.tree_nodes import TreeSweeps
from impress_sglang.plugin.weights import WeightWatch
from impress_sglang.plugin.write_back import WriteBack
from impress_sglang.serving.load_planner import LoadPlanner
from impress_sglang.serving.ranks import Ranks
from impress_sglang.serving.scheduling import QueueOrder
from impress_sglang.serving.service import Service
from impress_sglang.storage.quality import EXACT
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.stored import StoredMatch


class ServedTree(ServedCache):
    """Passes on to the parts of an `ImpressTreeCache`."""

    def __init__(
        self,
        cache: Any,
        service: Service,
        planner: LoadPlanner,
        known: KnownRequests,
        saves: WriteBack,
        check: IntegrityCheck,
        weights: WeightWatch,
        ranks: Ranks,
    ) -> None:
        """`cache`: an `ImpressTreeCache`."""
        order = None
        if service.config.schedule != OFF:
            order = QueueOrder(service.config.schedule, self._unread)
        # What is locked is not freed, and a rank does not know which of all writes are purged.
        sweeps = TreeSweeps(cache, None if ranks.alone else saves.give_all_up)
        sights, page_size = saves.sights, cache.page_size
        super().__init__(service, check, weights, sweeps, sights, page_size, order, ranks)
        self._cache = cache
        self._planner = planner
        self._known = known

    def attach(self, scheduler: Any) -> None:
        """See `ServedCache.attach`."""
        self._cache.attach(scheduler)

    def prefetch(self, req: Any, *, again: bool = False) -> None:
        """Note again what is cached of a waiting request; SGLang itself tells of new ones."""
        known, loads = self._known.get(req.rid), self._cache.loads
        if known is not None and loads is not None and self.queue_order is not None:
            loads.note_state(known, self.queue_order)

    def note_queue(self, rids: Sequence[str]) -> None:
        """See `ServedCache.note_queue`."""
        if self.service.lookahead.awaits:
            self.service.lookahead.order(rids)

    def tell_idle(self) -> None:
        """Wait a little for jobs, or tell the metrics what has happened."""
        if self._cache.loads is None or not self._cache.loads.rest():
            super().tell_idle()

    def find(
        self, namespace: str, tokens: Tokens, wanted: LoadOptions, *, exactly: bool
    ) -> StoredMatch:
        """See `ServedCache.find`."""
        if exactly:
            return self._planner.match(namespace, tokens, EXACT)
        return self._planner.find(namespace, tokens, self.service.class_of(wanted))

    def clear(self) -> None:
        """Note that the tree is empty."""
        self.sweeps.clear()
        if self.queue_order is not None:
            self.queue_order.forget_states()

    def _unread(self, rid: str) -> float:
        return 0.0 if self._cache.loads is None else self._cache.loads.unread(rid)
