"""The job queue in the middle of a model of SGLang, over random histories.

Nothing waits for ever, no slot has two owners, and nothing that was promised is taken.
"""

from __future__ import annotations

from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from tests.unit.job_world import Path
from tests.unit.sglang_model import NUM_SLOTS, SGLangModel


@st.composite
def asked(draw: st.DrawFn) -> tuple[int, int, int, int, int, int, float | None]:
    """A request: its family, what of its prompt is shared and stored, its length, its answer."""
    length = draw(st.integers(4, 15))
    shared = draw(st.integers(0, length) | st.just(length - 1))
    stored = draw(st.integers(0, length) | st.just(length - 1) | st.just(shared))
    most = draw(st.integers(1, 8) | st.just(8))
    patience = draw(st.sampled_from([None, 0.0, 3.0]))
    return (
        draw(st.integers(0, 2)),
        shared,
        stored,
        length,
        most,
        draw(st.integers(1, most) | st.just(most)),
        patience,
    )


class JobsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.patched = mock.patch("impress_sglang.serving.job_queue.WINDOW", 3)
        self.patched.start()
        self.tails = 1000

    @initialize(ratio=st.sampled_from([1.0, 0.3]), early=st.booleans(), reports=st.booleans())
    def start(self, ratio: float, early: bool, reports: bool) -> None:
        self.model = SGLangModel(ratio)
        self.model.early, self.model.reports = early, reports

    def prompt(self, family: int, shared: int, length: int) -> Path:
        """The first tokens are those of a family, the others are nobody else's."""
        self.tails += 100
        common = [100 * family + position for position in range(min(shared, length))]
        return (*common, *range(self.tails, self.tails + length - len(common)))

    @precondition(lambda self: len(self.model.requests) < 10)
    @rule(all_asked=st.lists(asked(), min_size=2, max_size=8))
    def ask(self, all_asked: list[tuple[int, int, int, int, int, int, float | None]]) -> None:
        for family, shared, stored, length, most, stops, patience in all_asked:
            prompt = self.prompt(family, shared, length)
            if stored:
                self.model.stored.add(prompt[:stored])
            most = min(most, NUM_SLOTS - 2 - length)
            self.model.ask(prompt, most, min(stops, most), patience)

    @precondition(lambda self: self.model.jobs.jobs and len(self.model.requests) < 10)
    @rule(data=st.data(), more=st.integers(2, 5), most=st.integers(1, 4))
    def go_on(self, data: st.DataObject, more: int, most: int) -> None:
        """A longer prompt that begins with what is being loaded."""
        jobs = self.model.gate or self.model.jobs.jobs
        job = jobs[data.draw(st.integers(0, len(jobs) - 1))]
        length = min(job.stop + more, NUM_SLOTS - 2 - most)
        self.tails += 100
        added = range(self.tails, self.tails + length - job.stop)
        prompt = (*job.tokens.tolist(), *added)
        self.model.stored.add(prompt[:-1])
        self.model.ask(prompt, most, most, None)

    @precondition(lambda self: self.model.early and any(self.model.jobs.loading))
    @rule()
    def stall_behind_a_layer(self) -> None:
        """A pass that began early waits in vain."""
        self.model.loader.stalls = False
        self.model.loader.step()
        self.model.loader.stalls = True
        self.model.step()

    @precondition(lambda self: self.model.chunked is not None)
    @rule(length=st.integers(8, 14), most=st.integers(1, 4))
    def ask_beside_a_chunk(self, length: int, most: int) -> None:
        """For much that is stored."""
        prompt = self.prompt(0, 0, length)
        self.model.stored.add(prompt[:-1])
        self.model.ask(prompt, most, most, None)
        self.model.step()

    @rule(loads=st.lists(st.integers(0, 2), min_size=2, max_size=12))
    def step(self, loads: list[int]) -> None:
        for count in loads:
            self.model.step()
            self.model.loader.run(count)

    @rule()
    def step_once(self) -> None:
        self.model.step()

    @rule(stalls=st.booleans())
    def stall(self, stalls: bool) -> None:
        self.model.loader.stalls = stalls

    @precondition(lambda self: self.model.jobs.jobs)
    @rule(data=st.data())
    def corrupt(self, data: st.DataObject) -> None:
        jobs = self.model.jobs.jobs
        job = jobs[data.draw(st.integers(0, len(jobs) - 1))]
        stop = data.draw(st.integers(job.start + 1, job.stop))
        self.model.loader.corrupt.add(tuple(job.tokens[:stop].tolist()))

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.model.requests)))
        self.model.abort(self.model.requests[rid])
        self.model.check()

    @precondition(lambda self: self.model.jobs.jobs)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """What is slower than computing."""
        jobs = self.model.jobs.jobs
        self.model.jobs.give_up(jobs[data.draw(st.integers(0, len(jobs) - 1))])
        self.model.check()

    @precondition(lambda self: len(self.model.queue) > 1)
    @rule(data=st.data())
    def sort(self, data: st.DataObject) -> None:
        """By priority, or the longest prefix first."""
        self.model.queue = data.draw(st.permutations(self.model.queue))

    @precondition(lambda self: self.model.jobs.jobs)
    @rule(seconds=st.sampled_from([0.0, 1.0]))
    def drop_all(self, seconds: float) -> None:
        """Before other weights."""
        self.model.jobs.drop_all()
        self.model.check()
        if self.model.jobs.wait_for_loader(seconds):
            assert not self.model.jobs
        self.model.check()

    @precondition(lambda self: len(self.model.requests) > 2)
    @rule(flushes=st.booleans())
    def drain(self, flushes: bool) -> None:
        self.model.drain()
        if flushes:
            self.model.flush()

    def teardown(self) -> None:
        try:
            if hasattr(self, "model"):
                self.model.drain()
        finally:
            self.patched.stop()


TestJobs = JobsMachine.TestCase
TestJobs.settings = settings(max_examples=2 * settings.default.max_examples)
