"""What the ranks of a model agree on, once per pass of the scheduler.

With tensor parallelism each rank has a scheduler, a tree of SGLang's, and a store of its own heads.
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
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

from impress_sglang.serving.job_queue import Loader
from impress_sglang.serving.load_jobs import JobState, LoadJob

ANY = 1 << 62
"""The vote of a rank that leaves a decision to others."""
_MICROSECONDS, _UNKNOWN = 1e6, -1.0

Least: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""The least of each number over all ranks, each of which calls it with as many."""


class Ranks:
    """This rank, and how it hears from the others; all of them call each method alike."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        least: Least = lambda numbers: numbers,
        gather: Callable[[str], Sequence[str]] = lambda text: [text],
    ) -> None:
        """`gather` returns the texts of all ranks, in order; `least`: see `Least`."""
        self.rank = rank
        self.size = size
        self.least = least
        self.gather = gather

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.size == 1

    def all(self, truth: bool) -> bool:
        """Whether something is true of all ranks."""
        return truth if self.alone else bool(self.least([truth])[0])

    def any(self, truth: bool) -> bool:
        """Whether something is true of some rank."""
        return not self.all(not truth)


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
    """What all ranks do now: the wishes by request, jobs instead of which they compute, and how
    many saves they release."""

    wishes: dict[str, Wish]
    slow: list[LoadJob]
    saves: int


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

    def agree(self, wishes: Mapping[str, Wish], slow: Collection[LoadJob], saves: int) -> Agreed:
        """Vote, and note which jobs have ended.

        All ranks call it in the same passes, with wishes for the same requests. `slow`: jobs that
        take longer than computing on this rank; `saves`: see `Vote`.
        """
        begun = list(self.begun)
        ended = [job.done.is_set() for job in begun]
        pairs = zip(begun, ended, strict=True)
        whole = [not over or job.state is not JobState.FAILED for job, over in pairs]
        worth = [job not in slow for job in begun]
        agreed = self.vote(Vote(list(wishes.values()), ended, whole, worth, saves))
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
        named = dict(zip(wishes, agreed.wishes, strict=True))
        votes = zip(begun, agreed.worth, strict=True)
        return Agreed(named, [job for job, is_worth in votes if not is_worth], agreed.saves)

    def vote(self, own: Vote) -> Vote:
        """Agree on a vote; all ranks have as many wishes and jobs in theirs."""
        numbers = [self._decide(self._clock()), own.saves]
        for wish in own.wishes:
            loads = ANY if self.ranks.rank else int(wish.loads)
            patience = _UNKNOWN if wish.patience is None else wish.patience
            numbers += [wish.stop, loads, self._decide(patience)]
        for job in zip(own.ended, own.whole, own.worth, strict=True):
            numbers += map(int, job)
        now, saves, *least = self.ranks.least(numbers)
        self._now = now / _MICROSECONDS
        told = iter(least)
        wishes = [Wish(next(told), bool(next(told)), _seconds(next(told))) for _ in own.wishes]
        flags = [bool(flag) for flag in told]
        return Vote(wishes, flags[0::3], flags[1::3], flags[2::3], saves)

    def _decide(self, seconds: float) -> int:
        """A time as rank 0 votes; the others leave it to that."""
        return ANY if self.ranks.rank else int(seconds * _MICROSECONDS)


def _seconds(microseconds: int) -> float | None:
    return None if microseconds < 0 else microseconds / _MICROSECONDS
