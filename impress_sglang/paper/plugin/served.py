"""What hooks, routes and admin requests need of the tree cache that loads within a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from impress_sglang.paper.plugin.passes import Passes
from impress_sglang.paper.plugin.pool_sweeps import PoolSweeps
from impress_sglang.paper.plugin.retries import Retries
from impress_sglang.paper.runtime import ServingRuntime
from impress_sglang.paper.store import PartStore
from impress_sglang.plugin.checking import IntegrityCheck
from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.plugin.weights import WeightWatch
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.stored import StoredMatch


class PaperServedCache(ServedCache):
    """Passes on to the parts of an `ImpressRadixCache`."""

    def __init__(
        self,
        runtime: ServingRuntime,
        check: IntegrityCheck,
        weights: WeightWatch,
        passes: Passes,
        sweeps: PoolSweeps,
        retries: Retries,
        prefetch: Callable[..., None],
        page_size: int,
    ) -> None:
        """`prefetch` is that of the cache."""
        order = runtime.queue_order
        super().__init__(runtime, check, weights, sweeps, passes.sights, page_size, order)
        self._runtime = runtime
        self._retries = retries
        self._prefetch = prefetch

    def attach(self, scheduler: Any) -> None:
        """See `ServedCache.attach`."""
        self._retries.attach(scheduler)

    def prefetch(self, req: Any, *, again: bool = False) -> None:
        """See `ImpressRadixCache.prefetch`."""
        self._prefetch(req, again=again)

    def note_queue(self, rids: Sequence[str]) -> None:
        """See `ServingRuntime.note_queue`."""
        self._runtime.note_queue(rids)

    def reorder(self) -> dict[str, int]:
        """See `ServedCache.reorder`."""
        store = self._runtime.store
        assert isinstance(store, PartStore)
        store.reorders.enqueue()
        store.poll()
        return store.reorders.summary()

    def tell_idle(self) -> None:
        """Tell the metrics what has happened; also polls, since no batch will come that would."""
        super().tell_idle()
        self._retries.poll()

    def find(
        self, namespace: str, tokens: Tokens, wanted: LoadOptions, *, exactly: bool
    ) -> StoredMatch:
        """See `ServedCache.find`."""
        return self._runtime.admission.find(namespace, tokens, wanted)
