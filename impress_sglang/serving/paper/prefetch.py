"""Prefetches for requests while they wait; an admitted request goes on with what was read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from impress_sglang.errors import PrefixUnreadable
from impress_sglang.management.open_segments import AnySource
from impress_sglang.management.stored import StoredSpan
from impress_sglang.serving.expected_reads import Ahead
from impress_sglang.serving.paper.admission import AdmissionPlan, Waiting
from impress_sglang.serving.paper.bringing import reads_for
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.resident import ResidentPart


@dataclasses.dataclass(frozen=True, slots=True)
class Prefetch:
    """What is being read for one waiting request."""

    plan: AdmissionPlan
    source: AnySource
    timeline: Timeline


class Prefetches:
    """The sources of waiting requests, by request; owned by the scheduler's thread."""

    def __init__(self, served: ServedStore, timeline_for: Callable[[str], Timeline]) -> None:
        """`timeline_for` returns the timeline of a request, by its id."""
        self._served = served
        self._timeline_for = timeline_for
        self._waiting: dict[str, Prefetch] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._waiting

    def begin(self, rid: str, plan: AdmissionPlan) -> None:
        """Read the first layers that a plan needs, unless they are read for it or another plan."""
        store, waiting = self._served.store, self._waiting.get(rid)
        if waiting is not None:
            if waiting.plan.same_tokens(plan):
                return
            self.drop(rid)
        if not store.ahead.enabled or plan.loads_nothing or _joins(plan):
            return
        if any(reads_for(other.plan, plan) for other in self._waiting.values()):
            return
        timeline = self._timeline_for(rid)
        try:
            source = plan.open_source(store, timeline)
        except PrefixUnreadable as error:
            self._served.report_miss(rid, error)
            return
        self._waiting[rid] = Prefetch(plan, source, timeline)
        store.ahead.wait(source, math.ceil(plan.estimate.lead * source.num_layers))

    def unread(self, rid: str, plan: AdmissionPlan | None = None) -> float:
        """The share of a request's reads for which it would have to wait.

        `plan`: of the reads of this plan, all of which are left if it uses other tokens by now.
        """
        waiting = self._waiting.get(rid)
        if waiting is None or (plan is not None and not waiting.plan.same_tokens(plan)):
            return 1.0
        return waiting.plan.unread(waiting.source)

    def of(self, rid: str) -> Waiting:
        """What is read for a waiting request, for planning it."""
        return _Prefetching(rid, self._waiting)

    def order(self, rids: Sequence[str]) -> None:
        """Note the order of the queue; reads that have not begun follow it."""
        if len(self._waiting) > 1:
            waiting = [self._waiting[rid].source for rid in rids if rid in self._waiting]
            self._served.store.ahead.order(waiting)

    def take(self, rid: str, plan: AdmissionPlan) -> Prefetch | None:
        """Hand what was read for a request to the caller, if a plan still needs just that.

        For a prefix that is brought for others, too, also what was read for one of them.
        """
        prefetch = self._waiting.pop(rid, None)
        if prefetch is None:
            return self._take_from_others(rid, plan)
        if prefetch.plan.same_reads(plan):
            return prefetch
        self._served.store.close_source(prefetch.source)
        return None

    def _take_from_others(self, rid: str, plan: AdmissionPlan) -> Prefetch | None:
        for other, prefetch in self._waiting.items():
            if reads_for(prefetch.plan, plan) and prefetch.plan.spans == plan.spans:
                del self._waiting[other]
                prefetch.source.timeline = self._timeline_for(rid)
                return dataclasses.replace(prefetch, timeline=prefetch.source.timeline)
        return None

    def take_parts(self, rid: str, parts: Sequence[ResidentPart]) -> CodedSource | None:
        """Hand what was read of these parts, for this request or another, to the caller."""
        found = None
        for other in sorted(self._waiting, key=lambda other: other != rid):
            waiting = self._waiting[other]
            source = waiting.source if isinstance(waiting.source, CodedSource) else None
            if source is not None and waiting.plan.covers and source.reads(parts):
                del self._waiting[other]
                found = source
                break
        self.drop(rid)
        return found

    def drop(self, rid: str) -> None:
        """Drop what was read for a request, which no longer needs it."""
        if (prefetch := self._waiting.pop(rid, None)) is not None:
            self._served.store.close_source(prefetch.source)

    def drop_all(self) -> None:
        """Drop what was read for all requests."""
        for rid in list(self._waiting):
            self.drop(rid)


def _joins(plan: AdmissionPlan) -> bool:
    """Whether some of its tokens are being loaded: what is left to read is not known until then."""
    return any(cover.part is not None and cover.part.load is not None for cover in plan.covers)


class _Prefetching(Waiting):
    """A request that waits among others."""

    def __init__(self, rid: str, prefetches: Mapping[str, Prefetch]) -> None:
        super().__init__(rid)
        self._prefetches = prefetches

    def ahead(self, spans: Sequence[StoredSpan], *, in_codes: bool) -> Ahead | None:
        """See `Waiting.ahead`; counts reads for another request if their slots may be shared."""
        own = self._prefetches.get(self.rid)
        others = (other for other in self._prefetches.values() if other.plan.covers)
        for prefetch in others if own is None else (own,):
            source = prefetch.source
            coded = isinstance(source, CodedSource)
            if coded == in_codes and prefetch.plan.spans == tuple(spans):
                planes = source.planes if isinstance(source, CodedSource) else 0
                return Ahead(source.there, planes)
        return None
