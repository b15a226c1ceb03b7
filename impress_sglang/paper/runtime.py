"""The runtime that serves stored prefixes in one process: its store, and the requests that use it.

Puts the parts of this package together. The scheduler (SGLang's tree cache, a benchmark) plans,
opens and releases requests; the attention backend loads their layers in between. One thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.options import OFF
from impress_sglang.paper.admission import Admission, AdmissionPlan
from impress_sglang.paper.opening import Allocate, RequestOpener
from impress_sglang.paper.prefetch import Prefetches
from impress_sglang.paper.request import StoredRequest, publish
from impress_sglang.serving.scheduling import QueueOrder
from impress_sglang.serving.service import Service
from impress_sglang.serving.why import Explainer
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.loader import LayerInputs, PrefixLoader
from impress_sglang.transfer.slots import LayerSlots

logger = logging.getLogger(__name__)


class ServingRuntime(Service):
    """Store, admission, loaders and live requests of one scheduler."""

    def __init__(
        self,
        config: ImpressConfig,
        shape: KVShape,
        identity: str,
        device: torch.device,
        hidden_size: int,
    ) -> None:
        """Open the store.

        Args:
            config: the server's options.
            shape: shapes and dtype of the model's KVs.
            identity: the model identity.
            device: where attention runs and the slots are.
            hidden_size: hidden size of the model.

        Raises:
            ConfigError: a directory cannot be written, or the caches do not fit in memory.
            StoreInUseError: another server uses it for the same model.
        """
        super().__init__(config, shape, identity, device, hidden_size)
        self.live: dict[str, StoredRequest] = {}
        """Requests that were opened and not yet released, by id."""
        self._loader = PrefixLoader(shape, self.policy.selector)
        self.prefetches = Prefetches(self.served)
        self.queue_order: QueueOrder | None = None
        """Reorders SGLang's queue; None if `--impress-schedule` is off."""
        if config.schedule != OFF:
            self.queue_order = QueueOrder(config.schedule, self.prefetches.unread)
        self.admission = Admission(config, shape, self.policy, self.served, self.estimator)
        self.explainer = Explainer(config, self.served, self.admission.least)
        """Says why a request got its prefix, or got none."""
        self._opener = RequestOpener(self.served, self.prefetches, self._loader)

    def open(
        self,
        rid: str,
        plan: AdmissionPlan,
        resident_slots: Tensor,
        report: dict[str, object],
        allocate: Allocate,
    ) -> StoredRequest | None:
        """Admit a request with its planned prefix; None if it must do without one.

        See `RequestOpener.open`.
        """
        try:
            request = self._opener.open(rid, plan, resident_slots, report, allocate)
        except PrefixUnreadable as error:
            self.served.report_miss(rid, error)
            request = None
        if request is not None:
            self.live[rid] = request
        return request

    def note_queue(self, rids: Sequence[str]) -> None:
        """Note the order of the queue: what earlier requests use is read first, evicted last."""
        if self._looks_ahead:
            self.lookahead.order(rids)
        self.prefetches.order(rids)

    def end_waiting(self, rid: str) -> None:
        """Note that a request has been admitted or is gone, and no longer waits.

        While others wait, the caches are told only after its pass: told now, they would evict first
        what it is about to read. If nobody waits, they are told now, and keep nothing for a queue.
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
        """Count a layer that is in its slots; after the last one, end loading."""
        request.end_layer()
        if request.layers_loaded == self.shape.num_layers:
            request.end_loading()
            publish(request)

    def fail(self, request: StoredRequest, error: Exception) -> None:
        """Give up a prefix that cannot be loaded; an unreadable segment is forgotten."""
        logger.warning("the stored prefix of request %s is computed: %s", request.rid, error)
        request.fail()
        if isinstance(error, PrefixUnreadable):
            self.store.report(error)

    def release(self, rid: str) -> StoredRequest | None:
        """End a request, or take it off its slots; None if it has no stored prefix.

        Its private slots belong to the caller again.
        """
        request = self.live.pop(rid, None)
        if request is not None:
            request.end_loading()
            publish(request)
        return request

    def summary(self) -> dict[str, Any]:
        """See `Service.summary`."""
        return {**super().summary(), "requests_live": len(self.live)}
