"""Tracks SGLang's requests from their first match to their end, and keeps their reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.plugin.eligibility import serve_refusal, store_refusal
from impress_sglang.plugin.pools import PoolLayers, SlotAllocator
from impress_sglang.plugin.provenance import Provenance
from impress_sglang.plugin.report_transport import attach
from impress_sglang.plugin.tree_nodes import match_resident
from impress_sglang.serving.custom_params import TRUNCATED_KEY, load_options_of, params_of
from impress_sglang.serving.job_queue import Waiter
from impress_sglang.serving.kv_class import KVClass, class_extra_key
from impress_sglang.serving.load_jobs import KeyScope, LoadJob
from impress_sglang.serving.load_planner import LoadPlanner
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.serving.report import NO_ESTIMATE, new_report, split_reported
from impress_sglang.serving.service import Service
from impress_sglang.serving.why import Detail
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.identity import weights_digest
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS, namespace_text

_DIGEST = "_impress_digest"
_MEDIA = np.iinfo(np.int32).max


@dataclasses.dataclass(slots=True)
class PrefixSources:
    """Tokens that jobs loaded for a request; they end at token `stop`."""

    loaded: int = 0  # by jobs whose reads this request reports
    shared: int = 0  # by jobs whose reads another request reports
    blended: int = 0  # part of `loaded` that is stored after other text
    computed: int = 0  # part of `loaded` that was computed between stored runs
    stop: int = 0

    def before(self, start: int) -> PrefixSources:
        """Those of the tokens before `start`, where a job loads the rest again.

        Tokens that others' jobs loaded come first in a prompt.
        """
        if (gone := self.stop - start) <= 0:
            return self
        shared = self.shared - max(gone - self.loaded, 0)
        return PrefixSources(max(self.loaded - gone, 0), max(shared, 0))


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class TrackedRequest(Waiter):
    """A request of SGLang's, which may wait for a job while it is queued."""

    req: Any
    extra_key: str | None  # as the client sent it
    options: LoadOptions
    kv_class: KVClass
    report: dict[str, Any]
    namespace: str
    storable_tokens: int | None = None  # leading tokens worth storing; None until counted
    frequent_tokens: int | None = None  # leading tokens that were requested often enough
    save_refused: bool = False  # space or write budget ran out
    planned: bool = False  # its load has been planned
    admitted: bool = False
    load_failed: bool = False  # its stored tokens could not be read
    sources: PrefixSources = dataclasses.field(default_factory=PrefixSources)
    retry_poll: int = 0  # first poll at which it may be admitted again
    requested_class: KVClass | None = None  # its class before `raise_bits`
    stored_tokens: int = 0  # leading tokens that are stored, as planned
    read_seconds: float = 0.0  # estimate for reading its stored tokens
    early_job: LoadJob | None = None  # job whose last layers its pass waits for
    layer_wait_seconds: float = 0.0  # time that its pass waited for layers
    timing_invalid: bool = False  # its pass did more than compute
    why_no_blend: Detail | None = None  # set if its text is stored and it accepts blends
    blends: bool = True  # False: never blend it, whatever is stored

    @property
    def key_scope(self) -> KeyScope:
        """Its `extra_key` with the mark of its class, and its `cache_salt`."""
        return self.req.extra_key, self.req.cache_salt

    def has_better_copy_for(self, other: TrackedRequest, count: int) -> bool:
        """Whether its class has more bits and its first `count` tokens are those of `other`."""
        mine, theirs = self.kv_class, other.kv_class
        comparable = mine.exact or mine.recompute_ratio == theirs.recompute_ratio
        better = mine.bits > theirs.bits and comparable
        namespace_key = self.extra_key, self.req.cache_salt
        if not better or namespace_key != (other.extra_key, other.req.cache_salt):
            return False
        tokens = self.req.full_untruncated_fill_ids
        return bool(tokens[:count] == other.req.full_untruncated_fill_ids[:count])

    def begins_like(self, job: LoadJob, page_size: int) -> bool:
        """Whether its prompt has a job's prefix, and at least the first page that the job loads."""
        if self.key_scope != job.key_scope:
            return False
        count = job.start + page_size
        tokens = as_tokens(self.req.full_untruncated_fill_ids[:count])
        return np.array_equal(tokens, job.tokens[:count])


@dataclasses.dataclass(eq=False)
class RequestTracker:
    """Requests of one tree cache, and the components that its parts share.

    Registers requests, chooses and changes their classes, and keeps their reports. Thread:
    scheduler. `forward_stream` is SGLang's stream for passes; `adapters` is its `LoRAManager`, if
    it has one; `by_rid` holds the requests that have not ended.
    """

    cache: Any
    service: Service
    layers: PoolLayers
    forward_stream: Any
    ranks: Ranks = ALONE
    adapters: Any = None
    by_rid: dict[str, TrackedRequest] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        layers, keys = self.layers, self.layers(0)[0]
        packed, states = layers.packed, layers.states is not None
        window = packed.window if packed is not None else 0
        layout = self.cache.page_size, layers.draft_offset, packed
        pairs = self.cache.tree_core.is_eagle
        self.planner = LoadPlanner(self.service, *layout, states=states, pairs=pairs)
        self.allocation = SlotAllocator(self.cache, window, states=states)
        self.provenance = Provenance(len(keys), keys.device)

    def register(self, req: Any, count_prompt: Callable[[TrackedRequest], bool]) -> TrackedRequest:
        """Track a request; at its first match, choose its class and mark its key with it.

        `count_prompt` counts a request that may be stored; returns whether to compute it exactly.
        """
        tracked = self.by_rid.get(req.rid)
        if tracked is not None and tracked.req is req:
            return tracked
        service, extra_key = self.service, req.extra_key
        options = load_options_of(req.sampling_params, service.config)
        report = new_report(service.policy.name, 0, len(req.origin_input_ids))
        refusal = serve_refusal(req)
        report.update(
            not_served=refusal,
            not_stored=store_refusal(req),
            truncated_tokens=params_of(req.sampling_params).get(TRUNCATED_KEY, 0),
        )
        # A request that may not use the store shares no KVs that may come from it.
        kv_class = KVClass() if refusal is not None else service.class_of(options)
        tracked = TrackedRequest(
            req.rid,
            req=req,
            extra_key=extra_key,
            options=options,
            kv_class=kv_class,
            report=report,
            namespace=namespace_of_request(req, self.adapters),
        )
        if report["not_stored"] is None and count_prompt(tracked):
            tracked.options, tracked.kv_class = LoadOptions(), KVClass()
        elif options.auto_bits and refusal is None and not kv_class.exact:
            tracked.kv_class = self._choose(tracked)
        req.extra_key = class_extra_key(extra_key, tracked.kv_class, service.default_class)
        attach(req, report)
        self.by_rid[req.rid] = tracked
        return tracked

    def _choose(self, tracked: TrackedRequest) -> KVClass:
        """Choose the class of a request that leaves it to the server."""
        key = key_of(tracked.req)
        if not self.ranks.alone or not self.planner.looks_up(len(key)):
            # With several ranks, stored tokens are not known before the first match.
            return tracked.kv_class
        tokens = as_tokens(key.raw_token_ids())
        classes = KVClass(), tracked.kv_class
        resident = {kv_class: self._resident(tracked, kv_class) for kv_class in classes}
        return self.planner.choose(tracked.namespace, tokens, resident, tracked.kv_class)

    def raise_bits(self, tracked: TrackedRequest, users: Sequence[TrackedRequest]) -> bool:
        """Move a queued request to a class with more bits, if all its stored tokens are resident
        there.

        Only classes in which `users` have such a prefix are matched, since a match delays eviction.
        Returns whether there was one.
        """
        min_tokens = self.service.config.min_prefix_tokens
        # All ranks need the same order, which a set does not have.
        better = (user for user in users if user.has_better_copy_for(tracked, min_tokens))
        for kv_class in dict.fromkeys(user.kv_class for user in better):
            resident = self._resident(tracked, kv_class)
            if resident > tracked.stored_tokens - min_tokens:
                tracked.requested_class, tracked.planned_resident = tracked.kv_class, resident
                self._move(tracked, kv_class)
                return True
        return False

    def lower_bits(self, tracked: TrackedRequest) -> None:
        """Move a queued request back to the class it had before `raise_bits`."""
        if tracked.requested_class is not None:
            self._move(tracked, tracked.requested_class)
            tracked.requested_class = None

    def _move(self, tracked: TrackedRequest, kv_class: KVClass) -> None:
        tracked.kv_class, tracked.sources = kv_class, PrefixSources()
        default = self.service.default_class
        tracked.req.extra_key = class_extra_key(tracked.extra_key, kv_class, default)
        tracked.report.update(NO_ESTIMATE)

    def _resident(self, tracked: TrackedRequest, kv_class: KVClass) -> int:
        key = key_of(tracked.req)
        extra_key = class_extra_key(tracked.extra_key, kv_class, self.service.default_class)
        class_key = RadixKey(key.token_ids, extra_key, limit=key.limit, cache_salt=key.cache_salt)
        return int(match_resident(self.cache, class_key).device_prefix_len)

    # Reports to clients, counters, and what is learnt from requests that ended.

    def report_resident(self, tracked: TrackedRequest, length: int) -> None:
        """Report the resident length of a prompt, including the tokens loaded for it."""
        sources, report = tracked.sources, tracked.report
        loaded, shared = min(sources.loaded, length), min(sources.shared, length)
        resident = max(length - loaded - shared, 0)
        report.update(
            path="ssd" if sources.loaded else "device" if length else "computed",
            prefix_tokens=length,
            used_tokens=length,
            resident_tokens=resident,
            stored_tokens=length - resident,
            loaded_tokens=loaded,
            blended_tokens=sources.blended,
            shared_tokens=shared,
            tokens=split_reported(
                report,
                resident=resident,
                shared=shared,
                loaded=max(loaded - sources.blended - sources.computed, 0),
                blended=sources.blended,
            ),
        )

    def report_load(self, tracked: TrackedRequest, job: LoadJob) -> None:
        """Report what a job loaded; the first request that waited for it reports its reads."""
        if job is tracked.early_job:
            # Reported when its slots were inserted.
            return
        # Some may have been evicted since, or loaded by two jobs.
        sources = tracked.sources = tracked.sources.before(job.start)
        # It may have joined for the leading tokens of the job only.
        resident = match_resident(self.cache, key_of(tracked.req)).device_prefix_len
        sources.stop = min(resident, job.stop)
        num_tokens = max(sources.stop - job.start, 0)
        if job.reads_reported:
            sources.shared += num_tokens
            return
        job.reads_reported = True
        sources.loaded += num_tokens
        _, blended, computed = job.tokens_by_origin(job.start + num_tokens)
        sources.blended += blended
        sources.computed += computed
        self.report_reads(tracked, job)

    def report_reads(self, tracked: TrackedRequest, job: LoadJob) -> None:
        """Add the cost of a job's reads to the report of a request."""
        report = tracked.report
        for name, count in job.read_stats.as_dict().items():
            report[name] = report.get(name, 0) + count
        report.update(
            bits=tracked.kv_class.bits,
            bits_mean=job.bits,
            load_ms=round(report["load_ms"] + job.fill_seconds * 1e3 - job.read_stats.wait_ms, 3),
            layers_whole=self.service.shape.num_layers,
            prefetched=True,
        )
        # An event of the current span with `--enable-trace`, otherwise a no-op.
        tracked.req.time_stats.trace_ctx.trace_event(
            "impress.load",
            1,
            attrs={
                "tokens": len(job),
                "queued_ms": round((job.started_at - job.planned_at) * 1e3, 3),
                "read_ms": round(job.read_stats.wait_ms, 3),
                "restored_ms": round(job.fill_seconds * 1e3 - job.read_stats.wait_ms, 3),
                "ssd_bytes": job.read_stats.ssd_bytes,
            },
        )

    def explain(self, tracked: TrackedRequest) -> None:
        """Report why a request that is admitted has its prefix, or lacks one."""
        report, service, provenance = tracked.report, self.service, self.provenance
        report["why"] = self.planner.explain(
            report,
            tracked.namespace,
            as_tokens(key_of(tracked.req).raw_token_ids()),
            tracked.options,
            seen=tracked.frequent_tokens or 0 if service.config.write_after > 1 else None,
            opened=not tracked.load_failed,
            blend=tracked.why_no_blend,
        )
        length = report["prefix_tokens"]
        if not tracked.req.output_ids:
            # It may have been retracted, and have had another class.
            report["approximate"] = False
        if provenance.mixed and length and not tracked.kv_class.exact:
            path = self.cache.path_device_indices(tracked.req.last_node)[:length]
            report["approximate"] = provenance.depth(path.long()) > 0
            if report["approximate"] and report["bits"] is None:
                report["bits"] = tracked.kv_class.bits

    def count(self, tracked: TrackedRequest) -> None:
        """Count and list a request that has ended, and learn from its computing time.

        Probes of SGLang's /health are not listed: they may outnumber all other requests.
        """
        req, report, service = tracked.req, tracked.report, self.service
        times = req.time_stats
        service.count(report)
        if req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return
        prefill = max(times.prefill_finished_time - times.forward_entry_time, 0.0)
        computing = prefill - tracked.layer_wait_seconds
        # It loads while queued, and possibly while its pass waits for the last layers.
        before_pass = times.queue_duration_s + tracked.layer_wait_seconds
        loading = min(report["load_ms"] / 1e3, before_pass)
        store = service.opened
        service.recent.record(
            req.rid,
            "" if store is None else store.namespace(tracked.namespace),
            as_tokens(req.origin_input_ids[:BLOCK_TOKENS]),
            report,
            waited=before_pass - loading,
            loading=loading,
            computing=max(computing, 0.0),
        )
        new = len(req.origin_input_ids) - report["prefix_tokens"]
        if new > 0 and computing > 0 and not (tracked.timing_invalid or req.retraction_count):
            service.estimator.observe_request(report["used_tokens"], new, computing)


def key_of(req: Any) -> RadixKey:
    """Return the key of a request's prompt, as far as a prefix may reach."""
    tokens = req.full_untruncated_fill_ids or req.origin_input_ids
    if req.positional_embed_overrides is not None:
        # SGLang does not match it either: its KVs do not follow from its tokens.
        tokens = tokens[:0]
    limit = req._compute_max_prefix_len(len(tokens))
    return RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)


def namespace_of(key: Any) -> str:
    """Return the namespace of a key or request: its `extra_key` and `cache_salt`."""
    return namespace_text(key.extra_key, key.cache_salt)


def as_tokens(token_ids: Sequence[int]) -> Tokens:
    """Convert token ids to the store's int32; media placeholders become one id that no text has.

    Placeholders have 62 bits, the last 32 of which may equal those of a text token.
    """
    return np.minimum(np.asarray(token_ids, np.int64), _MEDIA).astype(np.int32)


def namespace_of_request(req: Any, manager: Any) -> str:
    """Return the namespace of a request as the client sent it; `manager`: SGLang's `LoRAManager`.

    With an adapter (LoRA), the namespace includes a digest of its weights. SGLang appends the
    adapter's id to `extra_key`, but other weights may have the same id.
    """
    if req.lora_id is None:
        return namespace_text(req.extra_key, req.cache_salt)
    extra_key = req.extra_key.removesuffix(req.lora_id) or None
    return namespace_text(extra_key, req.cache_salt, _digest(manager.loras[req.lora_id]))


def _digest(adapter: Any) -> str:
    """Digest everything in an adapter that affects KVs; cached on it, since this takes a while."""
    digest: str | None = getattr(adapter, _DIGEST, None)
    if digest is None:
        tensors = [
            (f"{number} {name}", tensor)
            for number, layer in enumerate(adapter.layers)
            for name, tensor in layer.weights.items()
        ]
        tensors += adapter.embedding_layers.items()
        tensors += adapter.added_tokens_embeddings.items()
        digest = f"{weights_digest(tensors)} {adapter.scaling!r}"
        setattr(adapter, _DIGEST, digest)
    return digest
