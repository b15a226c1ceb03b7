"""What serves stored prefixes in one process: its store, and the requests that use it.

Puts the parts of this package together. Whoever schedules (SGLang's tree cache, a benchmark) plans,
opens and releases requests; whoever computes loads their layers in between. One thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from impress_sglang.attention.rotation import KeyRotation
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.management.lookahead import LookAhead
from impress_sglang.management.policies import make_policy
from impress_sglang.management.residents import ResidentParts
from impress_sglang.management.store import PrefixStore
from impress_sglang.options import EXACT_BITS, OFF, ON
from impress_sglang.serving.admission import Admission, AdmissionPlan
from impress_sglang.serving.blend_plan import BlendPlan
from impress_sglang.serving.blending import Blending, fits
from impress_sglang.serving.bringing import Bringing
from impress_sglang.serving.clocks import clock_for
from impress_sglang.serving.estimate import Estimator, RequestLengths
from impress_sglang.serving.loading import Loaders, RecomputedLoading
from impress_sglang.serving.metrics import ServingMetrics
from impress_sglang.serving.opening import Allocate, RequestOpener
from impress_sglang.serving.prefetch import Prefetches
from impress_sglang.serving.recent import RecentRequests
from impress_sglang.serving.report import RequestTotals, publish
from impress_sglang.serving.request import StoredRequest
from impress_sglang.serving.scheduling import QueueOrder
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.serving.why import Explainer
from impress_sglang.storage.layout import KVShape
from impress_sglang.timeline import NO_TIMELINE, RequestTimeline, Timeline, TimelineWriter
from impress_sglang.transfer.loader import LayerInputs
from impress_sglang.transfer.memory import MemorySource
from impress_sglang.transfer.slots import LayerSlots

logger = logging.getLogger(__name__)


class ServingRuntime:
    """Store, admission, loaders and live requests of one scheduler."""

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        identity: str,
        device: torch.device,
        hidden_size: int,
        *,
        free: Callable[[Tensor], None],
        page_size: int = 1,
        timeline_for: Callable[[str], Timeline] | None = None,
    ) -> None:
        """Open the store.

        Args:
            config: of the server.
            shape: of the model's KVs.
            identity: names its weights.
            device: where attention runs and slots are.
            hidden_size: of the model.
            free: takes slots back, int64 [n], in whole pages.
            page_size: of the pool of slots.
            timeline_for: gives a request's, by its name; None for what the options say.

        Raises:
            ConfigError: a directory cannot be written, or the caches do not fit in memory.
            StoreInUseError: another server uses it for the same model.
        """
        self.config = config
        self.shape = shape
        self.policy = make_policy(config)
        self.totals = RequestTotals()
        self.recent = RecentRequests(show_prompts=config.show_prompts == ON)
        self.metrics: ServingMetrics | None = None
        """Where Prometheus finds the totals, if somebody asks for that."""
        self.live: dict[str, StoredRequest] = {}
        self.bringing = Bringing(self.live)
        """Requests that were opened and not released."""
        self.blending: Blending | None = None
        """How requests reuse text that is no prefix, if they may."""
        self.describe_pool: Callable[[], dict[str, int]] = dict
        """What of the pool of slots is whose, in tokens, from who has the pool."""
        self._page_size = page_size
        self._looks_ahead = config.lookahead == ON
        self.lookahead = LookAhead(tells=self._looks_ahead)
        """What requests wait for, and when it is their turn."""
        kept = self.lookahead if self._looks_ahead else None
        self.served = ServedStore(config, identity, shape, device, kept)
        self.residents = ResidentParts(free, page_size, self.lookahead)
        self.estimator = Estimator(hidden_size, overlapped=config.readahead > 0)
        self._clock = clock_for(device)
        self._timelines = TimelineWriter(config.trace_path) if config.trace_path else None
        self._loaders = Loaders.of(config, shape, self.policy)
        timeline_for = timeline_for or self._timeline_for
        self.prefetches = Prefetches(self.served, timeline_for)
        self.queue_order: QueueOrder | None = None
        """Who changes places in SGLang's queue, if somebody does."""
        if config.schedule != OFF:
            self.queue_order = QueueOrder(config.schedule, self.prefetches.unread)
        self.admission = Admission(
            config,
            shape,
            self.policy,
            self.served,
            self.residents,
            self.estimator,
            self._clock,
            page_size,
        )
        self.explainer = Explainer(config, self.served, self.admission)
        """Says why requests have a prefix, or have none."""
        self._opener = RequestOpener(
            shape.num_layers,
            device,
            self.served,
            self.residents,
            self.prefetches,
            self._loaders,
            timeline_for,
        )

    def blend_with(self, rotation: KeyRotation, block_tokens: int) -> None:
        """Let requests blend whose keys move so; `block_tokens` are computed at once, at most."""
        self.blending = Blending(
            self.config,
            self.shape,
            self.policy,
            self.served,
            self.estimator,
            self._page_size,
            block_tokens,
        )
        self._opener.rotation = rotation

    @property
    def store(self) -> PrefixStore:
        """The store, for who knows that one is open."""
        return self.served.store

    def open(
        self,
        rid: str,
        plan: AdmissionPlan,
        resident_slots: Tensor,
        report: dict[str, object],
        allocate: Allocate,
    ) -> StoredRequest | None:
        """Admit a request with the prefix that was planned; None if it must do without.

        See `RequestOpener.open`.
        """
        if isinstance(plan, BlendPlan):
            # They refer to each other.
            plan.notes.answer = plan.notes.asked = None
        loadings = (request.loading for request in self.live.values())
        if isinstance(plan, BlendPlan) and not fits(plan, loadings, self.config.blend_seconds):
            # Others blend in the pass that is put together now, and it does in the next one.
            return None
        try:
            request = self._opener.open(rid, plan, resident_slots, report, allocate)
        except PrefixUnreadable as error:
            self.served.report_miss(rid, error)
            request = None
        if request is not None:
            self.live[rid] = request
        elif isinstance(plan, BlendPlan):
            plan.notes.decline()
        return request

    def note_queue(self, rids: Sequence[str]) -> None:
        """Requests wait in this order now: first come, first read, and last evicted."""
        if self._looks_ahead:
            self.lookahead.order(rids)
        self.prefetches.order(rids)

    def end_waiting(self, rid: str) -> None:
        """A request is admitted, or gone, and waits for nothing.

        While others wait, the caches hear of it after its pass: what it is about to read would be
        the first to make room for them. If nobody does, nothing may be kept only for itself.
        """
        if not self.lookahead.awaits:
            self.lookahead.tell()
        if self.queue_order is not None:
            self.queue_order.forget(rid)

    def load_layer(
        self, layer: int, request: StoredRequest, inputs: LayerInputs, slots: LayerSlots
    ) -> None:
        """Fill slots with what a layer uses of a request's stored prefix.

        Raises:
            PrefixUnreadable: a chunk is missing, short or corrupt.
        """
        request.load_layer(layer, inputs, slots)
        self.store.ahead.top_up()

    def finish_layer(self, request: StoredRequest) -> None:
        """Count a layer that is in its slots; after the last one nothing is read any more."""
        request.end_layer()
        if request.layers_loaded == self.shape.num_layers:
            request.end_loading()
            self._learn(request)
            publish(request)

    def give_up_reading(self, request: StoredRequest, error: PrefixUnreadable) -> None:
        """A chunk was unreadable: forget the segment; the prefix is computed, or fails."""
        logger.warning("stored prefix of request %s is computed again: %s", request.rid, error)
        request.compute_again()
        # Their slots will hold something else than their levels say.
        self._hide_parts(request)
        self.store.report(error)

    def load_computed(self, request: StoredRequest, source: MemorySource) -> None:
        """Load the layers that are missing from KVs that were computed instead."""
        request.load_computed(RecomputedLoading(self._loaders.exact, source))

    def fail(self, request: StoredRequest) -> None:
        """End a request whose prefix can neither be read nor computed now; others go on."""
        request.fail()
        # A layer may be half in its slots, and nobody may go on with what it did not load.
        self._hide_parts(request)

    def release(self, rid: str) -> StoredRequest | None:
        """A request is over, or leaves its slots; None if it has no stored prefix.

        Private slots are the caller's again.
        """
        request = self.live.pop(rid, None)
        if request is not None:
            request.end_loading()
            publish(request)
            self.residents.leave(request.uses)
            if self._timelines is not None and isinstance(request.timeline, RequestTimeline):
                self._timelines.write(request.timeline)
        return request

    def count(self, report: dict[str, Any]) -> None:
        """A request has ended, with this report."""
        self.totals.add(report)
        if self.metrics is not None:
            self.metrics.observe(report)

    def tell_metrics(self, *, now: bool = False, idle: bool = False) -> None:
        """Tell what has been counted, once a second, or `now`; `idle`: if there is news."""
        if idle:
            # No batch comes that would do so.
            self.served.poll()
        if self.metrics is not None:
            now = now or (idle and self.metrics.has_news)
            self.metrics.tell(self._polled_summary, now=now)

    def _polled_summary(self) -> dict[str, Any]:
        self.served.poll()
        return self.summary()

    def close(self) -> None:
        """Finish writes and close the store; nothing is served after that."""
        self.served.close()

    def summary(self) -> dict[str, Any]:
        """What `GET /impress/stats` shows."""
        totals, store = dataclasses.asdict(self.totals), self.served.opened
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in totals.items()}
        return {
            "config": dataclasses.asdict(self.config),
            "identity": self.served.identity,
            "suspended": self.served.suspended,
            "probe_kv_heads": list(self.shape.probe_kv_heads),
            "kv_heads": self.shape.num_kv_heads,
            "requests_live": len(self.live),
            "device_pool": self.describe_pool(),
            "totals": rounded,
            "store": None if store is None else store.summary(),
            "pins": None if store is None else store.pins.summary(),
            "cache": None if store is None else store.cache_summary(),
            "reorder": None if store is None else store.reorders.summary(),
        }

    def _timeline_for(self, rid: str) -> Timeline:
        """Where a request's time goes, if that is wanted."""
        return NO_TIMELINE if self._timelines is None else RequestTimeline(rid)

    def _hide_parts(self, request: StoredRequest) -> None:
        for use in request.uses:
            self.residents.hide(use.part)

    def _learn(self, request: StoredRequest) -> None:
        """Tell the estimator what loading took besides waiting for the drive."""
        stopwatch = request.stopwatch
        if stopwatch is None or request.recomputed or request.failed:
            return
        waited = request.reads.wait_ms / 1e3
        work = RequestLengths(request.resident_len, request.num_tokens, request.new_tokens)
        whole = request.k == request.num_tokens and request.bits == EXACT_BITS

        def note(seconds: list[float]) -> None:
            took = max(seconds[0] - waited, 0.0)
            if request.blended:
                self.estimator.note_blend(work, request.computed, took)
            else:
                self.estimator.note_load(work, took, whole=whole)

        self._clock.when_known([stopwatch], note)
