"""What hooks, routes and orders need of the tree cache that loads within a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.paper.plugin.passes import Passes
from impress_sglang.paper.plugin.pool_sweeps import PoolSweeps
from impress_sglang.paper.plugin.retries import Retries
from impress_sglang.paper.runtime import ServingRuntime
from impress_sglang.plugin.checking import IntegrityCheck
from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.plugin.weights import WeightWatch
from impress_sglang.storage.segment import Tokens


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
        super().__init__(
            runtime.served, runtime.recent, check, weights, page_size, runtime.queue_order
        )
        self._runtime = runtime
        self._passes = passes
        self._sweeps = sweeps
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

    def tell_idle(self) -> None:
        """Tell the metrics what has happened; also polls, since no batch will come that would."""
        self._runtime.tell_metrics(idle=True)
        self._retries.poll()

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""
        self.served.poll()
        return {**self._runtime.summary(), "integrity": self.check.state}

    def foretell(self, namespace: str, tokens: Tokens, *, exactly: bool = False) -> dict[str, Any]:
        """See `Passes.foretell`."""
        return self._passes.foretell(namespace, tokens, exactly=exactly)

    def sweep(self, order: str, namespace: str | None, key: RadixKey | None) -> tuple[int, bool]:
        """See `Sweeps.step`."""
        return self._sweeps.step(order, namespace, key)
