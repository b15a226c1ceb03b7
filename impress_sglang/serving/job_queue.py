"""Decides which load jobs get slots, and when they lose them: docs/design.md, under pressure.

Thread: scheduler. `plugin.job_slots` is its interface to SGLang.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from impress_sglang.serving.load_jobs import JobState, LoadJob

# Number of requests at the head of the queue that are considered.
ADMISSION_WINDOW = 32
# Seconds for which others may pass a request that waits for room, if its own time is unknown.
DEFAULT_PATIENCE = 1.0
# Seconds between two checks while waiting for the loader.
POLL_SECONDS = 0.01


@dataclasses.dataclass(eq=False, slots=True)
class Waiter:
    """A queued request, the job it waits for, and the lock that is held for it.

    `compute_seconds`: None if unknown. Its job loads its first `common_tokens`; `started_job`:
    whether the job was made for it. `blocked_at`: time at which its job began to wait for room at
    the head of the queue, also if its slots were taken away since.
    """

    rid: str
    compute_seconds: float | None = None
    job: LoadJob | None = None
    common_tokens: int = 0
    started_job: bool = False
    lock: Any = None
    blocked_at: float | None = None
    planned_resident: int = 0
    num_failures: int = 0


_Waiter = TypeVar("_Waiter", bound=Waiter)


class JobQueue(Generic[_Waiter]):
    """Jobs of one scheduler, and the requests that wait for them."""

    def __init__(
        self,
        pool: Any,
        loader: Any,
        on_job_end: Callable[[LoadJob], None],
        replan: Callable[[_Waiter, LoadJob], None],
        min_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        """`pool`: a `plugin.job_slots.JobSlots`; `loader`: a `JobLoader`.

        `on_job_end` is called first with each job that has ended. `replan` is called with each
        request whose job has ended or is not needed, and may give it another one. A job loads at
        least `min_tokens`.
        """
        self._pool = pool
        self._loader = loader
        self._on_job_end = on_job_end
        self._replan = replan
        self._min_tokens = min_tokens
        self._clock = clock
        self.jobs: list[LoadJob] = []
        """Jobs that have not ended, the earliest first."""
        self.waiters: dict[str, _Waiter] = {}
        """Queued requests that wait for a job, or for which a lock is held."""
        self._admissible: set[str] | None = None
        """Requests that may pass the head, which has waited long enough; None if all may."""

    def __bool__(self) -> bool:
        return bool(self.jobs)

    @property
    def filling(self) -> bool:
        """Whether slots are being filled, including slots that are in SGLang's tree already."""
        return any(job.owned_slots is not None or job.inserted_early for job in self.jobs)

    @property
    def started(self) -> list[LoadJob]:
        """Jobs that were passed to the loader, in the same order on all ranks."""
        return [job for job in self.jobs if job.state is not JobState.WAITING]

    @property
    def computing(self) -> list[LoadJob]:
        """Jobs whose reads are done, and on which the scheduler's thread computes."""
        loaded = (job for job in self.jobs if job.state is JobState.LOADED)
        return [job for job in loaded if job.computes_after_reads and not job.revoked]

    @property
    def active(self) -> bool:
        """Whether there is a job, or a lock is held for a queued request."""
        return bool(self.jobs or self.waiters)

    @property
    def loading(self) -> Iterator[LoadJob]:
        """Jobs with slots that are not in SGLang's tree."""
        return (job for job in self.jobs if job.owned_slots is not None)

    @property
    def blocked(self) -> list[_Waiter]:
        """Requests whose jobs wait for room. Read in each pass; the queue may be long."""
        return [
            waiter
            for waiter in self.waiters.values()
            if waiter.blocked_at is not None
            and waiter.job is not None
            and waiter.job.state is JobState.WAITING
        ]

    def join(self, waiter: _Waiter, job: LoadJob) -> None:
        """Let a request wait for a new job, or for a job that already loads the beginning of it."""
        assert waiter.job is None
        joined, waiter.common_tokens = overlapping(self.jobs, job, self._min_tokens)
        waiter.started_job = joined is job
        if waiter.started_job:
            self.jobs.append(job)
        waiter.job = joined
        joined.waiters.append(waiter)
        self.waiters[waiter.rid] = waiter

    def leave(self, waiter: _Waiter) -> None:
        """Release all that is locked or loaded for a request that was admitted or has ended."""
        self.waiters.pop(waiter.rid, None)
        self._release(waiter)
        self._detach(waiter)
        waiter.blocked_at = None

    def give_up(self, job: LoadJob) -> None:
        """Let all requests that wait for a job continue without it."""
        for waiter in list(job.waiters):
            self._detach(waiter)

    def must_wait(self, waiter: _Waiter) -> bool:
        """Whether a request must not be admitted now."""
        may_pass = self._admissible is None or waiter.rid in self._admissible
        return waiter.job is not None or not may_pass

    def poll(self, queue: Iterable[_Waiter], ended: Iterable[LoadJob]) -> None:
        """Finish the jobs that have `ended` on all ranks, and allocate slots for others.

        `queue`: all requests, in order.
        """
        for job in ended:
            self._finish(job)
        self._admissible = None
        if any(self._locked) or any(job.state is JobState.WAITING for job in self.jobs):
            self._grant(queue)

    def end_computing(self, job: LoadJob, state: JobState) -> None:
        """Finish a job on which the scheduler's thread no longer computes."""
        job.state = state
        self._finish(job)

    def make_room(self, missing: Callable[[], int]) -> None:
        """Free locks and slots of jobs until no slots are `missing` besides evictable ones."""
        for waiter in reversed(list(self.waiters.values())):
            if missing() <= 0:
                return
            self._release(waiter)
        for job in reversed(list(self.loading)):
            if missing() <= 0:
                return
            self._revoke(job)

    def drop_all(self) -> None:
        """Drop all jobs and locks; the loader may still read for these jobs."""
        for job in list(self.jobs):
            self.give_up(job)
        for waiter in list(self.waiters.values()):
            self.leave(waiter)

    def wait_for_loader(self, seconds: float, *, alone: bool = True) -> bool:
        """Wait until the loader is done with all jobs, which were dropped; False if not in time.

        On a rank that is `alone` they are finished then, so that SGLang may flush at once.
        """
        for _ in range(math.ceil(seconds / POLL_SECONDS)):
            self._loader.wake.clear()
            if all(job.done.is_set() for job in self.jobs):
                break
            self._loader.wake.wait(POLL_SECONDS)
        done = [job for job in self.jobs if job.done.is_set()]
        in_time = len(done) == len(self.jobs)
        for job in done if alone else ():
            self._finish(job)
        return in_time

    def _grant(self, queue: Iterable[_Waiter]) -> None:
        first = list(itertools.islice(queue, ADMISSION_WINDOW))
        if self._pool.windows and first and not self.must_wait(first[0]) and self._pool.is_idle():
            # If locked rows keep it from being admitted, no request ever is.
            self._release_others({first[0].rid})
        room = budget = self._pool.room()
        counted, seen = set[object](), set[str]()
        blocked = False
        for waiter in first:
            if budget <= 0:
                break
            need, job = self._pool.need(waiter, counted), waiter.job
            seen.add(waiter.rid)
            if job is not None and job.state is JobState.WAITING:
                blocked = blocked or not self._try_start(job, need, budget, first=budget == room)
                if job.state is JobState.WAITING and waiter.job is job:
                    if not self._has_waited(waiter):
                        # Others may pass it.
                        continue
                    self._release_others(seen)
                    self._admissible = seen
                    return
            budget -= need
        if budget <= 0:
            self._release_others(seen)

    def _release_others(self, seen: set[str]) -> None:
        """Release locks of all other requests, which keep these from being admitted."""
        for waiter in list(self._locked):
            if waiter.rid not in seen:
                self._release(waiter)

    def _try_start(self, job: LoadJob, need: int, budget: int, *, first: bool) -> bool:
        """Start a job if there is room; returns whether it need not wait any longer.

        `first`: whether no room is reserved for requests before it.
        """
        if self._pool.lacking(job) < self._min_tokens:
            waiters = list(job.waiters)
            self.give_up(job)
            for waiter in waiters:
                # It may need more than the job would have loaded.
                self._replan(waiter, job)
            return True
        alone = first and self._pool.is_idle() and not any(self.loading)
        alone = alone and all(waiter.job is job for waiter in self._locked)
        if need >= budget and not alone:
            return False
        if self._pool.take(job):
            job.state = JobState.LOADING
            self._loader.begin(job)
            return True
        if alone:
            # It would never get its slots.
            self.give_up(job)
        return alone

    @property
    def _locked(self) -> Iterator[_Waiter]:
        return (waiter for waiter in self.waiters.values() if waiter.lock is not None)

    def _has_waited(self, waiter: _Waiter) -> bool:
        now = self._clock()
        if waiter.blocked_at is None:
            waiter.blocked_at = now
        patience = DEFAULT_PATIENCE if waiter.compute_seconds is None else waiter.compute_seconds
        return now - waiter.blocked_at > patience

    def _finish(self, job: LoadJob) -> None:
        self.jobs.remove(job)
        self._on_job_end(job)
        # The request that started it comes first, and reports its reads.
        waiters, job.waiters = job.waiters, []
        loaded = job.state is JobState.LOADED and not job.revoked
        if job.inserted_early and not loaded:
            self._revoke_all()
            self._pool.discard(job)
        elif job.owned_slots is not None:
            if loaded:
                self._pool.insert(job)
            else:
                self._pool.free(job)
        for waiter in waiters:
            waiter.job = None
            if loaded:
                waiter.blocked_at = None
                self._release(waiter)
                waiter.lock = self._pool.lock_for(waiter)
            else:
                waiter.num_failures += 1
        if loaded:
            self._pool.release(job.lock)
        for waiter in waiters:
            self._replan(waiter, job)

    def _revoke_all(self) -> None:
        """Revoke all locks and jobs: they may extend slots whose KVs are wrong."""
        for waiter in self.waiters.values():
            self._release(waiter)
        for job in list(self.loading):
            self._revoke(job)

    def _revoke(self, job: LoadJob) -> None:
        """Take the slots of a job away; its requests may plan again when it has ended."""
        job.revoke()
        self._pool.free(job)

    def _detach(self, waiter: _Waiter) -> None:
        job, waiter.job = waiter.job, None
        if job is None:
            return
        job.waiters.remove(waiter)
        if job.waiters or job.inserted_early:
            return
        if job.state is JobState.WAITING:
            self.jobs.remove(job)
            job.end(JobState.DROPPED)
            # It may be the one that others must not pass, and without jobs there is no poll.
            self._admissible = None
        elif job.owned_slots is not None:
            self._revoke(job)

    def _release(self, waiter: _Waiter) -> None:
        hold, waiter.lock = waiter.lock, None
        if hold is not None:
            self._pool.release(hold)


def overlapping(jobs: Sequence[LoadJob], job: LoadJob, min_tokens: int) -> tuple[LoadJob, int]:
    """Find a job that loads at least the first `min_tokens` tokens of a new one, and the end of the
    common tokens; otherwise return the new one."""
    for other in jobs:
        # A waiting job will begin after the tokens that are resident then.
        late = other.state is not JobState.WAITING and other.start > job.start
        if other.key_scope != job.key_scope or other.revoked or late:
            continue
        common = min(other.stop, job.stop)
        if common - job.start < min_tokens:
            continue
        differ = (other.tokens[:common] != job.tokens[:common]).nonzero()[0]
        common = int(differ[0]) if len(differ) else common
        if common - job.start >= min_tokens:
            return other, common
    return job, job.stop
