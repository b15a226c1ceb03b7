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

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from impress_sglang.plugin.known import Known
from impress_sglang.plugin.prefix_loads import PrefixLoads
from impress_sglang.plugin.served_cache import ServedCache


class ImpressTreeCache(ServedCache):
    """What left SGLang's tree is brought back from the store by load jobs."""

    loads: PrefixLoads

    def attach(self, scheduler: Any) -> None:
        """Begin to serve, for a scheduler that is complete."""
        super().attach(scheduler)
        self.loads = PrefixLoads(self._requests, scheduler)
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

    def discard_storage_prefetch_accounting(self, request: CacheRequestHandle) -> None:
        """SGLang's counts of its own storage, which is not ours."""

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

    def flush_pending_backups(self) -> None:
        """SGLang's call after each batch; writes need none."""

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
