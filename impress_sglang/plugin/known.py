"""What is known of SGLang's requests, from their first match to their end, and what they report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.plugin.eligibility import serve_refusal, store_refusal
from impress_sglang.plugin.pools import Allocation, PoolLayers
from impress_sglang.plugin.provenance import Provenance
from impress_sglang.plugin.report_transport import attach
from impress_sglang.plugin.tree_nodes import match_resident
from impress_sglang.serving.custom_params import TRUNCATED_KEY, load_options_of, params_of
from impress_sglang.serving.job_queue import Waiter
from impress_sglang.serving.kv_class import KVClass, marked
from impress_sglang.serving.load_jobs import LoadJob, Space
from impress_sglang.serving.load_planner import LoadPlanner
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.serving.report import NO_ESTIMATE, new_report, split_again
from impress_sglang.serving.service import Service
from impress_sglang.serving.why import Detail
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.identity import weights_digest
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.prefix_hashes import namespace_text

_DIGEST = "_impress_digest"
_MEDIA = np.iinfo(np.int32).max


@dataclasses.dataclass(slots=True)
class Brought:
    """Tokens that jobs brought for a request, the last ones before `stop`."""

    loaded: int = 0  # by jobs of which it tells
    shared: int = 0  # by jobs of which others tell
    blended: int = 0  # of the loaded ones, those that are stored behind other text
    computed: int = 0  # of the loaded ones, those that were computed in between
    stop: int = 0


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Known(Waiter):
    """A request of SGLang's, which may wait for a job while it is queued."""

    req: Any
    extra_key: str | None  # as it came
    wanted: LoadOptions
    kv_class: KVClass
    report: dict[str, Any]
    namespace: str
    worth: int | None = None  # so many first tokens are worth storing; None: not yet counted
    seen: int | None = None  # so many of them were asked for often enough
    refused: bool = False  # because space or write budget ran out
    planned: bool = False  # what is to be loaded for it is known
    admitted: bool = False  # it runs
    declined: bool = False  # something that was to be loaded could not be read now
    brought: Brought = dataclasses.field(default_factory=Brought)
    not_before: int = 0  # the poll before which it is not admitted again
    raised: KVClass | None = None  # the class that it has else, while it uses more bits
    stored: int = 0  # so many first tokens are stored, as far as it was planned
    io: float = 0.0  # seconds that reading what is stored of it takes
    early: LoadJob | None = None  # the job whose last layers its pass waits for
    gated: float = 0.0  # seconds for which its pass waited for these
    disturbed: bool = False  # the time of its pass says nothing of what computing takes
    why_no_blend: Detail | None = None  # if some of its text is stored, and it accepts it
    blends: bool = True  # it may; False: it goes on without, whatever is found

    @property
    def space(self) -> Space:
        """What keeps its prompt apart in SGLang's tree, its class included."""
        return self.req.extra_key, self.req.cache_salt

    def offers(self, known: Known, count: int) -> bool:
        """Whether its class has more bits, and its first tokens are those of another request."""
        mine, own = self.kv_class, known.kv_class
        better = mine.bits > own.bits and (mine.exact or mine.share == own.share)
        apart = self.extra_key, self.req.cache_salt
        if not better or apart != (known.extra_key, known.req.cache_salt):
            return False
        tokens, others = self.req.full_untruncated_fill_ids, known.req.full_untruncated_fill_ids
        return bool(tokens[:count] == others[:count])

    def begins_like(self, job: LoadJob, page_size: int) -> bool:
        """Whether its prompt begins like the tokens of a job, and with some of them."""
        if self.space != job.space:
            return False
        count = job.start + page_size
        tokens = as_tokens(self.req.full_untruncated_fill_ids[:count])
        return np.array_equal(tokens, job.tokens[:count])


@dataclasses.dataclass(eq=False)
class KnownRequests:
    """The requests of one tree cache, and what its parts have in common.

    It notes requests, chooses and changes the classes of their KVs, and keeps their reports. The
    scheduler's thread owns it. `forward_stream` is SGLang's, on which passes run, and `adapters`
    its `LoRAManager`, if it has one; `known` are the requests that are not over, by id.
    """

    cache: Any
    service: Service
    layers: PoolLayers
    forward_stream: Any
    ranks: Ranks = ALONE
    adapters: Any = None
    known: dict[str, Known] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        layers, keys = self.layers, self.layers(0)[0]
        packed, states = layers.packed, layers.states is not None
        window = packed.window if packed is not None else 0
        rest = self.cache.page_size, layers.beyond, packed
        pairs = self.cache.tree_core.is_eagle
        self.planner = LoadPlanner(self.service, *rest, states=states, pairs=pairs)
        self.allocation = Allocation(self.cache, window, states=states)
        self.provenance = Provenance(len(keys), keys.device)

    def note(self, req: Any, sight: Callable[[Known], bool]) -> Known:
        """Note a request; at its first match it gets its class, and its key the mark of that.

        `sight` counts one that may be stored; returns whether it is computed exactly.
        """
        known = self.known.get(req.rid)
        if known is not None and known.req is req:
            return known
        service, extra_key = self.service, req.extra_key
        wanted = load_options_of(req.sampling_params, service.config)
        report = new_report(service.policy.name, 0, len(req.origin_input_ids))
        refusal = serve_refusal(req)
        report.update(
            not_served=refusal,
            not_stored=store_refusal(req),
            truncated_tokens=params_of(req.sampling_params).get(TRUNCATED_KEY, 0),
        )
        # What cannot be served from the store shares nothing that may come from it.
        own = KVClass() if refusal is not None else service.class_of(wanted)
        known = Known(
            req.rid,
            req=req,
            extra_key=extra_key,
            wanted=wanted,
            kv_class=own,
            report=report,
            namespace=namespace_of_request(req, self.adapters),
        )
        if report["not_stored"] is None and sight(known):
            known.wanted, known.kv_class = LoadOptions(), KVClass()
        elif wanted.auto_bits and refusal is None and not own.exact:
            known.kv_class = self._choose(known)
        req.extra_key = marked(extra_key, known.kv_class, service.usual)
        attach(req, report)
        self.known[req.rid] = known
        return known

    def _choose(self, known: Known) -> KVClass:
        """The class of a request that leaves it to the server."""
        key = key_of(known.req)
        if not self.ranks.alone or not self.planner.looks_for(len(key)):
            # On several ranks what is stored is not known before the first match.
            return known.kv_class
        tokens = as_tokens(key.raw_token_ids())
        resident = {own: self._resident(known, own) for own in (KVClass(), known.kv_class)}
        return self.planner.choose(known.namespace, tokens, resident, known.kv_class)

    def raise_bits(self, known: Known, users: Sequence[Known]) -> bool:
        """Let a queued request use a class with more bits, in which all is resident that is stored
        of its prompt; returns whether there is one.

        Only classes in which `users` have such a prefix are looked at: what is looked at is evicted
        later.
        """
        least = self.service.config.min_prefix_tokens
        # In an order that is the same on all ranks, as that of a set is not.
        for own in dict.fromkeys(o.kv_class for o in users if o.offers(known, least)):
            resident = self._resident(known, own)
            if resident > known.stored - least:
                known.raised, known.found = known.kv_class, resident
                self._move(known, own)
                return True
        return False

    def lower_bits(self, known: Known) -> None:
        """Let a queued request use its own class again."""
        if known.raised is not None:
            self._move(known, known.raised)
            known.raised = None

    def _move(self, known: Known, own: KVClass) -> None:
        known.kv_class, known.brought = own, Brought()
        known.req.extra_key = marked(known.extra_key, own, self.service.usual)
        known.report.update(NO_ESTIMATE)

    def _resident(self, known: Known, own: KVClass) -> int:
        """How many tokens of a prompt are resident in a class."""
        key, extra_key = key_of(known.req), marked(known.extra_key, own, self.service.usual)
        own_key = RadixKey(key.token_ids, extra_key, limit=key.limit, cache_salt=key.cache_salt)
        return int(match_resident(self.cache, own_key).device_prefix_len)

    # What clients are told of a request, and what is counted and learnt of it in the end.

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
        resident = match_resident(self.cache, key_of(known.req)).device_prefix_len
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
            bits_mean=job.bits,
            load_ms=round(report["load_ms"] + job.fill_seconds * 1e3 - job.reads.wait_ms, 3),
            layers_whole=self.service.shape.num_layers,
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
                "restored_ms": round(job.fill_seconds * 1e3 - job.reads.wait_ms, 3),
                "ssd_bytes": job.reads.ssd_bytes,
            },
        )

    def explain(self, known: Known) -> None:
        """Say why a request that is admitted has its prefix, or lacks one."""
        report, service, provenance = known.report, self.service, self.provenance
        report["why"] = self.planner.explain(
            report,
            known.namespace,
            as_tokens(key_of(known.req).raw_token_ids()),
            known.wanted,
            seen=known.seen or 0 if service.config.write_after > 1 else None,
            opened=not known.declined,
            blend=known.why_no_blend,
        )
        length = report["prefix_tokens"]
        if not known.req.output_ids:
            # It may have been put back, and have been of another class.
            report["approximate"] = False
        if provenance.mixed and length and not known.kv_class.exact:
            path = self.cache.path_device_indices(known.req.last_node)[:length]
            report["approximate"] = provenance.depth(path.long()) > 0
            if report["approximate"] and report["bits"] is None:
                report["bits"] = known.kv_class.bits

    def count(self, known: Known) -> None:
        """Count a request that has ended, list it, and learn how long computing takes.

        The probes of SGLang's /health are not listed: they may outnumber all other requests.
        """
        req, report, service = known.req, known.report, self.service
        times = req.time_stats
        service.count(report)
        if req.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return
        prefill = max(times.prefill_finished_time - times.forward_entry_time, 0.0)
        computing = prefill - known.gated
        # It is loaded while it waits, and perhaps while its pass waits for the last layers.
        before_pass = times.queue_duration_s + known.gated
        loading = min(report["load_ms"] / 1e3, before_pass)
        store = service.opened
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


def key_of(req: Any) -> RadixKey:
    """The key of a request's prompt, as far as a prefix may reach."""
    tokens = req.full_untruncated_fill_ids or req.origin_input_ids
    if req.positional_embed_overrides is not None:
        # SGLang matches none of it either: its KVs do not follow from its tokens.
        tokens = tokens[:0]
    limit = req._compute_max_prefix_len(len(tokens))
    return RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)


def namespace_of(key: Any) -> str:
    """The namespace of a key or request: keeps other `extra_key` or `cache_salt` values apart."""
    return namespace_text(key.extra_key, key.cache_salt)


def as_tokens(token_ids: Sequence[int]) -> Tokens:
    """Token ids in the store's form, int32; those that stand for media become one that is no text.

    They have 62 bits, of which the last 32 may be those of text.
    """
    return np.minimum(np.asarray(token_ids, np.int64), _MEDIA).astype(np.int32)


def namespace_of_request(req: Any, manager: Any) -> str:
    """The namespace of a request as it came; `manager` is SGLang's `LoRAManager`, if it has one.

    With an adapter (LoRA), prefixes are kept apart by its weights. SGLang appends its id to
    `extra_key`, which may be the same for others.
    """
    if req.lora_id is None:
        return namespace_text(req.extra_key, req.cache_salt)
    extra_key = req.extra_key.removesuffix(req.lora_id) or None
    return namespace_text(extra_key, req.cache_salt, _digest(manager.loras[req.lora_id]))


def _digest(adapter: Any) -> str:
    """Of all that an adapter does to KVs; kept with it, because it takes a while."""
    found: str | None = getattr(adapter, _DIGEST, None)
    if found is None:
        tensors = [
            (f"{number} {name}", tensor)
            for number, layer in enumerate(adapter.layers)
            for name, tensor in layer.weights.items()
        ]
        tensors += adapter.embedding_layers.items()
        tensors += adapter.added_tokens_embeddings.items()
        found = f"{weights_digest(tensors)} {adapter.scaling!r}"
        setattr(adapter, _DIGEST, found)
    return found
