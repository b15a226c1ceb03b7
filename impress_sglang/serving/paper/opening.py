"""Carries out the plan of an admitted request: takes its slots, parts and sources.

Stage: admit. `Allocate` takes n slots from SGLang's pool, int64 [n], whole pages in order; it
returns None if there is no room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from impress_sglang.attention.rotation import KeyRotation
from impress_sglang.management.residents import ResidentParts
from impress_sglang.options import EXACT_BITS
from impress_sglang.serving.paper.admission import AdmissionPlan
from impress_sglang.serving.paper.blend_plan import BlendPlan
from impress_sglang.serving.paper.blended_loading import BlendedLoading
from impress_sglang.serving.paper.bringing import brought_by
from impress_sglang.serving.paper.loading import (
    CompleteLoading,
    ExactLoading,
    Loaders,
    Loading,
    SelectiveLoading,
    SharedLoading,
)
from impress_sglang.serving.paper.prefetch import Prefetches
from impress_sglang.serving.paper.request import StoredRequest
from impress_sglang.serving.report import split_again
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.storage.quality import EXACT
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.resident import (
    PartUse,
    ResidentPart,
    have_planes,
    parts_to_read,
)
from impress_sglang.transfer.source import SegmentSource

Allocate = Callable[[int], Tensor | None]


class RequestOpener:
    """Makes `StoredRequest`s."""

    def __init__(
        self,
        num_layers: int,
        served: ServedStore,
        residents: ResidentParts,
        prefetches: Prefetches,
        loaders: Loaders,
        timeline_for: Callable[[str], Timeline],
    ) -> None:
        self._num_layers = num_layers
        self._served = served
        self._residents = residents
        self._prefetches = prefetches
        self._loaders = loaders
        self._timeline_for = timeline_for
        self.rotation: KeyRotation | None = None
        """Moves keys to other positions; None where nothing is blended."""

    def open(
        self,
        rid: str,
        plan: AdmissionPlan,
        resident_slots: Tensor,
        report: dict[str, object],
        allocate: Allocate,
    ) -> StoredRequest | None:
        """Open a request with its planned prefix; None if there are no slots for it.

        Args:
            rid: id of the request.
            plan: how it uses its prefix.
            resident_slots: int64 [plan.resident_len].
            report: its report; is changed.
            allocate: takes slots from the pool.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened.
        """
        prefetched = rid in self._prefetches
        if isinstance(plan, BlendPlan):
            opened = self._blend(rid, plan, allocate)
            report.update(blended_tokens=plan.reused)
        else:
            opened = (self._share if plan.covers else self._own)(rid, plan, allocate)
        if opened is None:
            return None
        report.update(
            path="ssd" if opened.plan.missing else "device",
            prefix_tokens=plan.stop,
            used_tokens=plan.resident_len + plan.k,
            stored_tokens=plan.work.stored,
            loaded_tokens=opened.plan.missing,
            shared_tokens=plan.k - opened.plan.missing,
            tokens=split_again(report, **opened.plan.sources),
            approximate=plan.quality != EXACT,
            prefetched=prefetched,
        )
        return StoredRequest(
            rid=rid,
            token_ids=plan.token_tensor(),
            resident_slots=resident_slots,
            slots=opened.slots,
            num_tokens=plan.work.stored,
            bits=plan.estimate.bits,
            quality=plan.quality,
            loading=opened.loading,
            report=report,
            uses=opened.uses,
            brings=brought_by(plan),
            new_tokens=plan.work.new,
            timeline=opened.timeline,
            blended=plan.blended,
        )

    def _blend(self, rid: str, plan: BlendPlan, allocate: Allocate) -> _Opened | None:
        """Take private slots, and open the runs of a blended prefix."""
        assert self.rotation is not None
        store, prefetch = self._served.store, self._prefetches.take(rid, plan)
        timeline = self._timeline_for(rid) if prefetch is None else prefetch.timeline
        first = None if prefetch is None else prefetch.source
        assert first is None or isinstance(first, CodedSource)
        loading = BlendedLoading(self._loaders.coded, store, plan, self.rotation, timeline, first)
        slots = allocate(plan.k)
        if slots is None:
            loading.close()
            return None
        return _Opened(plan, slots, loading, timeline)

    def _own(self, rid: str, plan: AdmissionPlan, allocate: Allocate) -> _Opened | None:
        """Take private slots, and a source to fill them from."""
        store, in_codes = self._served.store, plan.estimate.bits < EXACT_BITS
        if in_codes:
            store.tree.touch(plan.match)
        prefetch = self._prefetches.take(rid, plan)
        timeline = self._timeline_for(rid) if prefetch is None else prefetch.timeline
        source = plan.open_source(store, timeline) if prefetch is None else prefetch.source
        slots = allocate(plan.k)
        if slots is None:
            store.close_source(source)
            return None
        store.ahead.join(source)
        loading: Loading
        if isinstance(source, SegmentSource):
            loading = ExactLoading(self._loaders.exact, store, source)
        else:
            loading = SelectiveLoading(self._loaders.selective, store, source)
        return _Opened(plan, slots, loading, timeline)

    def _share(self, rid: str, plan: AdmissionPlan, allocate: Allocate) -> _Opened | None:
        """Use the slots of resident parts, and make new parts for tokens that are in none."""
        # Since the match, other requests may have loaded some of it, or evicted some.
        spans, first = plan.spans, plan.resident_len
        # Tokens of idle parts that nobody will use stay room: SGLang was not told of them.
        self._residents.cut_idle(spans, first)
        plan = dataclasses.replace(plan, covers=tuple(self._residents.cover(spans, first)))
        # Resident parts must not be evicted to make room for the missing ones.
        resident = [PartUse(c.part, c.span.start, c.span.stop) for c in plan.covers if c.part]
        self._residents.use(resident)
        slots = allocate(plan.missing) if plan.missing else None
        self._residents.leave(resident)
        if plan.missing and slots is None:
            return None
        uses = self._parts_of(plan, slots)
        self._residents.use(uses)
        timeline = self._timeline_for(rid)
        loading: Loading
        if have_planes(uses, plan.planes):
            self._prefetches.drop(rid)
            loading = CompleteLoading(uses)
        else:
            try:
                loading = SharedLoading(
                    self._loaders.coded,
                    self._served.store,
                    uses,
                    plan.planes,
                    timeline,
                    self._prefetches.take_parts(rid, parts_to_read(uses, plan.planes)),
                )
            except BaseException:
                self._residents.leave(uses)
                raise
        self._served.store.tree.touch(plan.match)
        return _Opened(plan, torch.cat([use.slots for use in uses]), loading, timeline, tuple(uses))

    def _parts_of(self, plan: AdmissionPlan, slots: Tensor | None) -> list[PartUse]:
        """The parts of a plan; tokens that are in none get a new part with some of `slots`."""
        uses, first = [], 0
        for cover in plan.covers:
            span, part = cover.span, cover.part
            if part is None:
                assert slots is not None
                layout = span.segment.info.layout().codes
                assert layout is not None, "the store has no codes"
                part = ResidentPart(
                    span.segment.segment_id,
                    layout,
                    self._num_layers,
                    span.start,
                    span.stop,
                    slots[first : (first := first + len(span))],
                    alone=cover.alone,
                )
                self._residents.add(part)
            uses.append(PartUse(part, span.start, span.stop))
        return uses


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """A plan as it was carried out, and what that took from the pool and the store."""

    plan: AdmissionPlan
    slots: Tensor
    loading: Loading
    timeline: Timeline
    uses: tuple[PartUse, ...] = ()
