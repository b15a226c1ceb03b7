"""Requests whose stored prefix failed within a pass are computed from their beginning.

As where an external cache could not load, SGLang drops what such a pass computes of a request, and
ends it. Its error is not sent: the request is queued again, as SGLang does with one that it puts
back, once no batch has it any more, for the next pass may have been launched already.
"""

from __future__ import annotations

from typing import Any


class Retries:
    """Keeps ended requests until they can be queued again; the scheduler's thread owns it."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._failed: list[Any] = []
        self._ready: list[Any] = []

    def attach(self, scheduler: Any) -> None:
        """Queue them with this scheduler."""
        self._scheduler = scheduler

    def add(self, req: Any) -> None:
        """Take over a request of the batch whose results SGLang processes now."""
        # Nothing of it is sent.
        req.finished_output = True
        self._failed.append(req)

    def rest(self) -> bool:
        """See `ServedCache.rest`: no batch will come that would poll."""
        self.poll()
        return False

    def poll(self) -> None:
        """Queue what had failed before the last call; called after each batch, and when idle."""
        ready, self._ready, self._failed = self._ready, self._failed, []
        for req in ready:
            # Not every release removes what has ended from the running batch after each pass.
            if any(req is own for own in self._scheduler.running_batch.reqs):
                self._ready.append(req)
                continue
            req.finished_reason = req.finished_len = req.finished_output = None
            req.reset_for_retract()
            # Its first pass does not count.
            req.retracted_stain = req._cache_breakdown_computed = False
            req.cached_tokens = req.storage_hit_length = 0
            req.storage_hit_start = None
            req.time_stats.reset_prefill_retry_time()
            self._scheduler._add_request_to_queue(req, is_retracted=True)
