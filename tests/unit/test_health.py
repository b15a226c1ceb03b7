"""Whether the disk can be used: what makes it worse, and when it is asked again."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest

from impress_sglang.storage.health import FIRST_PAUSE_S, LONGEST_PAUSE_S, Health
from tests.unit.waiting import Clock

ERROR = OSError(5, "Input/output error")


@pytest.fixture(scope="module", autouse=True)
def short_pauses() -> None:
    """Pauses of a clock that a test moves are as long as they are."""


@pytest.fixture(params=[10_000.0, 0.0])
def clock(request: pytest.FixtureRequest) -> Clock:
    """That of a machine that has just started begins at 0."""
    clock = Clock()
    clock.now = request.param
    return clock


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(clock)


def read_failed(health: Health) -> None:
    health.failed("a prefix could not be read", ERROR, reading=True)


def write_failed(health: Health) -> None:
    health.failed("a prefix could not be stored", ERROR, reading=False)


def recover(health: Health, clock: Clock) -> float:
    """Wait for the probe, which finds all well; returns for how long."""
    began = clock.now
    while not health.probe_is_due:
        clock.now += 0.01
    health.probed(None, readable=True)
    assert health.state == "ok"
    return clock.now - began


def test_a_disk_is_well_until_it_fails(health: Health) -> None:
    assert (health.state, health.readable, health.writable) == ("ok", True, True)
    assert not health.probe_is_due
    assert health.summary() == {"state": "ok", "failures": 0, "recoveries": 0, "last_failure": ""}


@pytest.mark.parametrize(
    ("failures", "state"),
    [
        ([write_failed], "read-only"),
        ([read_failed], "degraded"),
        ([write_failed, read_failed], "degraded"),
        ([read_failed, write_failed], "degraded"),
    ],
)
def test_a_failure_to_write_leaves_what_is_stored_to_be_read(
    health: Health, failures: list[Callable[[Health], None]], state: str
) -> None:
    for fail in failures:
        fail(health)

    assert health.state == state
    assert health.readable == (state == "read-only")
    assert not health.writable
    assert health.summary()["failures"] == len(failures)
    assert "Input/output error" in health.summary()["last_failure"]


def test_each_change_is_logged_once(health: Health, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            write_failed(health)
        for _ in range(3):
            read_failed(health)

    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the SSD store is read-only",
        "the SSD store is degraded",
    ]


def test_a_probe_is_due_after_a_pause(
    health: Health, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    read_failed(health)
    clock.now += FIRST_PAUSE_S - 0.001
    assert not health.probe_is_due
    clock.now += 0.002
    assert health.probe_is_due

    clock.now += 7.0 - FIRST_PAUSE_S - 0.001
    with caplog.at_level(logging.WARNING):
        health.probed(None, readable=True)

    assert (health.state, health.readable, health.writable) == ("ok", True, True)
    assert not health.probe_is_due
    assert health.summary()["recoveries"] == 1
    assert caplog.messages[1:] == ["the SSD store answers again after 7.0 s"]


@pytest.mark.parametrize("fail", [read_failed, write_failed])
def test_repeated_failures_do_not_postpone_the_probe(
    health: Health, clock: Clock, fail: Callable[[Health], None]
) -> None:
    """Else a busy server would never find that its disk is well again."""
    fail(health)
    for _ in range(20):
        clock.now += FIRST_PAUSE_S / 20 + 1e-6
        fail(health)

    assert health.probe_is_due


def test_the_pause_doubles_with_each_probe_that_fails(health: Health, clock: Clock) -> None:
    read_failed(health)
    pauses = []
    for _ in range(12):
        began = clock.now
        while not health.probe_is_due:
            clock.now += 0.25
        pauses.append(clock.now - began)
        health.probed(ERROR, readable=False)
        assert health.state == "degraded"

    expected = [min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) for n in range(12)]
    assert pauses == expected
    assert expected[-1] == LONGEST_PAUSE_S
    assert health.summary()["recoveries"] == 0


def test_a_disk_that_fails_again_at_once_is_asked_less_and_less(
    health: Health, clock: Clock
) -> None:
    """It must not go on and off with each request."""
    pauses = []
    for _ in range(12):
        read_failed(health)
        pauses.append(recover(health, clock))
        clock.now += 0.01

    for earlier, later in itertools.pairwise(pauses):
        assert later == pytest.approx(min(2 * earlier, LONGEST_PAUSE_S), abs=0.05)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.05)


def test_a_disk_that_was_well_for_long_is_asked_soon(health: Health, clock: Clock) -> None:
    for _ in range(5):
        read_failed(health)
        last = recover(health, clock)
    clock.now += 2 * last + 0.1

    read_failed(health)

    assert recover(health, clock) == pytest.approx(FIRST_PAUSE_S, abs=0.05)


def test_a_probe_that_can_read_but_not_write_makes_the_store_read_only(
    health: Health, clock: Clock
) -> None:
    read_failed(health)
    clock.now += FIRST_PAUSE_S

    health.probed(ERROR, readable=True)

    assert health.state == "read-only"
    assert health.summary()["recoveries"] == 0
    clock.now += 2 * FIRST_PAUSE_S
    assert health.probe_is_due
    health.probed(None, readable=True)
    assert health.state == "ok"


def test_a_probe_that_cannot_read_does_not_take_reading_away(health: Health, clock: Clock) -> None:
    """What a read-only disk still gives is found out by reading."""
    write_failed(health)
    clock.now += FIRST_PAUSE_S

    health.probed(ERROR, readable=False)

    assert health.state == "read-only"
