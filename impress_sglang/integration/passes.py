"""Requests of SGLang's between match and end, and what a forward pass does with them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from impress_sglang.integration.prompt_saves import PromptSaves, as_tokens, namespace_of
from impress_sglang.management.policies import LoadOptions
from impress_sglang.serving.admission import AdmissionPlan
from impress_sglang.serving.blend_plan import BlendNotes
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.report import new_report
from impress_sglang.serving.runtime import ServingRuntime
from impress_sglang.serving.saving import Save
from impress_sglang.serving.why import Asked
from impress_sglang.storage.segment import Tokens

logger = logging.getLogger(__name__)

# Of `meta_info`.
REPORT_KEY = "impress"


@dataclasses.dataclass(slots=True)
class KnownRequest:
    """A request of SGLang's that is not over, and what it was promised while it waits."""

    req: Any
    plan: AdmissionPlan | None = None
    counted: bool = False
    """Whether its use of resident prefixes is."""
    declined: bool = False
    """Whether it could not be opened, so that it does without a stored prefix."""
    blend: BlendNotes = dataclasses.field(default_factory=BlendNotes)
    """The same of text that is no prefix."""


class KnownRequests(dict[str, KnownRequest]):
    """Those of one tree cache, by their id."""

    def note(self, req: Any) -> KnownRequest:
        """A request is queued, or matched."""
        known = self.setdefault(req.rid, KnownRequest(req))
        known.req = req
        return known

    def forget(self, rid: str) -> None:
        """A request is over, or put back into the queue."""
        self.pop(rid, None)

    def drop_plans(self) -> None:
        """Requests that wait are matched again."""
        for known in self.values():
            known.plan, known.blend = None, BlendNotes()

    def start_again(self) -> None:
        """The tree is empty."""
        self.update({rid: KnownRequest(known.req) for rid, known in self.items()})


class Passes:
    """What the attention backend tells the tree cache; on the scheduler's thread."""

    def __init__(self, runtime: ServingRuntime, known: KnownRequests, saves: PromptSaves) -> None:
        self._runtime = runtime
        self._known = known
        self._saves = saves

    def begin_saves(self, rids: Sequence[str], lengths: Sequence[int]) -> dict[int, Save]:
        """Offer the prompts that the pass which begins now completes, to be saved behind it.

        Reports of requests that it is the first one of say why these have a prefix, or have none.

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

    def foretell(self, namespace: str, tokens: Tokens) -> dict[str, Any]:
        """What is stored of a prompt that nobody sends now, and why no more of it."""
        runtime, sights = self._runtime, self._saves.sights
        wanted = load_options_of(None, runtime.config)
        stored = runtime.admission.find(namespace, tokens, wanted).num_tokens
        report = new_report(runtime.policy.name, stored, len(tokens))
        seen = None if sights is None else sights.note(namespace, tokens, count=False)
        why = runtime.explainer.foretell(Asked(report, namespace, tokens, wanted, seen))
        return {"tokens": len(tokens), "stored_tokens": stored, "why": why}

    def wanted_by(self, req: Any) -> LoadOptions:
        """What a request asks for; what others will reuse is computed exactly for once."""
        wanted = load_options_of(req.sampling_params, self._runtime.config)
        return LoadOptions() if req.rid in self._saves.for_others else wanted

    def _explain(self, known: KnownRequest) -> None:
        req = known.req
        reports = (req.customized_info or {}).get(REPORT_KEY)
        if not reports or reports[0]["why"] is not None:
            return
        tokens = req.full_untruncated_fill_ids or req.origin_input_ids
        limit = req._compute_max_prefix_len(len(tokens))
        asked = Asked(
            reports[0],
            namespace_of(req),
            as_tokens(tokens[:limit]),
            self.wanted_by(req),
            seen=self._saves.seen(req.rid),
            opened=not known.declined,
            blend=known.blend.why,
        )
        reports[0]["why"] = self._runtime.explainer.explain(asked)

    def note_end(self, req: Any, report: dict[str, Any]) -> None:
        """A request has ended: count it, and remember it among the last ones.

        Except the probes of SGLang's /health, of which there may be more than of all others.
        """
        runtime, times = self._runtime, req.time_stats
        runtime.count(report)
        if req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return
        store = runtime.served.opened
        runtime.recent.note(
            req.rid,
            "" if store is None else store.namespace(namespace_of(req)),
            req.origin_input_ids,
            report,
            waited=times.queue_duration_s,
            prefill=max(times.prefill_finished_time - times.forward_entry_time, 0.0),
        )

    def abort(self, rid: str, reason: str) -> None:
        """End a request of the pass under way with status 503, and nothing of it is kept.

        SGLang does so itself where an external cache could not load: the request goes through its
        pass, whose output is dropped.
        """
        message = f"the stored prefix of this request cannot be used now: {reason}; send it again"
        logger.error("request %s fails: %s", rid, message)
        self._saves.abandon(rid)
        status = HTTPStatus.SERVICE_UNAVAILABLE
        self._known[rid].req.discard_output_reason = FINISH_ABORT(message, status)

    def has_failed(self, req: Any) -> bool:
        """Whether a request was ended by `abort`."""
        request = self._runtime.live.get(req.rid)
        return request is not None and request.failed
