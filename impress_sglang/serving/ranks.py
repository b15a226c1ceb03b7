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
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from impress_sglang.serving.load_jobs import JobState, LoadJob

ANY = 1 << 62
"""The vote of a rank that leaves a decision to others."""
_MICROSECONDS, _UNKNOWN = 1e6, -1.0

Begin: TypeAlias = Callable[[Sequence[int]], Callable[[], Sequence[int]]]
"""Vote: all ranks call it with as many numbers. What it returns waits for the least of each."""


class Ranks:
    """This rank, and how it hears from the others; all of them call each method alike."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        begin: Begin = lambda numbers: lambda: numbers,
        gather: Callable[[str], Sequence[str]] = lambda text: [text],
        batches: int = 1,
    ) -> None:
        """`gather` returns the texts of all ranks, in order; in a pipeline, `batches` are in work
        at a time."""
        self.rank = rank
        self.size = size
        self.begin = begin
        self.gather = gather
        self.batches = batches
        self.copies = 1
        """How many ranks in a row have the same heads, which the first of them writes for all."""
        self.alone = size == 1
        self._due: list[Callable[[], None]] = []
        self._held = 0

    @property
    def writes(self) -> bool:
        """Whether this rank writes its heads, and the others with them read what it wrote."""
        return self.rank % self.copies == 0

    def least(self, numbers: Sequence[int]) -> Sequence[int]:
        """The least of each number over all ranks."""
        return self.begin(numbers)()

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


class Agreed(NamedTuple):
    """What all ranks do now: the wishes by plan, jobs that have ended, jobs instead of which they
    compute, and the saves that they release."""

    wishes: Mapping[Any, Wish] = {}
    ended: Sequence[LoadJob] = ()
    slow: Sequence[LoadJob] = ()
    saves: Sequence[Any] = ()


class Agreement:
    """The vote of each pass; the scheduler's thread owns it. A rank alone has the only vote."""

    def __init__(self, ranks: Ranks, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds, of which those of rank 0 count."""
        self.ranks = ranks
        self._clock, self._now = clock, 0.0
        # What a vote is on of which nothing was done yet, and how many passes ago it was.
        self._ballot: tuple[Any, ...] | None = None
        self._age = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a vote of which nothing was done yet."""
        return self._ballot is not None

    def now(self) -> float:
        """Seconds by the clock of rank 0, as of the last vote."""
        return self._now

    def agree(
        self,
        wishes: Mapping[Any, Wish],
        jobs: Sequence[LoadJob],
        slow: Collection[LoadJob],
        saves: Sequence[Any],
    ) -> Agreed:
        """Vote, or do what a vote has said: note how jobs have ended.

        All ranks call it in the same passes, with wishes for the same plans, and the same `jobs`,
        which were begun. `slow`: those that take longer than computing on this rank; `saves`: those
        that are over on this rank, up to the first one that is not.
        """
        if self._ballot is None:
            numbers = self._votes(wishes.values(), jobs, slow, len(saves))
            self._ballot, self._age = (list(wishes), jobs, saves, self.ranks.begin(numbers)), 0
        if self.ranks.batches > 1 and self._age < self.ranks.batches:
            self._age += 1
            return Agreed()
        (plans, jobs, saves, hear), self._ballot = self._ballot, None
        now, num_saves, *votes = hear()
        self._now = now / _MICROSECONDS
        threes = zip(votes[0::3], votes[1::3], votes[2::3], strict=True)
        agreed: dict[Any, Wish] = {}
        for plan in plans:
            stop, loads, wait = next(threes)
            agreed[plan] = Wish(stop, bool(loads), None if wait < 0 else wait / _MICROSECONDS)
        ended, slower = list[LoadJob](), list[LoadJob]()
        for job, (has_ended, is_whole, is_worth) in zip(jobs, threes, strict=True):
            if has_ended:
                if not is_whole:
                    job.state = JobState.FAILED
                elif job.revoked:
                    # One rank may have filled its slots before they were taken away.
                    job.state = JobState.DROPPED
                ended.append(job)
            elif not is_worth:
                slower.append(job)
        return Agreed(agreed, ended, slower, saves[:num_saves])

    def _votes(
        self, wishes: Iterable[Wish], jobs: Iterable[LoadJob], slow: Collection[LoadJob], saves: int
    ) -> list[int]:
        """What this rank says of the time, saves, wishes, and jobs; see the module."""
        numbers = [self._decide(self._clock()), saves]
        for wish in wishes:
            loads = ANY if self.ranks.rank else int(wish.loads)
            patience = _UNKNOWN if wish.patience is None else wish.patience
            numbers += [wish.stop, loads, self._decide(patience)]
        for job in jobs:
            has_ended = job.done.is_set()
            is_whole = not has_ended or job.state is not JobState.FAILED
            numbers += [has_ended, is_whole, job not in slow]
        return numbers

    def _decide(self, seconds: float) -> int:
        """A time as rank 0 votes; the others leave it to that."""
        return ANY if self.ranks.rank else int(seconds * _MICROSECONDS)
