"""What hooks, routes and orders need of the tree cache that loads beside the model's passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from impress_sglang.options import OFF
from impress_sglang.plugin.checking import IntegrityCheck
from impress_sglang.plugin.known import KnownRequests
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.plugin.tree_nodes import TreeSweeps
from impress_sglang.plugin.weights import WeightWatch
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.load_planner import LoadPlanner
from impress_sglang.serving.report import new_report
from impress_sglang.serving.scheduling import QueueOrder
from impress_sglang.serving.service import Service
from impress_sglang.serving.sights import Sights
from impress_sglang.serving.why import Asked
from impress_sglang.storage.quality import EXACT
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.policies import LoadOptions


class Attachable(Protocol):
    """A tree cache that serves once the scheduler is complete."""

    loads: PrefixLoads | None
    """The load jobs; None before."""

    def attach(self, scheduler: Any) -> None:
        """Begin to serve."""


class ServedTree(ServedCache):
    """Passes on to the parts of a tree cache."""

    def __init__(
        self,
        cache: UnifiedRadixCache,
        owner: Attachable,
        service: Service,
        planner: LoadPlanner,
        known: KnownRequests,
        sights: Sights | None,
        check: IntegrityCheck,
        weights: WeightWatch,
    ) -> None:
        """`owner` is the cache; `sights`: see `WriteBack.sights`."""
        order = None
        if service.config.schedule != OFF:
            order = QueueOrder(service.config.schedule, self._unread)
        super().__init__(service.served, service.recent, check, weights, cache.page_size, order)
        self._owner = owner
        self._service = service
        self._planner = planner
        self._known = known
        self._sights = sights
        self._sweeps = TreeSweeps(cache)

    def attach(self, scheduler: Any) -> None:
        """See `ServedCache.attach`."""
        self._owner.attach(scheduler)

    def prefetch(self, req: Any, *, again: bool = False) -> None:
        """Note again what is cached of a waiting request; SGLang itself tells of new ones."""
        known, loads = self._known.get(req.rid), self._owner.loads
        if known is not None and loads is not None and self.queue_order is not None:
            loads.note_state(known, self.queue_order)

    def note_queue(self, rids: Sequence[str]) -> None:
        """See `ServedCache.note_queue`."""
        if self._service.lookahead.awaits:
            self._service.lookahead.order(rids)

    def tell_idle(self) -> None:
        """Wait a little for jobs, or tell the metrics what has happened."""
        if self._owner.loads is None or not self._owner.loads.rest():
            self._service.tell_metrics(idle=True)

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""
        self.served.poll()
        return {**self._service.summary(), "integrity": self.check.state}

    def foretell(self, namespace: str, tokens: Tokens, *, exactly: bool = False) -> dict[str, Any]:
        """See `ServedCache.foretell`."""
        service, sights = self._service, self._sights
        wanted = LoadOptions() if exactly else load_options_of(None, service.config)
        if exactly:
            match = self._planner.match(namespace, tokens, EXACT)
        else:
            match = self._planner.find(namespace, tokens, service.class_of(wanted))
        stored = match.num_tokens
        report = new_report(service.policy.name, stored, len(tokens))
        seen = None if sights is None else sights.note(namespace, tokens, count=False)
        why = service.explainer.foretell(Asked(report, namespace, tokens, wanted, seen))
        return {"tokens": len(tokens), "stored_tokens": stored, "why": why}

    def sweep(self, order: str, namespace: str | None, key: RadixKey | None) -> tuple[int, bool]:
        """See `Sweeps.step`."""
        return self._sweeps.step(order, namespace, key)

    def clear(self) -> None:
        """Note that the tree is empty."""
        self._sweeps.clear()
        if self.queue_order is not None:
            self.queue_order.forget_states()

    def _unread(self, rid: str) -> float:
        return 0.0 if self._owner.loads is None else self._owner.loads.unread(rid)
