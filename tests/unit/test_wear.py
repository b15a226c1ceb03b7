"""How much is written per day."""

from __future__ import annotations

import pytest

from impress_sglang.management.wear import WriteBudget
from impress_sglang.management.writing import StoreOutcome
from tests.unit import store_factory
from tests.unit.store_factory import Workbench, gb, lengths, prompt

bench = store_factory.bench_of_one_shape

DAY = 86_400.0


def test_a_day_has_what_it_may_and_recovers(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    budget = WriteBudget(24e-9, lambda: now[0])
    budget.spend(23)
    assert not budget.is_spent
    budget.spend(3)
    assert budget.is_spent and budget.summary()["write_budget_left_bytes"] == 0
    now[0] += 2.5 * DAY / 24
    assert budget.is_spent, "an hour's share has to be there"
    now[0] += DAY / 24
    assert not budget.is_spent and budget.summary()["write_budget_left_bytes"] == 1
    now[0] += 9 * DAY
    assert budget.summary()["write_budget_left_bytes"] == 24, "days are not saved up"
    spent, there = (own.message for own in caplog.records)
    assert "is spent" in spent and "is there again" in there


def test_without_a_limit_nothing_is_ever_spent() -> None:
    budget = WriteBudget()
    budget.spend(10**15)
    assert not budget.is_spent
    assert set(budget.summary().values()) == {0}


def test_what_is_over_the_budget_is_not_stored(bench: Workbench) -> None:
    """What was given up costs nothing; what is there stays there, and the next store goes on."""
    store = bench.open(write_gb_per_day=gb(1.9 * bench.one))
    bench.begin(store, prompt(9))
    store.writes.abandon()
    store.writes.drain()
    bench.put_all(store, 1, 2)
    for _ in range(2):
        assert bench.offer(store, prompt(3)) is StoreOutcome.SPENT
    assert bench.offer(store, prompt(1)) is StoreOutcome.KNOWN
    assert lengths(store, 1, 2, 3) == [8, 8, 0]
    summary = store.summary()
    assert (summary["offers_above_budget"], summary["write_budget_left_bytes"]) == (2, 0)
    assert not store._quota.has_room(1), "nor is anything reordered"
