"""Writing prefixes: what is accepted, the quota, the free-space floor and the budget of writes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import Tensor

from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.writer import LayerReader, WriteAbandoned
from impress_sglang.store import disk_worker
from impress_sglang.store.miss_log import MissCause
from impress_sglang.store.orders import Purge
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS
from impress_sglang.store.quota import WriteBudget
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSpan
from impress_sglang.store.writing import Offer, StoreOutcome, _missing_range
from tests.faults import FaultyFileSystem, Rule
from tests.unit import kv_factory as kv
from tests.unit import store_factory as stores
from tests.unit.store_checks import check_store
from tests.unit.store_factory import Workbench, check_rows, length, lengths, look_up, prompt
from tests.unit.waiting import wait_until


def test_kvs_that_the_reader_lacks_must_be_stored(bench: Workbench, store: PrefixStore) -> None:
    """The request has KVs from token 8 on only."""
    tokens = prompt(1, 20)

    assert bench.offer(store, tokens, available_from=8) is StoreOutcome.PREFIX_MISSING
    assert bench.files() == set() and bench.done == []
    bench.put(store, prompt(1, 7))
    assert bench.offer(store, tokens, available_from=8) is StoreOutcome.PREFIX_MISSING
    bench.put(store, prompt(1, 8))
    bench.put(store, tokens, available_from=8)
    check_rows(store, tokens)


def test_a_write_that_has_read_everything_is_published_although_it_is_abandoned(
    bench: Workbench, store: PrefixStore
) -> None:
    bench.offer(store, prompt(1))
    wait_until(store.writes._writes[0].future.done)

    store.writes.abandon()

    store.writes.drain()
    assert bench.done == [prompt(1)]
    check_rows(store, prompt(1))
    assert store.stats.segments_abandoned == 0


def test_what_is_purged_after_it_was_read_gets_no_name(bench: Workbench) -> None:
    """Else a server that is killed before it looks again would find it at its next start."""
    store, tokens = bench.open(write_gb_per_day=0.01), prompt(1, BLOCK_TOKENS)
    read, last = kv.SequenceKVs(bench.shape, "", tokens).read_from(0), bench.shape.num_layers - 1
    entered, purged = threading.Event(), threading.Event()

    def read_layers(start: int) -> LayerReader:
        def read_layer(layer: int) -> tuple[Tensor, Tensor]:
            if layer == last:
                entered.set()
                assert purged.wait(30)
            return read(layer)

        return read_layer

    budget = store.summary()["write_budget_left_bytes"]
    bench.offer(store, tokens, read_layers=read_layers)
    assert entered.wait(30)
    (segment,) = store.tree.segments()
    assert Purge().step(store)["writes"] == 1
    purged.set()
    assert isinstance(store.writes._writes[0].future.exception(), WriteAbandoned)
    assert bench.files() == set()
    store.writes.drain()
    assert length(store, tokens) == 0
    loss = store.miss_log.find(store.namespace(""), kv.as_tokens(tokens), 0)
    assert loss is not None and loss.cause is MissCause.PURGED
    spent = budget - store.summary()["write_budget_left_bytes"]
    assert spent > 0.9 * segment.file_bytes, "the drive took it; a little time has passed"


@pytest.mark.parametrize(
    ("new", "expected"), [(4, StoreOutcome.ALREADY_STORED), (5, StoreOutcome.ACCEPTED)]
)
def test_a_short_rest_is_not_worth_a_file(
    bench: Workbench, store: PrefixStore, new: int, expected: StoreOutcome
) -> None:
    bench.put(store, prompt(1, 20))

    assert bench.offer(store, prompt(1, 20 + new), min_tokens=5) is expected


@pytest.mark.parametrize(
    ("known", "expected"), [(".oo", (3, 20)), (".oo.o", (3, 9)), ("x", (0, 0)), (".ox", (3, 6))]
)
def test_holes_next_to_each_other_are_filled_at_once(known: str, expected: tuple[int, int]) -> None:
    """Three tokens each: `.` is stored, `o` a hole, `x` one of another quality."""
    spans = []
    for number, kind in enumerate(known):
        state = SegmentState.READY if kind == "." else SegmentState.LOST
        quality = Quality(1, 8.0, 0.5) if kind == "x" else EXACT
        segment = kv.stored_segment(str(number), range(3), state=state, quality=quality)
        spans.append(StoredSpan(segment, 0, 3))
    nothing: Any = None
    offer = Offer(kv.as_tokens(range(20)), nothing, nothing, nothing, min_tokens=1)
    assert _missing_range(StoredMatch(tuple(spans)), offer) == expected


def test_the_free_space_floor_is_kept(bench: Workbench) -> None:
    """Bytes that are still written are not free; what is stored leaves for what is new."""
    files = stores.Room(1_000_000 + bench.one - 1)
    store = bench.open(min_free_gb=0.001, files=files)
    assert bench.offer(store, prompt(1)) is StoreOutcome.NO_SPACE

    files.leave(store, 1_000_000 + 2 * bench.one)
    gates = [bench.begin(store, prompt(n)) for n in (1, 2)]
    assert bench.offer(store, prompt(3)) is StoreOutcome.NO_SPACE
    assert store.stats.offers_without_space == 2
    for gate in gates:
        gate.opened.set()
    store.writes.drain()

    files.leave(store, 1_000_100)
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
    stays = {path.name for path in bench.root.rglob("*.kv")}

    with files.faults.injected(Rule("EIO", "unlink", path="*.kv")):
        assert bench.offer(store, prompt(3)) is StoreOutcome.ACCEPTED
        store.writes.drain()
        assert length(store, prompt(3)) == 0 and store.stats.segments_failed == 1
        assert {path.name for path in bench.root.rglob("*.kv*")} == stays
        assert store.health.state == "read-only"
        assert bench.offer(store, prompt(4)) is StoreOutcome.UNAVAILABLE
        store.worker.submit(int).result()
        # What was not written could not be removed either.
        assert store.quota.missing(0) == pytest.approx(bench.one, abs=1000)

    assert name in caplog.text
    stores.until_well(store)
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
        store.health.report_failure("something else", OSError("a test"), reading=False)
        stores.until_well(store)
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
        stores.until_well(store)
        for number in range(5, 9):
            store.worker.submit(int).result()
            bench.put(store, prompt(number))
            assert len(list(bench.root.rglob("*.kv"))) <= 4 and store.health.state == "ok"
        assert list(bench.root.rglob(name))
    monkeypatch.setattr(disk_worker, "RETRY_S", 0)
    bench.put(store, prompt(9))
    wait_until(lambda: not list(bench.root.rglob(name)))


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
    spent, there = (record.message for record in caplog.records)
    assert "is spent" in spent and "is there again" in there


def test_what_is_over_the_budget_is_not_stored(bench: Workbench) -> None:
    """What was given up costs nothing; what is there stays there, and the next store goes on."""
    store = bench.open(write_gb_per_day=stores.gb(1.9 * bench.one))
    bench.begin(store, prompt(9))
    store.writes.abandon()
    store.writes.drain()
    bench.put_all(store, 1, 2)
    for _ in range(2):
        assert bench.offer(store, prompt(3)) is StoreOutcome.OVER_BUDGET
    assert bench.offer(store, prompt(1)) is StoreOutcome.ALREADY_STORED
    assert lengths(store, 1, 2, 3) == [8, 8, 0]
    summary = store.summary()
    assert (summary["offers_above_budget"], summary["write_budget_left_bytes"]) == (2, 0)
    assert not store.quota.has_room(1), "nor is anything reordered"
