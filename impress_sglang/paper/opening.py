"""Carries out the plan of an admitted request: takes its slots, and opens its source.

Stage: admit. `Allocate` takes n slots from SGLang's pool, int64 [n]; it returns None if there is no
room.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from impress_sglang.paper.admission import AdmissionPlan
from impress_sglang.paper.loading import SourceLoading
from impress_sglang.paper.prefetch import Prefetches
from impress_sglang.paper.request import StoredRequest
from impress_sglang.serving.report import split_again
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.storage.quality import EXACT
from impress_sglang.transfer.loader import PrefixLoader

Allocate = Callable[[int], Tensor | None]


class RequestOpener:
    """Makes `StoredRequest`s."""

    def __init__(self, served: ServedStore, prefetches: Prefetches, loader: PrefixLoader) -> None:
        self._served = served
        self._prefetches = prefetches
        self._loader = loader

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
        store, prefetched = self._served.store, rid in self._prefetches
        prefetch = self._prefetches.take(rid, plan)
        source = plan.open_source(store) if prefetch is None else prefetch.source
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
            prefetched=prefetched,
        )
        return StoredRequest(
            rid=rid,
            resident_slots=resident_slots,
            slots=slots,
            num_tokens=plan.work.stored,
            quality=plan.quality,
            loading=SourceLoading(self._loader, store, source),
            report=report,
        )
