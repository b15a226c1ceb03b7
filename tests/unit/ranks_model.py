"""Several ranks of a model, each a model of SGLang with a store of its own, in lock step.

Each runs on a thread, as its collectives wait for the others. Ranks hear of the same requests; what
their drives, stores, threads, clocks and costs say is their own. `Lockstep.check` compares all that
SGLang's next pass depends on.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from impress_sglang.serving.job_queue import JobQueue
from impress_sglang.serving.load_jobs import LoadJob
from impress_sglang.serving.ranks import Agreement, LoadProposal, Ranks
from tests.unit.job_world import Hold, Path, Request, new_job
from tests.unit.sglang_model import LEAST, MOST_TRIES, SGLangModel

_R = TypeVar("_R")
_T = TypeVar("_T")


class Diverged(AssertionError):
    """Ranks do not do the same any more; with SGLang, they would end or wait for ever."""


class Reduction:
    """The least of each number over all ranks, which must all ask for it or end their step."""

    def __init__(self, size: int) -> None:
        self._pool = ThreadPoolExecutor(size)
        self._all_ask = threading.Barrier(size, self._reduce, timeout=20)
        self._votes: list[Sequence[int]] = []
        self._result: list[int] = []
        self.count = 0

    def _reduce(self) -> None:
        votes, self._votes = self._votes, []
        self._result = [min(numbers) for numbers in zip(*votes, strict=True)]
        self.count += 1

    def least(self, numbers: Sequence[int]) -> Sequence[int]:
        self._votes.append(list(numbers))
        try:
            self._all_ask.wait()
        except (threading.BrokenBarrierError, ValueError) as error:
            raise Diverged("ranks ask for other numbers, or have gone on") from error
        return self._result

    def begin(self, numbers: Sequence[int]) -> Callable[[], Sequence[int]]:
        return lambda: self.least(numbers)

    def all(self, ranks: Sequence[_R], act: Callable[[_R], _T]) -> list[_T]:
        """Let all ranks do the same at the same time, as a step; what came of it on each."""

        def run(rank: _R) -> _T:
            try:
                return act(rank)
            finally:
                if self._all_ask.n_waiting:
                    self._all_ask.abort()

        futures = [self._pool.submit(run, rank) for rank in ranks]
        return [future.result() for future in futures]

    def close(self) -> None:
        self._pool.shutdown()


@dataclasses.dataclass(eq=False)
class Save:
    """Slots of a path that are locked until no rank writes them."""

    path: Path
    hold: Hold
    steps: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a rank would do for a request, as often as it is planned."""

    rid: str
    wish: LoadProposal


class RankModel(SGLangModel):
    alone = False

    def __init__(self, ratio: float, rng: random.Random, ranks: Ranks) -> None:
        self.ranks = ranks
        super().__init__(ratio, rng)

    def make_jobs(self, clock: Callable[[], float]) -> JobQueue[Request]:
        self.agreement = Agreement(self.ranks, clock)
        self.planned: dict[str, Plan] = {}
        self.saves: list[Save] = []
        return super().make_jobs(self.agreement.now)

    # What the tree cache does, as `plugin.prefix_loads` and `plugin.prefix_saves` do.

    def plan(self, request: Request) -> None:
        request.planned = True
        resident = len(self.tree.match(request.tokens[:-1]))
        if request.tries >= MOST_TRIES or len(request.tokens) - 1 - resident < LEAST:
            return
        stop, patience = self._stored(request.tokens[:-1]), self.rng.choice([None, 0.0, 3.0])
        loads = self.rng.random() < 0.9
        wish = LoadProposal(stop, loads, patience) if stop else LoadProposal()
        self.planned[request.rid] = Plan(request.rid, wish)

    def drop_all(self) -> None:
        self.planned.clear()
        super().drop_all()

    def _ended(self) -> Sequence[LoadJob]:
        if not (self.agreement.is_open or self.planned or self.jobs.active or self.saves):
            return ()
        slow = {job for job in self.jobs.loading if self.rng.random() < 0.02}
        over = list(itertools.takewhile(lambda save: save.steps <= 0, self.saves))
        wishes = {plan: plan.wish for plan in self.planned.values()}
        agreed = self.agreement.agree(wishes, self.jobs.begun, slow, over)
        for save in agreed.saves:
            if save in self.saves:
                self.tree.unlock(save.hold)
                self.saves.remove(save)
        for job in agreed.slow:
            if job.slots is not None:
                for request in job.waiters:
                    request.tries = MOST_TRIES
                self.jobs.give_up(job)
        for plan, wish in agreed.wishes.items():
            if self.planned.get(plan.rid) is plan:
                del self.planned[plan.rid]
                self._begin(self.requests[plan.rid], wish)
        return agreed.ended

    def _begin(self, request: Request, wish: LoadProposal) -> None:
        resident = len(self.tree.match(request.tokens[:-1]))
        if wish.stop - resident < LEAST or not wish.loads:
            return
        request.patience = wish.patience
        self.jobs.join(request, new_job(request.tokens[: wish.stop], resident))

    def _poll(self) -> None:
        self._write()
        super()._poll()

    def _may_start(self, request: Request) -> bool:
        return super()._may_start(request) and request.rid not in self.planned

    def _release(self, request: Request) -> None:
        self.planned.pop(request.rid, None)
        super()._release(request)

    # Writes.

    def _generate(self, request: Request) -> None:
        if not request.output and request.lock is not None:
            path = request.lock.path
            steps = 0 if path in self.stored else self.rng.randrange(1, 9)
            self.saves.append(Save(path, self.tree.lock(path), steps))
        super()._generate(request)

    def _write(self) -> None:
        for save in self.saves:
            if save.steps:
                save.steps -= 1
                if not save.steps and self.rng.random() < 0.9:
                    self.stored.add(save.path)
                break

    def _allocate(self, count: int) -> list[int] | None:
        self.tree.evict(count - len(self.tree.free))
        while len(self.tree.free) < count and self.saves:
            self.tree.unlock(self.saves.pop().hold)
            self.tree.evict(count - len(self.tree.free))
        return super()._allocate(count)

    @property
    def available(self) -> int:
        """What only saves have locked counts as room."""
        for save in self.saves:
            self.tree.unlock(save.hold)
        room = super().available
        for save in self.saves:
            save.hold = self.tree.lock(save.path)
        return room

    def other_holds(self) -> list[Hold]:
        return [save.hold for save in self.saves]

    def digest(self) -> Any:
        """All that what SGLang does next depends on."""

        jobs = self.jobs.jobs
        return (
            {path: (node.slot, node.locks, node.used) for path, node in self.tree.nodes.items()},
            self.tree.free,
            [request.rid for request in self.queue],
            [request.rid for request in self.running],
            self.chunked and self.chunked.rid,
            [
                (r.rid, r.state, r.output, r.slots, r.lock and r.lock.path, r.planned)
                for r in self.requests.values()
            ],
            [
                (r.rid, r.hold and r.hold.path, r.tries, r.job is not None and jobs.index(r.job))
                for r in self.jobs.waiters.values()
            ],
            [(j.tokens.tolist(), j.start, j.revoked, j.slots is not None) for j in jobs],
            [job.slots.tolist() for job in self.jobs.loading if job.slots is not None],
            list(self.planned),
            [save.path for save in self.saves],
        )


class Lockstep:
    """Ranks that are told the same, or a model alone."""

    def __init__(self, size: int, seed: int, batches: int) -> None:
        self.rng = random.Random(seed)
        self.reduction = Reduction(size)
        ratio, begin = self.rng.choice([1.0, 0.3]), self.reduction.begin
        chances = [random.Random(1000 * seed + rank) for rank in range(size)]
        self.models: list[SGLangModel] = [
            RankModel(ratio, chance, Ranks(rank, size, begin, batches=batches))
            for rank, chance in enumerate(chances)
        ]
        if size == 1:
            self.models = [model := SGLangModel(ratio, chances[0])]
            model.early, model.reports = (self.rng.random() < 0.7 for _ in range(2))

    def close(self) -> None:
        self.reduction.close()

    def all(self, act: Callable[[Any], object]) -> None:
        """Let all ranks do the same at the same time, and compare what came of it."""
        before = self.reduction.count
        self.reduction.all(self.models, act)
        assert self.reduction.count - before <= 1, "one reduction a pass"
        self.check()

    def check(self) -> None:
        if len(self.models) == 1:
            return
        first, *others = [model.digest() for model in self.models]
        for other in others:
            if other != first:
                raise Diverged("ranks differ in what they do next")
