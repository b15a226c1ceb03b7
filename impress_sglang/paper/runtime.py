"""The runtime that serves stored prefixes in one process: its store, and the requests that use it.

The scheduler (SGLang's tree cache, a benchmark) plans, opens and releases requests; the attention
backend loads their layers in between. One thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.options import OFF
from impress_sglang.paper.admission import Admission, AdmissionPlan
from impress_sglang.paper.loader import PartLoader
from impress_sglang.paper.request import StoredRequest
from impress_sglang.paper.store import PartStore
from impress_sglang.serving.report import split_again
from impress_sglang.serving.scheduling import QueueOrder
from impress_sglang.serving.service import Service
from impress_sglang.serving.why import Explainer
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.quality import EXACT

logger = logging.getLogger(__name__)


class ServingRuntime(Service):
    """Store, admission, loader and live requests of one scheduler."""

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
        super().__init__(config, shape, identity, device, hidden_size, make_store=PartStore)
        self.live: dict[str, StoredRequest] = {}
        """Requests that were opened and not yet released, by id."""
        self.loader = PartLoader(shape, config.alpha)
        """Fills slots with what a layer uses."""
        self.queue_order: QueueOrder | None = None
        """Reorders SGLang's queue; None if `--impress-schedule` is off."""
        if config.schedule != OFF:
            # Nothing is read before a request is admitted.
            self.queue_order = QueueOrder(config.schedule, lambda rid: 1.0)
        self.admission = Admission(config, self.policy, self.served, self.estimator)
        self.explainer = Explainer(config, self.served, self.admission.least)
        """Says why a request got its prefix, or got none."""

    def open(
        self,
        rid: str,
        plan: AdmissionPlan,
        resident_slots: Tensor,
        report: dict[str, object],
        allocate: Callable[[int], Tensor | None],
    ) -> StoredRequest | None:
        """Admit a request with its planned prefix; None if it must do without one.

        Args:
            rid: id of the request.
            plan: how it uses its prefix.
            resident_slots: int64 [plan.resident_len].
            report: its report; is changed.
            allocate: takes n slots from SGLang's pool, int64 [n]; None if there is no room.
        """
        store = self.served.store
        assert isinstance(store, PartStore)
        try:
            whole = plan.k == plan.work.stored
            source = store.open_part(plan.match, plan.resident_len, plan.stop, whole=whole)
        except PrefixUnreadable as error:
            logger.warning("request %s does without its stored prefix: %s", rid, error)
            store.report(error)
            return None
        slots = allocate(plan.k)
        if slots is None:
            store.close_source(source)
            return None
        store.ahead.join(source)
        report.update(
            path="ssd",
            prefix_tokens=plan.stop,
            used_tokens=plan.resident_len + plan.k,
            stored_tokens=plan.work.stored,
            loaded_tokens=plan.k,
            tokens=split_again(
                report,
                resident=plan.resident_len,
                loaded=plan.k,
                unused=plan.work.stored - plan.k,
            ),
            approximate=plan.quality != EXACT,
        )
        request = StoredRequest(
            rid=rid,
            resident_slots=resident_slots,
            slots=slots,
            num_tokens=plan.work.stored,
            quality=plan.quality,
            store=store,
            source=source,
            report=report,
        )
        self.live[rid] = request
        return request

    def note_queue(self, rids: Sequence[str]) -> None:
        """Note the order of the queue: what earlier requests use is evicted last."""
        if self._looks_ahead:
            self.lookahead.order(rids)

    def reorder(self) -> dict[str, int]:
        """Search for prefixes worth reordering."""
        assert isinstance(self.store, PartStore)
        self.store.reorders.enqueue()
        self.store.poll()
        return self.store.reorders.summary()

    def end_waiting(self, rid: str) -> None:
        """Note that a request has been admitted or is gone, and no longer waits.

        While others wait, the caches are told only after its pass: told now, they would evict first
        what it is about to read. If nobody waits, they are told now, and keep nothing for a queue.
        """
        if not self.lookahead.awaits:
            self.lookahead.tell()
        if self.queue_order is not None:
            self.queue_order.forget(rid)

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
        return request

    def summary(self) -> dict[str, Any]:
        """See `Service.summary`."""
        store = self.served.opened
        reorders = store.reorders.summary() if isinstance(store, PartStore) else None
        return {**super().summary(), "reorder": reorders}
