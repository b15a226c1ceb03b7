"""The tree cache: SGLang's own, into which load jobs bring what is stored before a request runs.

SGLang owns slots, tree and passes. Its seams for stores, which `enable_lmcache` of the scheduler
switches on, are all that is used of it:

    _prefetch_kvcache            -> match_prefix, prefetch_from_storage: plan, begin or join a job
    get_new_batch_prefill        -> check_prefetch_progress: hold a request back; others pass
                                 -> pop_prefetch_loaded_span: what is reported as from storage
    PrefillAdder                 -> finish_storage_prefetch_admission: a request is admitted
    _process_hicache_events      -> check_hicache_events: once per pass
    is_fully_idle                -> has_pending_cache_operations: no flush while slots are filled
    _release_aborted_request     -> release_aborted_request

What a request accepts is part of its key (`serving.kv_class`), so that within a class what was
loaded and what was computed behind it are shared, evicted, locked and reported as SGLang always
does. Only the scheduler's thread calls this class.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from impress_sglang.codes.rows.basis import Basis
from impress_sglang.config import CODES, EXACTLY, OFF, ImpressConfig, share_of_rank
from impress_sglang.plugin.capabilities import (
    check_alone,
    check_layers,
    check_options,
    may_have_windows,
)
from impress_sglang.plugin.factory import (
    connected,
    draft_runners,
    identity_of,
    kv_shape,
    rotation_of,
)
from impress_sglang.plugin.known import Known
from impress_sglang.plugin.pools import (
    STATEFUL,
    PoolLayers,
    full_pool,
    index_keys,
    is_latent,
    state_layers,
    streams_of,
    window_pool,
)
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.rank_groups import identity_reader, ranks_of
from impress_sglang.plugin.rectangular import attend_rectangularly
from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.serving.service import Service
from impress_sglang.store.policies import make_policy
from impress_sglang.transfer.basis_codec import BasisCodec, shape_by
from impress_sglang.transfer.codecs import plain_codec

logger = logging.getLogger(__name__)
_ONE_POOL = ", or use --disable-hybrid-swa-memory"


def make_tree_cache(context: Any, config: ImpressConfig) -> ImpressTreeCache:
    """Build the tree cache for SGLang's `TreeCacheBuildContext`; see `factory.connected`.

    Raises:
        UnsupportedError: the options or the model are not known to be right.
    """
    runner, params = context.tp_worker.model_runner, context.params
    options = resolved_view(context.server_args)
    check_options(config, options)
    ranks = ranks_of(context)
    tp_size = ranks.size // options.pp_size
    check_layers(runner, tp_size, windows=may_have_windows(config))
    pool, model_dtype = runner.token_to_kv_pool, runner.model_config.dtype
    streams, windows = streams_of(full_pool(pool), model_dtype), window_pool(pool)
    drafts = draft_runners(context.tp_worker)
    further = [streams_of(own.token_to_kv_pool, own.model_config.dtype) for own in drafts]
    if windows is not None:
        check_alone(options, "windows in a pool of their own", _ONE_POOL)
        further = [streams_of(windows, model_dtype)]
    stateful = hasattr(runner.req_to_token_pool, "mamba_pool")
    if stateful:
        check_alone(options, "states beside KVs")
    if not (ranks.alone or further or stateful):
        # Each rank has states of its own, and drafts or windows may have other heads to share.
        heads = 1 if is_latent(pool) else runner.model_config.get_total_num_kv_heads()
        # What another node has written is on the drive of that.
        of_node = options.tp_size * options.pp_size // options.nnodes
        ranks.copies = math.gcd(max(tp_size // heads, 1), of_node)
    if no_codes := streams.no_codes or STATEFUL * stateful:
        config = config.without_codes(no_codes)
        logger.info("prefixes are loaded exactly: %s", no_codes)
    attend_rectangularly(runner.attn_backend)
    loads: type[PrefixLoads] = PrefixLoads
    if config.blend != OFF:
        # Here alone, so that other servers load nothing of it.
        from impress_sglang.blend.plugin.blends import BlendLoads
        from impress_sglang.blend.plugin.steps import check_blended

        # Before the store is opened.
        check_blended(runner.model)
        loads = BlendLoads
    config = share_of_rank(config, ranks.size, ranks.copies)
    policy = make_policy(config)
    shape = kv_shape(runner, policy, config, tp_size)
    shape = replace(shape, exact=config.kept != CODES)
    if config.kept == EXACTLY:
        shape = replace(shape, code_bits=0.0)
    codec = plain_codec(shape)
    if config.basis:
        # Of the heads of this rank, which others have too where there are more ranks than heads.
        parts = min(tp_size, runner.model_config.get_total_num_kv_heads())
        part = ranks.rank * parts // tp_size, parts
        basis = Basis.load(Path(config.basis).expanduser(), part).keeping(config.code_bits)
        rotation = rotation_of(runner.model, "--impress-basis")
        # See `PoolLayers.beyond`.
        codec = BasisCodec(basis, rotation, beyond=int(bool(drafts)))
        shape = shape_by(basis, shape)
        # So that other threads need not make it.
        codec.rotation.prepare(runner.model_config.context_len)
    elif codec is not None:
        logger.info(
            "KVs are coded without a basis of the model: `impress calibrate` makes one, with which "
            "they take two thirds of the bytes (--impress-basis)"
        )

    layers = PoolLayers(pool)
    if drafts or index_keys(full_pool(pool)):
        shape = layers.add(shape, [own.token_to_kv_pool for own in drafts])
    elif windows is not None:
        # What SGLang looks for, in whole pages; 0.5.22 knows no drafts that look further.
        page = params.page_size
        window = getattr(params, "swa_retain_window", params.sliding_window_size)
        raw = further != [streams]
        shape = layers.add(shape, [windows], -(-window // page) * page, raw=raw)
    if stateful:
        layers.states = state_layers(runner.req_to_token_pool, shape)

    cache = connected(
        *(ImpressTreeCache, Service, context, config, shape, layers),
        identity_reader(context, ranks, lambda: identity_of(context, shape, drafts)),
        codec,
        ranks,
        drafts,
    )
    cache.loads_class = loads
    return cache


class ImpressTreeCache(ServedCache):
    """What left SGLang's tree is brought back from the store by load jobs."""

    loads: PrefixLoads
    loads_class: type[PrefixLoads] = PrefixLoads

    def attach(self, scheduler: Any) -> None:
        """Begin to serve, for a scheduler that is complete."""
        super().attach(scheduler)
        self.loads = self.loads_class(self._requests, scheduler)
        # SGLang's seams for caches that load while requests queue.
        scheduler.enable_lmcache = True

    # A request's way: plan, wait, be admitted, end.

    def is_backuped(self, node_id: Any) -> bool:
        """Whether SGLang asks for what is stored behind a node: always."""
        return self._serves or bool(super().is_backuped(node_id))

    def prefetch_from_storage(
        self, handle: CacheRequestHandle, *arguments: Any, **keywords: Any
    ) -> bool:
        """A request is queued: plan what is to be loaded for it."""
        known = self._known.get(handle.rid)
        if known is not None:
            self.loads.plan(known)
        return False

    def check_prefetch_progress(self, request: CacheRequestHandle) -> bool:
        """Whether a request may be admitted now; others pass it if not."""
        known = self._known.get(request.rid)
        return known is None or self.loads.may_run(known)

    def pop_prefetch_loaded_span(self, request: CacheRequestHandle) -> tuple[int, int | None]:
        """How many tokens were brought for a request, and where they begin."""
        known = self._known.get(request.rid)
        if known is None or not known.brought.loaded:
            return 0, None
        return known.brought.loaded, known.brought.stop - known.brought.loaded

    def _note_admitted(self, known: Known) -> None:
        self.loads.end_waiting(known)

    def waiting_storage_span(self, request: CacheRequestHandle) -> tuple[int, int] | None:
        """What is being brought for a waiting request."""
        known = self._known.get(request.rid)
        job = None if known is None else known.job
        return None if job is None else (job.start, job.stop)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """See `ServedCache.checkpoint`: a pass of the request is over."""
        if not self.disable and (known := self._known.get(req.rid)) is not None:
            self.loads.end_pass(known)
        super().checkpoint(req, up_to=up_to, **kwargs)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """See `ServedCache.on_release`."""
        if (known := self._known.get(req.rid)) is not None:
            self.loads.end_pass(known)
            self.loads.end_waiting(known)
        super().on_release(req, checkpointed=checkpointed)

    def release_aborted_request(self, request: CacheRequestHandle) -> None:
        """See `ServedCache.release_aborted_request`."""
        known = self._known.get(request.rid)
        super().release_aborted_request(request)
        if known is not None and not known.admitted:
            self.loads.end_waiting(known)

    # Once per pass.

    def check_hicache_events(self) -> None:
        """Take in what other threads have done, and give slots to jobs."""
        if self._serves:
            self.service.poll()
            if self._released:
                self._forget_ended()
            self._saves.release(self.loads.agree)
            self.loads.poll()
            self.service.tell_metrics()

    def rest(self) -> None:
        """See `ServedCache.rest`; wait a little for jobs, if there are any."""
        if not self.loads.rest():
            super().rest()

    def has_pending_cache_operations(self) -> bool:
        """Whether slots are being filled: SGLang neither flushes nor checks for leaks meanwhile."""
        return self._serves and self.loads.jobs.filling

    # Room.

    def _give_up_loads(self, missing: Callable[[], int]) -> None:
        self.loads.jobs.make_room(missing)

    def _private(self) -> tuple[int, int]:
        slots = rows = 0
        for job in self.loads.jobs.loading if self._serves else ():
            slots += len(job)
            rows += 0 if job.rows is None else len(job.rows)
        return slots, rows

    def _describe_pool(self) -> dict[str, int]:
        return super()._describe_pool() | {"loading_tokens": self._private()[0]}

    # The whole cache.

    def reset(self) -> None:
        """See `ServedCache.reset`."""
        assert not self.has_pending_cache_operations(), "SGLang flushes while slots are filled"
        super().reset()

    def _drop_plans(self) -> None:
        self.loads.drop_all()

    def release_host_resources(self) -> None:
        """See `ServedCache.release_host_resources`."""
        if self._serves:
            # Now, as nothing may be read of a store that is closed.
            self.loads.close()
        super().release_host_resources()

    def _set_aside(self) -> None:
        self.loads.drop_all()
        self.loads.wait_for_loader()
        super()._set_aside()

    def _check_requests(self) -> None:
        if self._serves:
            self.loads.check()
