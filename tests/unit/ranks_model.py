"""Several ranks of a model, each a model of SGLang with a store of its own, in lock step.

Each runs on a thread, as its collectives wait for the others. Ranks hear of the same requests; what
their drives, stores, threads, clocks and costs say is their own. `Lockstep.check` compares all that
SGLang's next pass depends on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from impress_sglang.serving.ranks import Ranks
from tests.unit.sglang_model import SGLangModel

_R = TypeVar("_R")
_T = TypeVar("_T")


class Diverged(AssertionError):
    """Ranks do not do the same any more; with SGLang, they would end or wait for ever."""


class Reduction:
    """The least of each number over all ranks, which must all ask for it or end their step."""

    def __init__(self, size: int) -> None:
        self._pool = ThreadPoolExecutor(size)
        self._all_ask = threading.Barrier(size, self._reduce, timeout=60)
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


def digest(model: SGLangModel) -> Any:
    """All that what SGLang does next depends on."""
    jobs = model.jobs.jobs
    return (
        {path: (node.slot, node.locks, node.used) for path, node in model.tree.nodes.items()},
        model.tree.free,
        [request.rid for request in model.queue],
        [request.rid for request in model.running],
        model.chunked and model.chunked.rid,
        [
            (r.rid, r.state, r.output, r.slots, r.lock and r.lock.path, r.planned)
            for r in model.requests.values()
        ],
        [
            (
                r.rid,
                r.lock and r.lock.path,
                r.num_failures,
                -1 if r.job is None else jobs.index(r.job),
            )
            for r in model.jobs.waiters.values()
        ],
        [(j.tokens.tolist(), j.start, j.revoked, j.owned_slots is not None) for j in jobs],
        [job.owned_slots.tolist() for job in model.jobs.loading if job.owned_slots is not None],
        list(model.planned),
        [save.path for save in model.saves],
    )


class Lockstep:
    """Ranks that are told the same, or a model alone."""

    def __init__(self, size: int, seed: int, batches: int) -> None:
        self.rng = random.Random(seed)
        self.reduction = Reduction(size)
        ratio, begin = self.rng.choice([1.0, 0.3]), self.reduction.begin
        chances = [random.Random(1000 * seed + rank) for rank in range(size)]
        self.models = [
            SGLangModel(ratio, chance, Ranks(rank, size, begin, batches_in_flight=batches))
            for rank, chance in enumerate(chances)
        ]

    def close(self) -> None:
        self.reduction.close()

    def all(self, act: Callable[[Any], object]) -> None:
        """Let all ranks do the same at the same time, and compare what came of it."""
        before = self.reduction.count
        self.reduction.all(self.models, act)
        assert self.reduction.count - before <= 1, "one reduction a pass"
        first, *others = map(digest, self.models)
        if any(other != first for other in others):
            raise Diverged("ranks differ in what they do next")
