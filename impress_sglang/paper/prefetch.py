"""Prefetches for requests while they wait; an admitted request goes on with what was read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.paper.admission import AdmissionPlan
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.store.stored import StoredSpan
from impress_sglang.transfer.source import SegmentSource


@dataclasses.dataclass(frozen=True, slots=True)
class Prefetch:
    """What is being read for one waiting request."""

    plan: AdmissionPlan
    source: SegmentSource


class Prefetches:
    """The sources of waiting requests, by request; owned by the scheduler's thread."""

    def __init__(self, served: ServedStore) -> None:
        self._served = served
        self._waiting: dict[str, Prefetch] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._waiting

    def begin(self, rid: str, plan: AdmissionPlan) -> None:
        """Read the first layers that a plan needs, unless they are read already."""
        store, waiting = self._served.store, self._waiting.get(rid)
        if waiting is not None:
            if waiting.plan.same_tokens(plan):
                return
            self.drop(rid)
        if not store.ahead.enabled:
            return
        try:
            source = plan.open_source(store)
        except PrefixUnreadable as error:
            self._served.report_miss(rid, error)
            return
        self._waiting[rid] = Prefetch(plan, source)
        store.ahead.wait(source, math.ceil(plan.estimate.lead * source.num_layers))

    def unread(self, rid: str, plan: AdmissionPlan | None = None) -> float:
        """The share of a request's reads for which it would have to wait.

        `plan`: of the reads of this plan, all of which are left if it uses other tokens by now.
        """
        waiting = self._waiting.get(rid)
        if waiting is None or (plan is not None and not waiting.plan.same_tokens(plan)):
            return 1.0
        return waiting.source.unread

    def there(self, rid: str, spans: Sequence[StoredSpan]) -> float:
        """The share of the layers of some spans that was read for a waiting request."""
        waiting = self._waiting.get(rid)
        if waiting is None or waiting.plan.spans != tuple(spans):
            return 0.0
        return waiting.source.there

    def order(self, rids: Sequence[str]) -> None:
        """Note the order of the queue; reads that have not begun follow it."""
        if len(self._waiting) > 1:
            waiting = [self._waiting[rid].source for rid in rids if rid in self._waiting]
            self._served.store.ahead.order(waiting)

    def take(self, rid: str, plan: AdmissionPlan) -> Prefetch | None:
        """Hand what was read for a request to the caller, if a plan still needs just that."""
        prefetch = self._waiting.pop(rid, None)
        if prefetch is None or prefetch.plan.same_reads(plan):
            return prefetch
        self._served.store.close_source(prefetch.source)
        return None

    def drop(self, rid: str) -> None:
        """Drop what was read for a request, which no longer needs it."""
        if (prefetch := self._waiting.pop(rid, None)) is not None:
            self._served.store.close_source(prefetch.source)

    def drop_all(self) -> None:
        """Drop what was read for all requests."""
        for rid in list(self._waiting):
            self.drop(rid)
