"""SGLang's requests from match to end, and what a forward pass tells the tree cache of them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from impress_sglang.cost import RequestLengths
from impress_sglang.paper.admission import AdmissionPlan
from impress_sglang.paper.plugin.prompt_saves import PromptSaves
from impress_sglang.paper.runtime import ServingRuntime
from impress_sglang.paper.saving import Save
from impress_sglang.plugin.keys import as_tokens, namespace_of
from impress_sglang.plugin.reports import report_of
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.sights import Sights
from impress_sglang.serving.why import Asked, Reason, say
from impress_sglang.store.policies import LoadOptions

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class KnownRequest:
    """A request of SGLang's that is not over, and the plan that it was promised while waiting."""

    req: Any
    plan: AdmissionPlan | None = None
    counted: bool = False
    """Whether its use of the resident prefix has been counted."""
    declined: bool = False
    """Whether its plan could not be opened, so that it does without a stored prefix."""
    failed: bool = False
    """Whether loading failed in a pass, so that it does without a stored prefix."""


class KnownRequests(dict[str, KnownRequest]):
    """The known requests of one tree cache, by their id."""

    def note(self, req: Any) -> KnownRequest:
        """Note a request that is queued or matched."""
        known = self.setdefault(req.rid, KnownRequest(req))
        known.req = req
        return known

    def forget(self, rid: str) -> None:
        """Forget a request that is over, or was put back into the queue."""
        self.pop(rid, None)

    def drop_plans(self) -> None:
        """Drop all plans, so that waiting requests are matched again."""
        for known in self.values():
            known.plan = None

    def start_again(self) -> None:
        """Keep only the requests themselves: the tree is empty."""
        self.update({rid: KnownRequest(known.req) for rid, known in self.items()})


class Passes:
    """What the attention backend tells the tree cache; on the scheduler's thread."""

    def __init__(self, runtime: ServingRuntime, known: KnownRequests, saves: PromptSaves) -> None:
        self._runtime = runtime
        self._known = known
        self._saves = saves

    def begin_saves(self, rids: Sequence[str], lengths: Sequence[int]) -> dict[int, Save]:
        """Offer the prompts that the pass now beginning completes, to be saved behind it.

        If it is a request's first pass, also report why it has a prefix, or has none.

        `lengths` are tokens of each request after the pass. Returns saves by the place in `rids`.
        """
        saves = {}
        for place, (rid, length) in enumerate(zip(rids, lengths, strict=True)):
            request, known = self._runtime.live.get(rid), self._known.get(rid)
            if known is None:
                continue
            self._explain(known)
            if length != len(known.req.origin_input_ids):
                continue
            if request is not None and (request.approximate or request.failed):
                continue
            save = self._saves.begin(known.req, length)
            if save is not None:
                saves[place] = save
        return saves

    @property
    def sights(self) -> Sights | None:
        """Counts prompts; None unless that decides what is stored."""
        return self._saves.sights

    def wanted_by(self, req: Any) -> LoadOptions:
        """What a request asks for."""
        return load_options_of(req.sampling_params, self._runtime.config)

    def _explain(self, known: KnownRequest) -> None:
        req = known.req
        report = report_of(req)
        if report is None or report["why"] is not None:
            return
        if known.failed:
            report["why"] = say(Reason.DAMAGED, "computed again")
            return
        tokens = req.full_untruncated_fill_ids or req.origin_input_ids
        limit = req._compute_max_prefix_len(len(tokens))
        asked = Asked(
            report,
            namespace_of(req),
            as_tokens(tokens[:limit]),
            self.wanted_by(req),
            seen=self._saves.seen(req.rid),
            opened=not known.declined,
        )
        report["why"] = self._runtime.explainer.explain(asked)

    def note_end(self, req: Any, report: dict[str, Any]) -> None:
        """Count a request that has ended, list it among the recent ones, and learn what it took.

        The probes of SGLang's /health are not listed: they may outnumber all other requests.
        """
        runtime, times = self._runtime, req.time_stats
        runtime.count(report)
        if req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return
        prefill = max(times.prefill_finished_time - times.forward_entry_time, 0.0)
        loading = min((report["load_ms"] + report["probe_ms"]) / 1e3, prefill)
        store = runtime.served.opened
        runtime.recent.note(
            req.rid,
            "" if store is None else store.namespace(namespace_of(req)),
            req.origin_input_ids,
            report,
            waited=times.queue_duration_s,
            loading=loading,
            computing=prefill - loading,
        )
        new = len(req.origin_input_ids) - report["prefix_tokens"]
        if new <= 0 or prefill <= loading or report["recomputed"] or req.retraction_count:
            return
        runtime.estimator.note_request(report["used_tokens"], new, prefill - loading)
        if loaded := report["loaded_tokens"]:
            work = RequestLengths(report["resident_tokens"], report["stored_tokens"], new)
            took = loading - report["wait_ms"] / 1e3
            runtime.estimator.note_load(work, took, whole=loaded == work.stored)

    def fail(self, rid: str) -> None:
        """Let SGLang drop what the running pass computes of a request, and nothing of it be kept.

        SGLang does the same where an external cache could not load.
        """
        self._saves.abandon(rid)
        self._known[rid].req.discard_output_reason = FINISH_ABORT("its prefix cannot be loaded")
