"""What clients are told of their requests, and what is counted and learnt of them in the end."""

from __future__ import annotations

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

from impress_sglang.plugin.keys import as_tokens
from impress_sglang.plugin.known import Known, Shared, key_of
from impress_sglang.plugin.tree_nodes import match_resident
from impress_sglang.serving.load_jobs import LoadJob
from impress_sglang.serving.report import split_again
from impress_sglang.serving.why import Asked


class RequestReports:
    """Keeps the reports of requests up to date; the scheduler's thread owns it."""

    def __init__(self, shared: Shared, *, counts: bool) -> None:
        """`counts`: whether prompts are counted to decide what is stored."""
        self._cache, self._service = shared.cache, shared.service
        self._provenance, self._counts = shared.provenance, counts

    def tell_resident(self, known: Known, length: int) -> None:
        """Note how much of a prompt is resident now, what was brought for it included."""
        own, report = known.brought, known.report
        loaded, shared = min(own.loaded, length), min(own.shared, length)
        resident = max(length - loaded - shared, 0)
        report.update(
            path="ssd" if own.loaded else "device" if length else "computed",
            prefix_tokens=length,
            used_tokens=length,
            resident_tokens=resident,
            stored_tokens=length - resident,
            loaded_tokens=loaded,
            blended_tokens=own.blended,
            shared_tokens=shared,
            tokens=split_again(
                report,
                resident=resident,
                shared=shared,
                loaded=max(loaded - own.blended - own.computed, 0),
                blended=own.blended,
            ),
        )

    def tell_loaded(self, known: Known, job: LoadJob) -> None:
        """Note what a job brought; the first who waited for it tells of its reads."""
        own = known.brought
        # It may have joined for the first tokens of the job.
        resident = match_resident(self._cache, key_of(known.req)).device_prefix_len
        own.stop = min(resident, job.stop)
        brought = max(own.stop - job.start, 0)
        if job.told:
            own.shared += brought
            return
        job.told = True
        own.loaded += brought
        _, blended, computed = job.parts
        own.blended += blended
        own.computed += computed
        self.tell_reads(known, job)

    def tell_reads(self, known: Known, job: LoadJob) -> None:
        """Add what a job took to the report of a request."""
        report = known.report
        for name, count in job.reads.as_dict().items():
            report[name] = report.get(name, 0) + count
        report.update(
            bits=known.kv_class.bits,
            bits_mean=job.fills.bits,
            load_ms=round(report["load_ms"] + job.fills.seconds * 1e3 - job.reads.wait_ms, 3),
            layers_whole=self._service.shape.num_layers,
            prefetched=True,
        )
        # With `--enable-trace` a part of the span in which this is told, else nothing.
        known.req.time_stats.trace_ctx.trace_event(
            "impress.load",
            1,
            attrs={
                "tokens": len(job),
                "queued_ms": round((job.began_at - job.planned_at) * 1e3, 3),
                "read_ms": round(job.reads.wait_ms, 3),
                "restored_ms": round(job.fills.seconds * 1e3 - job.reads.wait_ms, 3),
                "ssd_bytes": job.reads.ssd_bytes,
            },
        )

    def explain(self, known: Known) -> None:
        """Say why a request that is admitted has its prefix, or lacks one."""
        report = known.report
        asked = Asked(
            report,
            known.namespace,
            as_tokens(key_of(known.req).raw_token_ids()),
            known.wanted,
            seen=known.seen or 0 if self._counts else None,
            opened=not known.declined,
            blend=None if known.blend is None else known.blend.why,
        )
        report["why"] = self._service.explainer.explain(asked)
        length = report["prefix_tokens"]
        if not known.req.output_ids:
            # It may have been put back, and have been of another class.
            report["approximate"] = False
        if self._provenance.mixed and length and not known.kv_class.exact:
            path = self._cache.path_device_indices(known.req.last_node)[:length]
            report["approximate"] = self._provenance.depth(path.long()) > 0
            if report["approximate"] and report["bits"] is None:
                report["bits"] = known.kv_class.bits

    def count(self, known: Known) -> None:
        """Count a request that has ended, list it, and learn how long computing takes.

        The probes of SGLang's /health are not listed: they may outnumber all other requests.
        """
        req, service = known.req, self._service
        times, report = req.time_stats, known.report
        service.count(report)
        if req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return
        prefill = max(times.prefill_finished_time - times.forward_entry_time, 0.0)
        computing = prefill - known.gated
        # It is loaded while it waits, and perhaps while its pass waits for the last layers.
        before_pass = times.queue_duration_s + known.gated
        loading = min(report["load_ms"] / 1e3, before_pass)
        store = service.served.opened
        service.recent.note(
            req.rid,
            "" if store is None else store.namespace(known.namespace),
            req.origin_input_ids,
            report,
            waited=before_pass - loading,
            loading=loading,
            computing=max(computing, 0.0),
        )
        new = len(req.origin_input_ids) - report["prefix_tokens"]
        if new > 0 and computing > 0 and not (known.disturbed or req.retraction_count):
            service.estimator.note_request(report["used_tokens"], new, computing)
