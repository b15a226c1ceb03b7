"""What hooks, routes and orders need of the tree cache that loads beside the model's passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.integration.checking import IntegrityCheck
from impress_sglang.integration.served_cache import ServedCache
from impress_sglang.integration.tree_nodes import Sweeps
from impress_sglang.integration.weights import WeightWatch
from impress_sglang.options import OFF
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.report import new_report
from impress_sglang.serving.scheduling import QueueOrder
from impress_sglang.serving.why import Asked
from impress_sglang.storage.segment import Tokens

if TYPE_CHECKING:
    from impress_sglang.integration.tree_cache import ImpressTreeCache


class ServedTree(ServedCache):
    """Passes on to the parts of an `ImpressTreeCache`."""

    def __init__(
        self, cache: ImpressTreeCache, check: IntegrityCheck, weights: WeightWatch
    ) -> None:
        service, order = cache.service, None
        if service.config.schedule != OFF:
            order = QueueOrder(service.config.schedule, cache.unread)
        super().__init__(service.served, service.recent, check, weights, cache.page_size, order)
        self._cache = cache
        self._sweeps = Sweeps(cache)

    def attach(self, scheduler: Any) -> None:
        """See `ServedCache.attach`."""
        self._cache.attach(scheduler)

    def prefetch(self, req: Any, *, again: bool = False) -> None:
        """Note again what is cached of a waiting request; SGLang itself tells of new ones."""
        self._cache.note_state(req.rid)

    def note_queue(self, rids: Sequence[str]) -> None:
        """See `ServedCache.note_queue`."""
        if self._cache.service.lookahead.awaits:
            self._cache.service.lookahead.order(rids)

    def tell_idle(self) -> None:
        """See `ImpressTreeCache.rest`."""
        self._cache.rest()

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""
        self.served.poll()
        return {**self._cache.service.summary(), "integrity": self.check.state}

    def foretell(self, namespace: str, tokens: Tokens) -> dict[str, Any]:
        """What is stored of a prompt that is not being served, and why no more of it."""
        service, sights = self._cache.service, self._cache.saves.sights
        wanted = load_options_of(None, service.config)
        own = service.class_of(wanted)
        stored = self._cache.planner.find(namespace, tokens, own).num_tokens
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

    def hide(self, segment_ids: Iterable[str]) -> int:
        """Nothing: what was loaded is in SGLang's tree, which `sweep` frees."""
        return 0

    def tokens_in_slots(self) -> Mapping[str, int]:
        """Nothing: no slots are outside of SGLang's tree."""
        return {}
