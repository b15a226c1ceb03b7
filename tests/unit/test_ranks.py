"""Models of SGLang with jobs, alone and as ranks of a model, over random histories.

The job queue and the vote are the real ones. Nothing waits for ever, no slot has two owners, and
nothing that was promised is taken. Ranks in lock step do the same, whatever their drives, stores,
threads and clocks say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from impress_sglang.config import ImpressConfig, share_of_rank
from impress_sglang.serving import job_queue
from impress_sglang.serving.load_jobs import JobState, LoadJob
from impress_sglang.serving.ranks import Agreement, LoadProposal, Ranks
from impress_sglang.storage.directory import identity_in, same_model
from impress_sglang.store.identity import rank_identity
from tests.unit.job_world import new_job
from tests.unit.ranks_model import Lockstep
from tests.unit.sglang_model import NUM_SLOTS, SGLangModel

# Steps of one history; `--rank-steps` sets how many there are in all.
HISTORY = 250


def go_on(model: SGLangModel) -> None:
    """What happens beside a scheduler, between two of its steps."""
    model.clock.now += model.rng.choice([0.0, 0.0, 0.1, 2.0])
    model.loader.stalls = model.rng.random() < 0.2
    model.loader.run(model.rng.randrange(4))
    if model.stored and model.rng.random() < 0.05:
        model.loader.corrupt.add(model.rng.choice(sorted(model.stored)))
    if model.stored and model.rng.random() < 0.05:
        model.stored.discard(model.rng.choice(sorted(model.stored)))
    if model.rng.random() < 0.02:
        model.loader.corrupt.clear()


class Traffic:
    """Requests that begin alike, aborts, and new orders of the queue."""

    def __init__(self, ranks: Lockstep) -> None:
        self.ranks = ranks
        self.rng = ranks.rng
        self._tails = 1000

    def step(self) -> None:
        first, rng = self.ranks.models[0], self.rng
        if len(first.requests) < 10 and rng.random() < 0.5:
            self._ask()
        if first.requests and rng.random() < 0.05:
            rid = rng.choice(sorted(first.requests))
            self.ranks.all(lambda model: model.abort(model.requests[rid]))
        if len(first.queue) > 1 and rng.random() < 0.1:
            order = [request.rid for request in first.queue]
            rng.shuffle(order)
            self.ranks.all(lambda model: model.queue.sort(key=lambda asked: order.index(asked.rid)))
        if first.jobs.jobs and rng.random() < 0.02:
            self.ranks.all(lambda model: model.drop_all())
        for model in self.ranks.models:
            go_on(model)
        self.ranks.all(lambda model: model.step())

    def _ask(self) -> None:
        first, rng = self.ranks.models[0], self.rng
        length, max_new = rng.randrange(4, 16), rng.randrange(1, 9)
        max_new = min(max_new, NUM_SLOTS - 2 - length)
        shared = rng.randrange(length + 1)
        family, self._tails = rng.randrange(3), self._tails + 100
        common = [100 * family + position for position in range(shared)]
        if first.jobs.jobs and rng.random() < 0.2:
            # It begins with what is being loaded.
            common = rng.choice(first.jobs.jobs).tokens.tolist()[: length - 1]
        prompt = (*common, *range(self._tails, self._tails + length - len(common)))
        stops = rng.randrange(1, max_new + 1)
        for model in self.ranks.models:
            if rng.random() < 0.7:
                model.stored.add(prompt[: rng.randrange(1, length + 1)])
        self.ranks.all(lambda model: model.ask(prompt, max_new, stops))


def run(size: int, seed: int) -> Lockstep:
    ranks = Lockstep(size, seed, batches=1 + seed // 2 % 3 * (size > 1))
    with contextlib.closing(ranks):
        traffic = Traffic(ranks)
        for _ in range(HISTORY):
            traffic.step()
        for model in ranks.models:
            model.loader.corrupt.clear()
        for _ in range(HISTORY):
            if ranks.models[0].is_done:
                break
            for model in ranks.models:
                model.loader.stalls = False
                model.loader.run(3)
                model.clock.now += 1.0
            ranks.all(lambda model: model.step())
    for model in ranks.models:
        assert model.is_done, "a request or a job waits for ever"
        assert not model.tree.holds and not model.jobs.waiters, "a lock outlives its request"
    return ranks


def test_they_do_what_they_should(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, window = request.config.getoption("--rank-steps"), job_queue.ADMISSION_WINDOW
    loads = reductions = 0
    for seed in range(max(steps // HISTORY, 3)):
        monkeypatch.setattr(job_queue, "ADMISSION_WINDOW", 3 if seed % 2 else window)
        ranks = run(1 + seed % 3, seed)
        reductions += ranks.reduction.count
        loads += sum(model.num_loaded for model in ranks.models)
    assert reductions and loads


def job(state: JobState | None = None) -> LoadJob:
    """That has ended so, unless it has not."""
    job = new_job((1, 2))
    if state is not None:
        job.end(state)
    return job


def test_rank_0_decides_and_the_least_counts() -> None:
    heard: list[list[int]] = []

    def begin(numbers: Sequence[int]) -> Any:
        heard.append(list(numbers))
        return lambda: [min(votes) for votes in zip(*heard, strict=True)]

    first, second = (Agreement(Ranks(n, 2, begin), lambda now=5.0 - 4 * n: now) for n in range(2))
    jobs = [job(JobState.LOADED), job(JobState.LOADED), job()]
    mine = {
        "a": LoadProposal(700, worthwhile=True, compute_seconds=2.5),
        "b": LoadProposal(300),
        "c": LoadProposal(0, compute_seconds=0.0),
    }
    assert first.agree(mine, jobs, [], "xyz") == (mine, jobs[:2], [], "xyz")
    assert first.now() == 5.0

    jobs = [job(JobState.FAILED), job(), job()]
    theirs = {
        "a": LoadProposal(600, compute_seconds=0.1),
        "b": LoadProposal(400, worthwhile=True, compute_seconds=9.0),
        "c": LoadProposal(),
    }
    wishes, ended, slow, saves = second.agree(theirs, jobs, jobs[2:], "xy")
    assert wishes == mine | {"a": LoadProposal(600, worthwhile=True, compute_seconds=2.5)}
    assert slow == jobs[2:] and saves == "xy" and second.now() == 5.0
    assert ended == jobs[:1]
    assert len(heard[0]) == len(heard[1])


@pytest.mark.parametrize(
    ("state", "revoked", "end"),
    [
        (JobState.LOADED, False, None),
        (JobState.LOADED, True, JobState.DROPPED),
        (JobState.FAILED, False, JobState.FAILED),
    ],
)
def test_a_job_that_is_read_and_still_computed_may_be_slow(
    monkeypatch: pytest.MonkeyPatch, state: JobState, revoked: bool, end: JobState | None
) -> None:
    blend = job(state)
    monkeypatch.setattr(blend, "computes_after_reads", True)
    if revoked:
        blend.revoke()
    agreed = Agreement(Ranks()).agree({}, [blend], [blend], ())
    assert (agreed.ended, agreed.slow) == (([blend], []) if end else ([], [blend]))
    assert blend.state is (end or state)


class TestRanks:
    @pytest.mark.parametrize("other", [False, True])
    def test_all_and_any(self, other: bool) -> None:
        ranks = Ranks(0, 2, lambda numbers: lambda: [min(numbers[0], other)])
        assert ranks.all(True) == other and not ranks.all(False)
        ranks = Ranks(0, 2, lambda numbers: lambda: [min(numbers[0], not other)])
        assert ranks.any(False) == other and ranks.any(True)
        assert Ranks().alone and not ranks.alone

    def test_what_is_done_together_waits_for_the_batches_of_a_pipeline(self) -> None:
        done: list[str] = []
        Ranks().run_in_lockstep(lambda: done.append("at once"))
        ranks = Ranks(0, 2, batches_in_flight=2)
        assert not ranks.holds_batches()
        ranks.run_in_lockstep(lambda: done.append("first"))
        assert ranks.holds_batches() and done == ["at once"]
        ranks.run_in_lockstep(lambda: done.append("second"))
        assert [ranks.holds_batches() for _ in range(3)] == [True, False, False]
        assert done == ["at once", "first", "second"]


def test_ranks_of_a_model_know_their_stores(tmp_path: Any) -> None:
    names = [rank_identity(["a", "b"], rank) for rank in range(2)]
    assert all(identity_in(name) == name for name in names)
    assert same_model(tmp_path / names[0], tmp_path / names[1]) and names[0] != names[1]
    assert not same_model(tmp_path / names[0], tmp_path / rank_identity(["a", "c"], 1))
    assert rank_identity(["a"], 0) == "a"


@pytest.mark.parametrize(("ranks", "ssd_gb", "host_gb"), [((2,), 1.5, 1.0), ((4, 2), 1.5, 0.5)])
def test_ranks_share_the_quota(ranks: tuple[int, ...], ssd_gb: float, host_gb: float) -> None:
    """And the memory; copies share a store."""
    share = share_of_rank(ImpressConfig(ssd_gb=3.0, host_gb=2.0, device_gb=1.0), *ranks)
    assert share == ImpressConfig(
        ssd_gb=ssd_gb, host_gb=host_gb, device_gb=1.0, buffer_gb=1.0 / ranks[0]
    )
