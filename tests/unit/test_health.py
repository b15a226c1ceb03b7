"""The state machine of the disk and of suspect segments: what happens, and what is done then."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from impress_sglang.store.health import DiskTask, Health, Suspect, Verdict
from tests.unit.kv_factory import stored_segment
from tests.unit.waiting import Clock

ERROR = OSError(5, "Input/output error")


@pytest.fixture(scope="module", autouse=True)
def short_pauses() -> None:
    """Pauses of a clock that a test moves are as long as they are."""


class World:
    """A machine, a segment, and what is due after each step; measurements succeed at once."""

    def __init__(self, start: float) -> None:
        self.clock = Clock()
        self.clock.now = start
        self.health = Health(patience=3.0, clock=self.clock)
        self.segment = stored_segment("a", range(8))
        self.measures = True
        self.due: list[str] = []
        self.suspect: Suspect | None = None

    def step(self, step: str) -> None:
        if step in STEPS:
            STEPS[step](self)
        elif step in VERDICTS:
            assert self.suspect is not None
            self.health.on_looked(self.suspect, Verdict(step))
        else:
            self.clock.now += float(step)
        self.due = [name for task in self.health.due() for name in self.begun(task)]

    def begun(self, task: DiskTask | Suspect) -> list[str]:
        if isinstance(task, Suspect):
            self.suspect = task
            return ["look"]
        if task is DiskTask.MEASURE and self.measures:
            self.health.on_measured(7)
        return [] if task is DiskTask.MEASURE else ["probe"]


STEPS: dict[str, Callable[[World], object]] = {
    "write fails": lambda w: w.health.report_failure("a write", ERROR, reading=False),
    "read fails": lambda w: w.health.report_failure("a read", ERROR, reading=True),
    "well": lambda w: w.health.on_probed(None, readable=True),
    "reads": lambda w: w.health.on_probed(ERROR, readable=True),
    "dead": lambda w: w.health.on_probed(ERROR, readable=False),
    "measuring hangs": lambda w: setattr(w, "measures", False),
    "measured": lambda w: w.health.on_measured(9),
    "measuring fails": lambda w: w.health.on_measured(ERROR),
    "suspect": lambda w: w.health.suspect(w.segment),
    "evicted": lambda w: w.health.suspects.clear(),
}
VERDICTS = {verdict.value for verdict in Verdict}
# What happens, with seconds in between; then the states of disk and segment, and what is due.
HISTORIES = {
    "1": "ok ready",
    # A failure to write leaves what is stored to be read.
    "write fails": "read-only ready",
    "write fails, read fails": "degraded ready",
    "read fails, write fails": "degraded ready",
    # A probe is due after a pause, which does not begin anew with other failures.
    "read fails, 0.4": "degraded ready",
    "read fails, 0.4, read fails, 0.11": "degraded ready probe",
    "write fails, 0.4, write fails, 0.11": "read-only ready probe",
    "write fails, 0.51, 1": "read-only ready",
    "read fails, 7, well, 20": "ok ready",
    # It can read but not write; and what it cannot read may be readable all the same.
    "read fails, 0.51, reads": "read-only ready",
    "read fails, 0.51, reads, 1.01": "read-only ready probe",
    "read fails, 0.51, reads, 1.01, well": "ok ready",
    "write fails, 0.51, dead": "read-only ready",
    # The pause doubles with each probe that fails, and if the disk fails again at once.
    "read fails, 1, dead, 0.99": "degraded ready",
    "read fails, 1, dead, 1.01, dead, 2.01, dead, 4.01, dead, 7.9": "degraded ready",
    "read fails, 1, dead, 1.01, dead, 2.01, dead, 4.01, dead, 8.01": "degraded ready probe",
    "read fails, 1, dead, 2, dead, 4, dead, 8, dead, 16, dead, 9.9": "degraded ready",
    "read fails, 1, dead, 2, dead, 4, dead, 8, dead, 16, dead, 10.1": "degraded ready probe",
    "read fails, 1, well, read fails, 0.9": "degraded ready",
    "read fails, 1, well, read fails, 1.01, well, read fails, 1.9": "degraded ready",
    "read fails, 1, well, read fails, 1.01, well, read fails, 2.01": "degraded ready probe",
    # A disk that was well for long is asked soon.
    "read fails, 1, well, read fails, 1.1, well, 2.1, read fails, 0.51": "degraded ready probe",
    # The free space must be known in time.
    "measuring fails": "degraded ready",
    "measuring hangs, 2, 2.9": "ok ready",
    "measuring hangs, 2, 3.1": "degraded ready",
    "measuring hangs, 2, 2.9, measured, 3": "ok ready",
    "measuring hangs, 2, 3.1, 0.51": "degraded ready probe",
    # A suspect is looked at, once at a time, until that decides.
    "suspect": "ok suspect look",
    "suspect, 100": "ok suspect",
    "suspect, good": "ok ready",
    "suspect, good, suspect": "ok suspect look",
    "suspect, unclear": "ok suspect",
    "suspect, unclear, 0.9": "ok suspect",
    "suspect, unclear, 1.1": "ok suspect look",
    "suspect, unclear, 1.1, unclear, 1.9": "ok suspect",
    "suspect, unclear, 1.1, unclear, 2.1": "ok suspect look",
    # What becomes of these is not for the machine to say; they are not looked at again.
    "suspect, bad, 99": "ok suspect",
    "suspect, gone, 99": "ok suspect",
    "suspect, evicted, good, 99": "ok suspect",
    "suspect, unclear, 1, unclear, 2, unclear, 4, unclear, 8, unclear, 16": "ok suspect look",
    # Nothing is looked at while the disk cannot be read, and then at once.
    "read fails, suspect, 0.4": "degraded suspect",
    "suspect, unclear, read fails, 0.51, well": "ok suspect look",
    "write fails, suspect": "read-only suspect look",
}


@pytest.mark.parametrize("start", [10_000.0, 0.0], ids=["late", "just started"])
@pytest.mark.parametrize("history", HISTORIES)
def test_what_happens_decides_what_is_done(history: str, start: float) -> None:
    world = World(start)
    for step in history.split(", "):
        world.step(step)
    health = world.health
    assert " ".join([health.state, world.segment.state.value, *world.due]) == HISTORIES[history]
    assert (health.readable, health.writable) == (health.state != "degraded", health.state == "ok")
    assert health.summary()["recoveries"] == history.count("well")
    failures = history.count("fails") + (health.state == "degraded" and "hangs" in history)
    assert health.summary()["failures"] == failures
    assert ("Input/output error" in health.summary()["last_failure"]) == ("fails" in history)
