"""Plans what is loaded for queued requests, and lets them wait for it."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

from impress_sglang.config import OFF
from impress_sglang.cost import RequestLengths
from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable
from impress_sglang.plugin.known import Brought, Known, KnownRequests, as_tokens, key_of
from impress_sglang.plugin.late_start import LateStart
from impress_sglang.plugin.slot_pool import TreeSlots
from impress_sglang.plugin.tree_nodes import match_resident
from impress_sglang.plugin.write_back import WriteBack
from impress_sglang.serving.job_queue import JobQueue
from impress_sglang.serving.load_jobs import JobLoader, JobState, LoadJob
from impress_sglang.serving.ranks import Agreement, Wish
from impress_sglang.serving.report import estimate_fields
from impress_sglang.serving.scheduling import QueueOrder, Serving
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.losses import Cause

logger = logging.getLogger(__name__)

# A request plans at most so many jobs that end without having brought anything.
MOST_TRIES = 3
# While all requests wait for jobs, the scheduler looks after so many seconds at the latest.
IDLE_SECONDS = 0.002
# While a batch runs, ranks agree on saves alone in one of so many passes: a vote takes 0.2 ms.
SAVES_EVERY = 8


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """What this rank would load for a request."""

    known: Known
    job: LoadJob | None
    wish: Wish


class PrefixLoads:
    """The load jobs of one tree cache, and the requests that wait for them."""

    def __init__(self, requests: KnownRequests, scheduler: Any) -> None:
        """Begin without jobs, for a scheduler of SGLang's that is complete."""
        self._cache, self._planner = requests.cache, requests.planner
        self._service = service = requests.service
        self._known, self._ranks, self._alone = requests.known, requests.ranks, requests.ranks.alone
        self._scheduler, self._requests = scheduler, requests
        self._passes = 0
        # What was planned and is not agreed on, by request.
        self._planned: dict[str, _Planned] = {}
        layers = requests.layers
        self._loader = JobLoader(layers(0)[0].device, layers, service.codec)
        slots = TreeSlots(requests, scheduler, lambda job: self._late.put_back(job))
        self._least = service.config.min_prefix_tokens
        self._agreement = Agreement(requests.ranks)
        self.jobs: JobQueue[Known] = JobQueue(
            *(slots, self._loader, self._note_end, self._after_job),
            *(self._least, self._agreement.now),
        )
        self._late = LateStart(requests, scheduler, self.jobs, slots)
        schedule = service.config.schedule
        self.order = None if schedule == OFF else QueueOrder(schedule, self._serving)
        """None if the queue is not reordered."""

    def plan(self, known: Known) -> None:
        """Plan what is to be loaded for a queued request; join or begin a job for it."""
        known.planned = True
        # What it used instead may be gone.
        self._requests.lower_bits(known)
        req, key, not_served = known.req, key_of(known.req), known.report["not_served"]
        if known.tries >= MOST_TRIES or not_served is not None or len(key) < self._least:
            return
        if self._alone and not self._planner.looks_for(len(key)):
            return
        known.found = resident = match_resident(self._cache, key).device_prefix_len
        tokens = as_tokens(key.raw_token_ids())
        job, wish, left = self._plan_of(known, tokens, resident), Wish(), len(tokens) - resident
        if job is not None:
            patience = self._service.estimator.computing_seconds(resident, left)
            wish = Wish(job.stop, job.loads, patience)
        planned = _Planned(known, job, wish)
        if self._alone:
            self._begin(planned, wish)
        elif left >= self._least:
            self._planned[req.rid] = planned

    def _plan_of(self, known: Known, tokens: Tokens, resident: int) -> LoadJob | None:
        own = known.kv_class
        return self._planner.plan(known.namespace, known.space, tokens, resident, own)

    def _begin(self, planned: _Planned, wish: Wish) -> None:
        """Do what was planned, as far as all ranks wish it: join or begin a job."""
        known, job = planned.known, planned.job
        if job is None or wish.stop - job.start < self._least:
            return
        known.report.update(estimate_fields(job.estimate, loads=wish.loads))
        if not wish.loads:
            # Otherwise what is not loaded because reads were slow would never be loaded again.
            self._loader.measure(job.store, job.spans[:1], exact=known.kv_class.exact)
            return
        if wish.stop < job.stop:
            job = self._planner.cut(job, wish.stop)
        job.store.tree.touch(job.match)
        self._service.lookahead.wait(known.rid, (*job.spans, *job.behind))
        known.patience = wish.patience
        known.stored, known.io = job.stop, job.estimate.io
        self.jobs.join(known, job)

    def poll(self, saves: WriteBack) -> None:
        """Once per pass: do what all ranks agree on, and give slots to jobs."""
        if self._votes(saves):
            self._loader.wake.clear()
            slow, wishes = self._slow(), {own: own.wish for own in self._planned.values()}
            agreed = self._agreement.agree(wishes, self.jobs.begun, slow, saves.over())
            saves.release(agreed.saves)
            for job in agreed.slow:
                if job.slots is not None:
                    # Where another rank finds computing faster, nothing is known of it.
                    self._compute_instead(job, *slow.get(job, (0.0, 0.0)))
            for own, wish in agreed.wishes.items():
                # In a pipeline it may have been planned again since, or be gone.
                rid = own.known.rid
                if self._planned.get(rid) is own:
                    self._begin(self._planned.pop(rid), wish)
            # Also without jobs: what they brought may be held.
            queue = (self._known.get(own.rid) for own in self._scheduler.waiting_queue)
            self.jobs.poll((known for known in queue if known is not None), agreed.ended)
            self._raise_bits()
        self._late.poll()

    def _votes(self, saves: WriteBack) -> bool:
        """Whether ranks vote in this pass, as they must; that is the same on all of them."""
        if self._agreement.is_open or self._planned or self.jobs.active:
            return True
        busy = not self._scheduler.running_batch.is_empty()
        self._passes = (self._passes + 1) % SAVES_EVERY if saves and busy else 0
        return bool(saves) and not self._passes

    def may_run(self, known: Known) -> bool:
        """Whether a request may be admitted now; plans it again if what was planned is gone."""
        if known.job is None and not known.planned:
            self.plan(known)
        if self._late.is_blocked(known):
            return False
        if not self.jobs.waits(known) and self._has_lost(known):
            self.plan(known)
        if known.rid in self._planned:
            return False
        # On several ranks a pass would have to fail on all of them.
        return not self.jobs.waits(known) or (self._alone and self._late.may_start(known))

    def end_waiting(self, known: Known) -> None:
        """Note that a request was admitted, or is gone."""
        rid = known.rid
        self._planned.pop(rid, None)
        self.jobs.leave(known)
        if self.order is not None:
            self.order.forget(rid)
        self._service.lookahead.stop_waiting(rid)

    def end_pass(self, known: Known) -> None:
        """Tell of the reads of a job that a request did not wait for; its pass is over."""
        job, known.early = known.early, None
        if job is not None:
            job.done.wait(IDLE_SECONDS)
            known.gated += job.gated
            # On an accelerator, passes wait on its stream.
            known.disturbed = known.disturbed or bool(job.events)
            self._requests.tell_reads(known, job)

    def rest(self) -> bool:
        """Wait a little for jobs, if there are any; returns whether there are."""
        if self.jobs.jobs and not self.jobs.computing:
            self._loader.wake.wait(IDLE_SECONDS)
        return bool(self.jobs.jobs)

    def drop_all(self) -> None:
        """Drop all jobs and plans."""
        for known in self._known.values():
            known.planned = False
            # What was found in a store ends with it.
            known.why_no_blend, known.blends = None, True
        self._planned.clear()
        self.jobs.drop_all()

    def wait_for_loader(self) -> None:
        """Wait until nothing is read for dropped jobs, unless the disk does not answer."""
        self.jobs.wait_for_loader(self._service.config.io_timeout)

    def close(self) -> None:
        """Drop all jobs, and end the loader's thread."""
        self.drop_all()
        self._loader.close(self._service.config.io_timeout)

    def _serving(self, rid: str) -> Serving | None:
        """What serving a waiting request takes, for the order of the queue."""
        known = self._known.get(rid)
        if known is None:
            return None
        total, job = len(known.req.full_untruncated_fill_ids), known.job
        length, stored = known.report["prefix_tokens"], 0 if job is None else len(job)
        work = RequestLengths(length, stored, total - length - stored)
        return Serving(
            self._service.estimator.estimate(work, known.io),
            length + stored >= self._least,
            0.0 if job is None else job.unread(self._service.shape.num_layers),
        )

    def check(self) -> None:
        """Check that jobs, and the requests that wait for them, agree."""
        for rid, known in self.jobs.waiters.items():
            assert self._known[rid] is known
        for job in self.jobs.jobs:
            assert all(known.job is job for known in job.waiters)

    def _has_lost(self, known: Known) -> bool:
        # What was resident may be evicted before the request is admitted.
        found = max(known.brought.stop, known.found)
        if not found or known.hold is not None:
            return False
        resident = match_resident(self._cache, key_of(known.req)).device_prefix_len
        if resident >= found:
            return False
        if resident < known.brought.stop:
            known.brought = Brought()
        return True

    def _note_end(self, job: LoadJob) -> None:
        if isinstance(job.error, PrefixUnreadable) and self._service.opened is job.store:
            logger.warning("a stored prefix is computed: %s", job.error)
            job.store.report(job.error)
        elif job.state is JobState.FAILED and job.error is None and self._ranks.copies > 1:
            # A rank that could not read what this one wrote may never try it again.
            spans, tree = job.match.slice(job.start, job.stop), job.store.tree
            found = dict.fromkeys(own.segment for own in reversed(spans))
            lost = [own for own in found if tree.get(own.segment_id) is own]
            job.store.writes.discard(lost, Cause.DAMAGED)

    def _after_job(self, known: Known, job: LoadJob) -> None:
        if job.state is JobState.FAILED and not isinstance(job.error, SegmentUnreadable):
            # What is damaged the store itself knows.
            self._decline(known, job)
        if job.state is JobState.LOADED and not job.revoked:
            self._requests.tell_loaded(known, job)
        self.plan(known)

    def _decline(self, known: Known, job: LoadJob) -> None:
        """Note that what was to be loaded could not be read now."""
        known.declined = True

    def _raise_bits(self) -> None:
        # What requests whose jobs have no room ask for would be another copy of what is resident.
        blocked = self.jobs.blocked
        # Those for which a prefix is kept resident, looked for once: the queue may be long.
        others = self._known.values() if blocked else ()
        users = [own for own in others if own.admitted or own.hold is not None]
        for known in blocked:
            blends = known.job is not None and known.job.computes
            if blends or known.kv_class.exact or known.req.session is not None:
                continue
            if self._requests.raise_bits(known, users):
                self.jobs.leave(known)

    def _slow(self) -> dict[LoadJob, tuple[float, float]]:
        """Jobs that take longer than computing: what each still takes, and what that takes."""
        slow, now = dict[LoadJob, tuple[float, float]](), time.monotonic()
        for job in self.jobs.loading if self._service.config.load != "always" else ():
            left = job.seconds_left(self._service.shape.num_layers, now)
            if left is None:
                left = now - job.began_at if job.began_at else 0.0
            took = self._service.estimator.faster_seconds(left, job.start, len(job))
            if took is not None:
                slow[job] = left, took
        return slow

    def _compute_instead(self, job: LoadJob, left: float, computing: float) -> None:
        """Let requests compute in `computing` seconds what a job would bring in `left` more."""
        logger.info("loading %d tokens is slower than computing them", len(job))
        for known in job.waiters:
            known.report.update(
                decision="recompute",
                estimated_load_ms=round(left * 1e3, 3),
                estimated_recompute_ms=round(computing * 1e3, 3),
            )
            known.tries = MOST_TRIES
        self.jobs.give_up(job)
