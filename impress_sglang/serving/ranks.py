"""The vote by which the ranks of a model agree, once per pass of the scheduler.

Each rank has a scheduler, a tree of SGLang's, and a store of its heads and layers. The schedulers
run in lock step and must do the same with slots, tree and queue, or the next collective of the
model has different shapes on one rank, and all ranks end. Stores may differ: one may have lost a
file, be slower, or still be opening. So the state of a store, clock, disk or thread affects slots,
tree or queue only through the vote here, a vector of integers whose minimum is taken over all
ranks:

    who decides        what                                          how
    rank 0             the time; load or compute; a request's        others vote `NO_VOTE`
                       patience
    all                how many tokens of a prompt can be restored;  the minimum
                       which jobs have ended, and succeeded;
                       which writes have released their slots
    any                a job is slower than computing                the minimum

Tokens that a rank lacks are computed by all and offered to all stores again, which so converge.

The stages of a pipeline do the same in each pass, but not at the same time: the last stage
continues only when the first one has begun its next pass. So no rank waits for a vote of the
current pass. Results are from some passes ago, for jobs, saves and plans that may have ended since.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from impress_sglang.serving.load_jobs import JobState, LoadJob

NO_VOTE = 1 << 62
"""The vote of a rank that leaves a decision to others."""
_MICROSECONDS, _UNKNOWN = 1e6, -1.0

StartAllReduce: TypeAlias = Callable[[Sequence[int]], Callable[[], Sequence[int]]]
"""Starts a vote, with equally many numbers on all ranks; the result waits for the minima."""


class Ranks:
    """This rank and its collective operations; all ranks call each method in the same order."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        start_all_reduce_min: StartAllReduce = lambda numbers: lambda: numbers,
        all_gather: Callable[[str], Sequence[str]] = lambda text: [text],
        batches_in_flight: int = 1,
    ) -> None:
        """`all_gather` returns the texts of all ranks, in order; pipelines have several batches."""
        self.rank = rank
        self.size = size
        self.start_all_reduce_min = start_all_reduce_min
        self.all_gather = all_gather
        self.batches_in_flight = batches_in_flight
        self.head_replicas = 1
        """Number of consecutive ranks with the same heads, which the first of them writes."""
        self.alone = size == 1
        self._due: list[Callable[[], None]] = []
        self._held = 0

    @property
    def writes(self) -> bool:
        """Whether this rank writes its heads; the others with the same heads read its files."""
        return self.rank % self.head_replicas == 0

    def all_reduce_min(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the minimum of each number over all ranks."""
        return self.start_all_reduce_min(numbers)()

    def all(self, truth: bool) -> bool:
        return truth if self.alone else bool(self.all_reduce_min([truth])[0])

    def any(self, truth: bool) -> bool:
        return not self.all(not truth)

    def run_in_lockstep(self, act: Callable[[], None]) -> None:
        """Run a collective action for a message, now or when `holds_batches` finds stages ready.

        A stage sends messages to the next one only after handling all messages of a pass.
        """
        if self.batches_in_flight == 1:
            act()
        else:
            self._due.append(act)

    def holds_batches(self) -> bool:
        """Whether no batch may begin in this pass, after its messages, because actions are pending.

        They run when all batches have left all stages: then stages can wait for each other.
        """
        if not self._due:
            return False
        self._held += 1
        if self._held > self.batches_in_flight:
            due, self._due, self._held = self._due, [], 0
            for act in due:
                act()
        return self._held > 0


ALONE = Ranks()


@dataclasses.dataclass(frozen=True, slots=True)
class LoadProposal:
    """The vote of a rank on a queued request.

    Attributes:
        stop: number of leading tokens that can be restored; 0 for none.
        worthwhile: whether that is faster than computing them.
        compute_seconds: None if unknown.
    """

    stop: int = 0
    worthwhile: bool = False
    compute_seconds: float | None = None


class VoteResult(NamedTuple):
    """Result of a vote: the proposals by plan, jobs that have ended, jobs to replace by computing,
    and saves to release."""

    proposals: Mapping[Any, LoadProposal] = {}
    ended: Sequence[LoadJob] = ()
    slow: Sequence[LoadJob] = ()
    ended_saves: Sequence[Any] = ()


class Agreement:
    """The vote of each pass. Thread: scheduler. A single rank decides alone."""

    def __init__(self, ranks: Ranks, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds; only that of rank 0 counts."""
        self.ranks = ranks
        self._clock, self._now = clock, 0.0
        # A pending vote with its subjects, and its age in passes.
        self._ballot: tuple[Any, ...] | None = None
        self._age = 0

    @property
    def is_open(self) -> bool:
        """Whether a vote is pending."""
        return self._ballot is not None

    def now(self) -> float:
        """Seconds by the clock of rank 0, as of the last vote."""
        return self._now

    def agree(
        self,
        proposals: Mapping[Any, LoadProposal],
        jobs: Sequence[LoadJob],
        slow: Collection[LoadJob],
        saves: Sequence[Any],
    ) -> VoteResult:
        """Start a vote, or return the result of a pending one and set the states of its jobs.

        All ranks call it in the same passes, with proposals for the same plans and the same `jobs`,
        all of them started. `slow`: jobs that take longer than computing on this rank; `saves`:
        those that have ended on this rank, up to the first one that has not.
        """
        if self._ballot is None:
            numbers = self._votes(proposals.values(), jobs, slow, len(saves))
            result = self.ranks.start_all_reduce_min(numbers)
            self._ballot, self._age = (list(proposals), jobs, saves, result), 0
        if self.ranks.batches_in_flight > 1 and self._age < self.ranks.batches_in_flight:
            self._age += 1
            return VoteResult()
        (plans, jobs, saves, hear), self._ballot = self._ballot, None
        now, num_saves, *votes = hear()
        self._now = now / _MICROSECONDS
        threes = zip(votes[0::3], votes[1::3], votes[2::3], strict=True)
        agreed: dict[Any, LoadProposal] = {}
        for plan in plans:
            stop, loads, wait = next(threes)
            agreed[plan] = LoadProposal(
                stop, bool(loads), None if wait < 0 else wait / _MICROSECONDS
            )
        ended, slower = list[LoadJob](), list[LoadJob]()
        for job, (has_ended, is_whole, is_worth) in zip(jobs, threes, strict=True):
            if has_ended and not is_whole:
                job.state = JobState.FAILED
            elif has_ended and job.revoked:
                # A rank may have filled its slots before they were revoked.
                job.state = JobState.DROPPED
            if has_ended and not (job.computes_after_reads and job.state is JobState.LOADED):
                ended.append(job)
            elif not is_worth:
                slower.append(job)
        return VoteResult(agreed, ended, slower, saves[:num_saves])

    def _votes(
        self,
        proposals: Iterable[LoadProposal],
        jobs: Iterable[LoadJob],
        slow: Collection[LoadJob],
        saves: int,
    ) -> list[int]:
        """The vote of this rank on time, saves, wishes and jobs; see the module."""
        numbers = [self._decide(self._clock()), saves]
        for wish in proposals:
            loads = NO_VOTE if self.ranks.rank else int(wish.worthwhile)
            patience = _UNKNOWN if wish.compute_seconds is None else wish.compute_seconds
            numbers += [wish.stop, loads, self._decide(patience)]
        for job in jobs:
            has_ended = job.done.is_set()
            is_whole = not has_ended or job.state is not JobState.FAILED
            numbers += [has_ended, is_whole, job not in slow]
        return numbers

    def _decide(self, seconds: float) -> int:
        """Encode a time for the vote: rank 0 decides, the others vote `NO_VOTE`."""
        return NO_VOTE if self.ranks.rank else int(seconds * _MICROSECONDS)
