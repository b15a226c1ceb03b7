"""What the ranks of a model agree on, once per pass of the scheduler.

Each rank has a scheduler, a tree of SGLang's, and a store of the heads and layers that it has.
The schedulers run in lock step and must do the same with slots, tree and queue, or the next
collective of the model has other shapes on one rank, and all end. Stores need not be alike: one may
have lost a file, be slower, or still be opening. So nothing that a store, a clock, a disk or a
thread says reaches slots, tree or queue but through the vote here, which is one vector of integers,
of which the least of each is taken over all ranks:

    who decides        what                                          how
    rank 0             the time; load or compute; a request's        others vote `ANY`
                       patience
    all                how much can be restored of a prompt; which   the least
                       jobs have ended, and well; which writes
                       have let go of their slots
    any                a job is slower than computing                the least

What a rank lacks is computed by all, and offered to all stores again: so they become alike.

The stages of a pipeline do the same in each pass, but not at the same time: the last one goes on
only when the first one has begun its next pass. So nobody waits for a vote of the pass that it is
in. What is agreed on was said some passes before, of jobs, saves and plans that may be gone by now.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from impress_sglang.serving.job_queue import Loader
from impress_sglang.serving.load_jobs import JobState, LoadJob

ANY = 1 << 62
"""The vote of a rank that leaves a decision to others."""
_MICROSECONDS, _UNKNOWN = 1e6, -1.0

Least: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""The least of each number over all ranks, each of which calls it with as many."""
Begin: TypeAlias = Callable[[Sequence[int]], Callable[[], Sequence[int]]]
"""The same, without waiting for others; what it returns waits."""


class Ranks:
    """This rank, and how it hears from the others; all of them call each method alike."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        least: Least = lambda numbers: numbers,
        gather: Callable[[str], Sequence[str]] = lambda text: [text],
        begin: Begin | None = None,
        batches: int = 1,
    ) -> None:
        """`gather` returns the texts of all ranks, in order; `least`: see `Least`.

        In a pipeline, `batches` are in work at a time, and votes `begin`.
        """
        self.rank = rank
        self.size = size
        self.least = least
        self.gather = gather
        self.begin = begin or (lambda numbers: functools.partial(self.least, numbers))
        self.batches = batches
        self.copies = 1
        """How many ranks in a row have the same heads, which the first of them writes for all."""
        self._due: list[Callable[[], None]] = []
        self._held = 0

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.size == 1

    @property
    def writes(self) -> bool:
        """Whether this rank writes its heads, and the others with them read what it wrote."""
        return self.rank % self.copies == 0

    @property
    def lag(self) -> int:
        """For how many passes nobody waits for a vote."""
        return self.batches if self.batches > 1 else 0

    def all(self, truth: bool) -> bool:
        """Whether something is true of all ranks."""
        return truth if self.alone else bool(self.least([truth])[0])

    def any(self, truth: bool) -> bool:
        """Whether something is true of some rank."""
        return not self.all(not truth)

    def together(self, act: Callable[[], None]) -> None:
        """Do what all ranks do together for a message: at once, or when `holds` finds them ready.

        A stage tells the next one only when it has handled all messages of a pass.
        """
        if self.batches == 1:
            act()
        else:
            self._due.append(act)

    def holds(self) -> bool:
        """Whether no batch may begin in this pass, after its messages, because something is due.

        That is done when all stages have seen all batches off: then one can wait for another.
        """
        if not self._due:
            return False
        self._held += 1
        if self._held > self.batches:
            due, self._due, self._held = self._due, [], 0
            for act in due:
                act()
        return self._held > 0


ALONE = Ranks()


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What a rank would do for a queued request.

    Attributes:
        stop: how many of its first tokens can be restored; 0 for none.
        loads: whether that is faster than computing them.
        patience: seconds that computing takes; None: unknown.
    """

    stop: int = 0
    loads: bool = False
    patience: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Vote:
    """What one rank says in a pass, or what all have agreed on.

    Attributes:
        wishes: for requests that were planned, in the order in which they were.
        ended: of each job, in the order in which they were begun, whether the loader has let it go.
        whole: of each job, whether nothing of it was unreadable so far.
        worth: of each job, whether it is faster than computing.
        saves: how many saves have let go of their slots, from the first on.
    """

    wishes: Sequence[Wish]
    ended: Sequence[bool]
    whole: Sequence[bool]
    worth: Sequence[bool]
    saves: int


@dataclasses.dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks do now: the wishes by plan, jobs instead of which they compute, and the saves
    that they release."""

    wishes: Mapping[Any, Wish] = dataclasses.field(default_factory=dict)
    slow: Sequence[LoadJob] = ()
    saves: Sequence[Any] = ()


@dataclasses.dataclass(slots=True)
class _Ballot:
    """A vote of which nothing was done yet, what it is on, and how many passes ago it was."""

    plans: Sequence[Any]
    jobs: list[LoadJob]
    saves: Sequence[Any]
    vote: Callable[[], Vote]
    age: int = 0


class Agreement:
    """The vote of each pass, and what follows for jobs; the scheduler's thread owns it.

    It is a loader whose jobs end when they have ended on all ranks, and well if they did on all.
    """

    def __init__(
        self, ranks: Ranks, loader: Loader, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`loader` of this rank; `clock` returns seconds, of which those of rank 0 count."""
        self.ranks = ranks
        self.wake = loader.wake
        self._loader, self._clock, self._now = loader, clock, 0.0
        self.begun: list[LoadJob] = []
        """Jobs of which it is not agreed that they have ended, in the order of their begin."""
        self._ended: list[LoadJob] = []
        self._ballot: _Ballot | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a vote of which nothing was done yet."""
        return self._ballot is not None

    def begin(self, job: LoadJob) -> None:
        """See `JobLoader.begin`."""
        self.begun.append(job)
        self._loader.begin(job)

    def take_ended(self) -> Iterator[LoadJob]:
        """The jobs of which that was agreed since the last call."""
        for _ in self._loader.take_ended():
            # What ended here ends with the vote.
            pass
        ended, self._ended = self._ended, []
        yield from ended

    def now(self) -> float:
        """Seconds by the clock of rank 0, as of the last vote."""
        return self._now

    def agree(
        self, wishes: Mapping[Any, Wish], slow: Collection[LoadJob], saves: Sequence[Any]
    ) -> Agreed:
        """Vote, or do what a vote has said: note which jobs have ended.

        All ranks call it in the same passes, with wishes for the same plans. `slow`: jobs that take
        longer than computing on this rank; `saves`: those that are over on this rank, up to the
        first one that is not.
        """
        if self._ballot is None:
            begun = list(self.begun)
            ended = [job.done.is_set() for job in begun]
            pairs = zip(begun, ended, strict=True)
            whole = [not over or job.state is not JobState.FAILED for job, over in pairs]
            worth = [job not in slow for job in begun]
            vote = self.vote(Vote(list(wishes.values()), ended, whole, worth, len(saves)))
            self._ballot = _Ballot(list(wishes), begun, saves, vote)
        ballot = self._ballot
        if ballot.age < self.ranks.lag:
            ballot.age += 1
            return Agreed()
        self._ballot, agreed, begun = None, ballot.vote(), ballot.jobs
        for job, has_ended, is_whole in zip(begun, agreed.ended, agreed.whole, strict=True):
            if not has_ended:
                continue
            if not is_whole:
                job.state = JobState.FAILED
            elif job.revoked:
                # One rank may have filled its slots before they were taken away.
                job.state = JobState.DROPPED
            self.begun.remove(job)
            self._ended.append(job)
        named = dict(zip(ballot.plans, agreed.wishes, strict=True))
        votes = zip(begun, agreed.worth, strict=True)
        slow = [job for job, is_worth in votes if not is_worth]
        return Agreed(named, slow, ballot.saves[: agreed.saves])

    def vote(self, own: Vote) -> Callable[[], Vote]:
        """Vote; all ranks have as many wishes and jobs in theirs. The rest comes by a call."""
        numbers = [self._decide(self._clock()), own.saves]
        for wish in own.wishes:
            loads = ANY if self.ranks.rank else int(wish.loads)
            patience = _UNKNOWN if wish.patience is None else wish.patience
            numbers += [wish.stop, loads, self._decide(patience)]
        for job in zip(own.ended, own.whole, own.worth, strict=True):
            numbers += map(int, job)
        heard = self.ranks.begin(numbers)
        return lambda: self._read(heard(), len(own.wishes))

    def _read(self, agreed: Sequence[int], num_wishes: int) -> Vote:
        now, saves, *least = agreed
        self._now = now / _MICROSECONDS
        told = iter(least)
        wishes = [
            Wish(next(told), bool(next(told)), _seconds(next(told))) for _ in range(num_wishes)
        ]
        flags = [bool(flag) for flag in told]
        return Vote(wishes, flags[0::3], flags[1::3], flags[2::3], saves)

    def _decide(self, seconds: float) -> int:
        """A time as rank 0 votes; the others leave it to that."""
        return ANY if self.ranks.rank else int(seconds * _MICROSECONDS)


def _seconds(microseconds: int) -> float | None:
    return None if microseconds < 0 else microseconds / _MICROSECONDS
