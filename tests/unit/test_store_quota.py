"""The quota, the free-space floor and the budget of writes: what is evicted, and what never is."""

from __future__ import annotations

import pytest

from impress_sglang.store import disk_worker
from impress_sglang.store.quota import WriteBudget
from impress_sglang.store.writing import StoreOutcome
from tests.faults import FaultyFileSystem, Rule
from tests.unit import store_factory as stores
from tests.unit.store_checks import check_store
from tests.unit.store_factory import Workbench, check_rows, length, lengths, look_up, prompt
from tests.unit.waiting import wait_until


def test_an_offer_that_does_not_fit_in_the_end_evicts_nothing(bench: Workbench) -> None:
    """What is being written stays, and so does what it builds on."""
    store = bench.open(ssd_gb=stores.gb(4 * bench.one))
    bench.put(store, prompt(1))
    bench.put(store, prompt(2, 8))
    gate = bench.begin(store, prompt(2, 16))

    # All but the segment that is being written would be enough.
    assert bench.offer(store, prompt(3, 24)) is StoreOutcome.NO_SPACE

    assert lengths(store, 1, 2) == [8, 8]
    gate.opened.set()
    store.writes.drain()
    assert length(store, prompt(2, 16)) == 16


def test_the_free_space_floor_is_kept(bench: Workbench) -> None:
    files = stores.Room(1_000_000 + bench.one - 1)
    store = bench.open(min_free_gb=0.001, files=files)
    assert bench.offer(store, prompt(1)) is StoreOutcome.NO_SPACE

    files.leave(store, 1_000_000 + bench.one)

    assert bench.offer(store, prompt(1)) is StoreOutcome.ACCEPTED
    assert store.stats.offers_without_space == 1


def test_bytes_that_are_still_written_are_not_free(bench: Workbench) -> None:
    store = bench.open(files=stores.Room(2 * bench.one))
    gates = [bench.begin(store, prompt(n)) for n in (1, 2)]

    assert bench.offer(store, prompt(3)) is StoreOutcome.NO_SPACE
    for gate in gates:
        gate.opened.set()


def test_a_full_file_system_makes_room_by_eviction(bench: Workbench) -> None:
    files = stores.Room()
    store = bench.open(files=files)
    bench.put_all(store, 1, 2)
    files.leave(store, 100)

    assert bench.offer(store, prompt(3)) is StoreOutcome.ACCEPTED

    assert lengths(store, 1, 2) == [0, 8]


@pytest.mark.parametrize("what", ["a segment", "quarantine"])
def test_without_the_room_that_was_made_nothing_is_written(
    bench: Workbench, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the disk takes writes: what should have gone is still there."""
    files = FaultyFileSystem()
    store = bench.open(ssd_gb=stores.gb(2 * bench.one), files=files)
    bench.put_all(store, 1, 2)
    if what == "quarantine":
        stores.lose(bench, store, stores.name_of(store, prompt(1)))
    name = stores.name_of(store, prompt(1)) if what == "a segment" else "quarantine"
    stays = {own.name for own in bench.root.rglob("*.kv")}

    with files.faults.injected(Rule("EIO", "unlink", path="*.kv")):
        assert bench.offer(store, prompt(3)) is StoreOutcome.ACCEPTED
        store.writes.drain()
        assert length(store, prompt(3)) == 0 and store.stats.segments_failed == 1
        assert {own.name for own in bench.root.rglob("*.kv*")} == stays
        assert store.health.state == "read-only"
        assert bench.offer(store, prompt(4)) is StoreOutcome.UNAVAILABLE
        store.worker.submit(int).result()
        # What was not written could not be removed either.
        assert store.quota.missing(0) == pytest.approx(bench.one, abs=1000)

    assert name in caplog.text
    stores.recover(store)
    stores.check_index(store)
    bench.put_all(store, 3, 4)
    wait_until(lambda: len(list(bench.root.rglob("*.kv*"))) == 2)
    check_store(store)


def test_what_was_offered_before_a_file_stayed_is_not_written(bench: Workbench) -> None:
    """The disk has answered meanwhile, but the removal was still to come."""
    files, store = FaultyFileSystem(), bench.open()
    bench.put(store, prompt(1, 64))
    (long,) = store.tree.segments()
    store = bench.reopen(store, files=files, ssd_gb=stores.gb(long.file_bytes + bench.one))
    gate = bench.begin(store, prompt(2))
    with files.faults.injected(Rule("EIO", "unlink", path="*.kv")):
        assert bench.offer(store, prompt(3)) is StoreOutcome.ACCEPTED
        assert length(store, prompt(1, 64)) == 0
        store.health.failed("something else", OSError("a test"), reading=False)
        stores.recover(store)
        assert bench.offer(store, prompt(4)) is StoreOutcome.ACCEPTED
        gate.opened.set()
        store.writes.drain()
        assert (store.stats.segments_written, store.stats.segments_failed) == (1, 2)


@pytest.mark.parametrize("what", ["a segment", "quarantine"])
def test_a_file_that_cannot_be_removed_counts_and_all_else_goes_on(
    bench: Workbench, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again now and then."""
    files = FaultyFileSystem()
    store = bench.open(ssd_gb=stores.gb(4 * bench.one), files=files)
    bench.put_all(store, *range(4))
    name = stores.path_of(bench, look_up(store, prompt(0))).name
    if what == "quarantine":
        stores.lose(bench, store, stores.name_of(store, prompt(0)))
    with files.faults.injected(Rule("EPERM", "unlink", path=f"*{name}")):
        assert bench.offer(store, prompt(4)) is StoreOutcome.ACCEPTED
        store.writes.drain()
        assert length(store, prompt(4)) == 0
        stores.recover(store)
        for number in range(5, 9):
            store.worker.submit(int).result()
            bench.put(store, prompt(number))
            assert len(list(bench.root.rglob("*.kv"))) <= 4 and store.health.state == "ok"
        assert list(bench.root.rglob(name))
    monkeypatch.setattr(disk_worker, "RETRY_S", 0)
    bench.put(store, prompt(9))
    wait_until(lambda: not list(bench.root.rglob(name)))


def test_nothing_is_evicted_for_an_offer_that_is_refused_all_the_same(bench: Workbench) -> None:
    """Beside the last segment of the match there is a worse version of the same tokens."""
    store = bench.open(ssd_gb=stores.gb(2 * bench.one))
    worse, best, offered = ((1, *prompt(number, 7)) for number in (2, 3, 4))
    bench.put(store, worse, quality=stores.COARSE)
    (read,) = store.tree.segments()
    bench.put(store, best)
    store.segments.acquire(read)

    assert bench.offer(store, offered, quality=stores.COARSE) is StoreOutcome.NO_SPACE

    store.segments.release(read.segment_id)
    check_rows(store, best)
    assert store.stats.segments_evicted == 0


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
    store = bench.open(write_gb_per_day=stores.gb(1.9 * bench.one))
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
    assert not store.quota.has_room(1), "nor is anything reordered"
