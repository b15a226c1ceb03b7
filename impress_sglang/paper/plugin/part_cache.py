"""Tree cache of servers that load within passes: parts of prefixes that SGLang's tree lacks.

Slots of one live request only count as protected, so that SGLang's accounting (available +
evictable + protected + uncached == total) holds at every step.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from torch import Tensor

from impress_sglang.config import ImpressConfig
from impress_sglang.cost import RequestLengths
from impress_sglang.errors import PrefixUnreadable, UnsupportedError
from impress_sglang.paper.plugin.attention import adopt_backend
from impress_sglang.paper.plugin.options import check_parts
from impress_sglang.paper.request import NOTHING_LOADED, StoredRequest
from impress_sglang.paper.scores import probe_kv_heads
from impress_sglang.paper.service import PartPlan, PartService
from impress_sglang.plugin.eligibility import plain_fields
from impress_sglang.plugin.factory import build_tree_cache, identity_of, kv_shape
from impress_sglang.plugin.pools import PoolLayers
from impress_sglang.plugin.request_tracker import TrackedRequest, as_tokens
from impress_sglang.plugin.tree_cache import ImpressTreeCache
from impress_sglang.plugin.unsupported import check_layers, check_options
from impress_sglang.serving.report import estimate_fields, split_reported
from impress_sglang.serving.why import Reason, why_of
from impress_sglang.storage.quality import EXACT
from impress_sglang.store.policies import make_policy

logger = logging.getLogger(__name__)


def make_tree_cache(context: Any, config: ImpressConfig) -> PartCache:
    """Build the tree cache for SGLang's `TreeCacheBuildContext`; see `factory.build_tree_cache`.

    Raises:
        UnsupportedError: the options or the model are not supported.
    """
    runner = context.tp_worker.model_runner
    options = resolved_view(context.server_args)
    check_options(config, options)
    check_parts(config, options)
    check_layers(runner)
    if runner.token_to_kv_pool.dtype != runner.model_config.dtype:
        raise UnsupportedError(
            f"--impress-policy {config.policy} loads KVs in the model's dtype: use "
            "--kv-cache-dtype auto, or --impress-policy impress"
        )
    if "discard_output_reason" not in plain_fields():
        raise UnsupportedError(
            "this SGLang cannot drop the output of a request whose prefix turns out to be damaged: "
            "use --impress-policy impress"
        )
    policy = make_policy(config)
    shape = kv_shape(runner, policy, config)
    if policy.probes:
        heads = probe_kv_heads(shape.num_query_heads, shape.num_kv_heads, config.probe_heads)
        shape = dataclasses.replace(shape, probe_kv_heads=heads)
    if policy.probes and not shape.other_kv_heads:
        logger.warning(
            "this model has %d KV heads and all of them are probe heads: --impress-policy %s "
            "reads all keys of a stored prefix, and saves values only",
            shape.num_kv_heads,
            policy.name,
        )
    layers = PoolLayers(runner.token_to_kv_pool)
    cache = build_tree_cache(
        *(PartCache, PartService, context, config, shape, layers),
        lambda: identity_of(context, shape),
    )
    adopt_backend(runner.attn_backend, cache.live, runner.token_to_kv_pool, cache.fail)
    return cache


class PartCache(ImpressTreeCache):
    """Finds evicted prefixes on SSD, and lets a pass load the parts that it uses."""

    service: PartService

    def __init__(self, *args: Any) -> None:
        self._plans: dict[str, PartPlan] = {}
        self.live: dict[str, StoredRequest] = {}
        """Requests that run with a stored prefix, by id."""
        super().__init__(*args)

    def attach(self, scheduler: Any) -> None:
        """See `ImpressTreeCache.attach`; nothing is loaded while requests queue."""
        super().attach(scheduler)
        scheduler.enable_lmcache = False

    # Steps of a request: match, admission, pass, end.

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Match the resident prefix, extended by a stored one if that is longer."""
        resident, req = super().match_prefix(params), params.req
        tracked = None if req is None else self._tracked.get(req.rid)
        if req is None or tracked is None:
            return resident
        self._plans.pop(req.rid, None)
        refused = tracked.load_failed or tracked.report["not_served"] is not None
        # Copy the tokens only if the prompt may be stored.
        if refused or not self.planner.looks_up(len(params.key)):
            return resident
        tokens = as_tokens(params.key.raw_token_ids())
        match = self.planner.match(tracked.namespace, tokens, EXACT)
        start = resident.device_prefix_len
        plan = self.service.plan(match, start, len(tokens) + 1, tracked.options)
        if plan is None:
            return resident
        was_declined = tracked.report["decision"] == "recompute"
        tracked.report.update(estimate_fields(plan.estimate, loads=plan.worthwhile))
        if not plan.worthwhile:
            # Without measuring, slow reads would keep prefixes from ever being loaded again. Once
            # per request, because SGLang matches those that wait before each pass.
            if not was_declined:
                self.service.parts.measure(match.slice(start, plan.stop))
            return resident
        self._plans[req.rid] = plan
        return resident._replace(device_prefix_len=plan.stop - plan.k, host_hit_length=plan.k)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        """Admit a request with its stored prefix: allocate its slots and open its source.

        None sends the request back to the queue. It is then matched again, without a stored prefix.
        """
        req = params.req
        assert req is not None
        tracked, plan, store = self._tracked[req.rid], self._plans.pop(req.rid), self.service.parts
        stored, k = plan.stop - plan.start, plan.k
        # Stays set unless the load can begin.
        tracked.load_failed = True
        try:
            source = store.open_part(plan.match, plan.start, plan.stop, whole=k == stored)
        except PrefixUnreadable as error:
            logger.warning("request %s does without its stored prefix: %s", req.rid, error)
            store.report(error)
            return None
        taken = self._allocation.alloc(k)
        if taken is None:
            store.close_source(source)
            return None
        store.ahead.add_running(source)
        tracked.load_failed = False
        parts = {"resident": plan.start, "loaded": k, "unused": stored - k}
        tracked.report.update(
            path="ssd",
            prefix_tokens=plan.stop,
            used_tokens=plan.start + k,
            stored_tokens=stored,
            loaded_tokens=k,
            tokens=split_reported(tracked.report, **parts),
            # SGLang may have retracted it: what it loaded then is loaded again.
            **NOTHING_LOADED,
        )
        self.live[req.rid] = StoredRequest(
            self.service.shape,
            self.service.config.alpha,
            self.path_device_indices(req.last_node)[: plan.start],
            taken[0],
            stored,
            store,
            source,
            tracked.report,
        )
        assert k == params.host_hit_length
        req.storage_hit_start, req.storage_hit_length = plan.start, stored
        return k, req.last_node

    def finish_storage_prefetch_admission(
        self, request: CacheRequestHandle, fulfilled_tokens: int, reason: str | None
    ) -> None:
        super().finish_storage_prefetch_admission(request, fulfilled_tokens, reason)
        live, tracked = self.live.get(request.rid), self._tracked.get(request.rid)
        if tracked is not None:
            tracked.report["approximate"] = live is not None and live.start > 0

    def prefix_device_indices(self, req: Any) -> Tensor:
        """Return the row of a request's prefix: zeros, resident slots, slots of the stored
        prefix."""
        request = self.live.get(req.rid)
        if request is None:
            return super().prefix_device_indices(req)
        zeros = request.slots.new_zeros(request.start)
        return torch.cat([zeros, request.resident_slots, request.slots])

    def fail(self, rid: str) -> None:
        """Let SGLang end a request whose prefix cannot be loaded, and drop the results of its pass.

        SGLang does the same if an external cache could not load.
        """
        tracked = self._tracked[rid]
        tracked.report["why"], tracked.timing_invalid = why_of(Reason.DAMAGED), True
        tracked.req.discard_output_reason = FINISH_ABORT("its prefix cannot be loaded; ask again")

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert exact KVs into SGLang's tree, and offer new ones to the store."""
        request = self.live.get(req.rid)
        if request is not None:
            assert request.layers_loaded == self.service.shape.num_layers
            if request.failed or request.start:
                return
            if not request.adopted:
                # A whole, exact prefix becomes SGLang's, like one that was computed.
                req.kv.cache_protected_len = len(request.resident_slots)
                request.adopted = True
        super().checkpoint(req, up_to=up_to, **kwargs)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        request = self.live.pop(req.rid, None)
        if request is not None:
            request.end_loading()
            if not request.adopted:
                self.token_to_kv_pool_allocator.free(request.slots)
        super().on_release(req, checkpointed=checkpointed)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        self._plans.pop(request.rid, None)
        super().release_aborted_request(request)

    def flush_pending_backups(self) -> None:
        """Called by SGLang after each batch: poll the store, read ahead, export metrics."""
        self._forget_ended()
        self.service.poll()
        if self.service.opened is not None:
            self.service.opened.ahead.top_up()
        self.service.publish_metrics()

    def _forget(self, tracked: TrackedRequest) -> None:
        """Count a request that has ended, and learn the cost of its load."""
        report, times = tracked.report, tracked.req.time_stats
        prefill = max(times.prefill_finished_time - times.forward_entry_time, 0.0)
        tracked.layer_wait_seconds = min((report["load_ms"] + report["probe_ms"]) / 1e3, prefill)
        super()._forget(tracked)
        new = len(tracked.req.origin_input_ids) - report["prefix_tokens"]
        loaded = report["loaded_tokens"]
        odd = tracked.timing_invalid or tracked.req.retraction_count
        if loaded and new > 0 and prefill > tracked.layer_wait_seconds and not odd:
            work = RequestLengths(report["resident_tokens"], report["stored_tokens"], new)
            took = tracked.layer_wait_seconds - report["wait_ms"] / 1e3
            self.service.loading.observe(work, took, whole=loaded == work.stored)

    # Room, and the whole cache.

    def _private(self) -> tuple[int, int]:
        return sum(request.k for request in self.live.values() if not request.adopted), 0

    def _describe_pool(self) -> dict[str, int]:
        return super()._describe_pool() | {"private_tokens": self._private()[0]}

    def reset(self) -> None:
        assert not self._private()[0], "SGLang flushes while requests run"
        self._plans.clear()
        super().reset()

    def _set_aside(self) -> None:
        self._plans.clear()
        # Wait until no pass reads or writes the pool.
        torch.get_device_module(self.device).synchronize()
        super()._set_aside()
