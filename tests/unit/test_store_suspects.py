"""What could not be read: second looks at it, and what they make of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.suspects import MOST_LOOKS
from impress_sglang.management.writing import StoreOutcome
from tests import damage
from tests.faults import Faults, FaultyFileSystem, Rule, read_only
from tests.unit import failing_store
from tests.unit import store_factory as stores
from tests.unit.failing_store import read, shared_prefix, until_well
from tests.unit.store_factory import Workbench, check_rows, length, look_up, prompt

faults, bench, store = failing_store.faults, failing_store.bench, failing_store.store


def test_a_damaged_segment_on_a_read_only_disk_costs_nothing_else(
    bench: Workbench, store: PrefixStore, faults: Faults
) -> None:
    """It cannot be set aside there; what else is stored is served all the same."""
    bench.put(store, prompt(1, 40))
    bench.put(store, prompt(2, 40))
    path = stores.path_of(bench, look_up(store, prompt(1, 40)))
    faults.add(*read_only())
    damage.flip_data_bit(path)
    with pytest.raises(SegmentUnreadable):
        read(store, prompt(1, 40))
    stores.until(store, lambda: store.health.state != "ok")
    for _ in range(50):
        store.poll()
        assert store.health.readable
        time.sleep(0.01)
    check_rows(store, prompt(2, 40))
    assert length(store, prompt(1, 40)) == 0
    faults.clear()
    stores.until(store, lambda: store.stats.segments_quarantined == 1)


def test_a_segment_that_cannot_be_read_now_makes_room(bench: Workbench, faults: Faults) -> None:
    """As behind a bad sector, before looks have decided."""
    store = bench.open(files=FaultyFileSystem(faults), ssd_gb=stores.gb(bench.one))
    bench.put(store, prompt(1))
    path = stores.path_of(bench, look_up(store, prompt(1)))
    with faults.injected(Rule("EIO", "read|block", f"*{path.name}")):
        with pytest.raises(StoreUnavailable):
            read(store, prompt(1))
        stores.until(store, lambda: store.health.state == "ok")
        bench.put(store, prompt(2))
        check_rows(store, prompt(2))
    assert len(bench.files()) == 1
    assert store.summary()["segments_suspect"] == 0


@pytest.fixture
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("impress_sglang.management.suspects.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("impress_sglang.management.suspects.LONGEST_PAUSE_S", 0.01)


def looks_at(faults: Faults, store: PrefixStore, rule: Rule, count: int) -> None:
    """Until so many looks have found the fault."""
    before = faults.hits[rule.name]
    stores.until(store, lambda: faults.hits[rule.name] >= before + count)


def test_a_segment_behind_a_bad_sector_is_set_aside(
    bench: Workbench, store: PrefixStore, faults: Faults, frequent_looks: None
) -> None:
    """What builds on it stays, and is found again once it is stored again."""
    path, chats = shared_prefix(bench, store)
    rule = Rule("EIO", "read|block", f"*{path.name}")
    with faults.injected(rule):
        with pytest.raises(StoreUnavailable):
            read(store, chats[0])
        assert length(store, chats[0]) == 0, "it is not used before it is known to be good"
        stores.until(store, lambda: store.stats.segments_quarantined == 1)

        assert store.health.state == "ok" and store.summary()["segments_suspect"] == 0
        assert not path.exists()
        assert [own.name for own in bench.root.glob("*/quarantine/*")] == [path.name]
        assert length(store, chats[1]) == 0
        bench.put(store, chats[0])
        for tokens in chats:
            check_rows(store, tokens)
        assert store.stats.segments_written == 4, "only the lost part was written again"
        assert store.stats.segments_unreadable == 1
        assert faults.hits[rule.name] == 1 + MOST_LOOKS, "the request, and the looks"


@pytest.mark.parametrize(
    "rules",
    [
        [Rule("EIO", "read|block", "*.kv"), Rule("EMFILE", "open-write", "*/probe")],
        *([Rule(fault, "open", "*.kv")] for fault in ("EMFILE", "ENOMEM", "EACCES")),
    ],
    ids=lambda rules: rules[-1].name,
)
def test_what_the_machine_refuses_condemns_nothing(
    bench: Workbench, store: PrefixStore, faults: Faults, frequent_looks: None, rules: list[Rule]
) -> None:
    """Not even a new file can be made, or it says nothing about this one although others answer."""
    path, chats = shared_prefix(bench, store)
    with faults.injected(*rules):
        store.report(SegmentUnreadable(path.stem, "a test"))
        looks_at(faults, store, rules[0], 2 * MOST_LOOKS)
        assert path.exists() and store.stats.segments_quarantined == 0
    until_well(store)
    check_rows(store, chats[0])
    assert store.stats.segments_cleared == 1


def test_a_look_that_was_under_way_when_the_disk_came_back_does_not_count(
    bench: Workbench, store: PrefixStore, faults: Faults, frequent_looks: None
) -> None:
    path, chats = shared_prefix(bench, store)
    sector = Rule("EIO", "read", f"*{path.name}")
    with faults.injected(sector):
        store.report(SegmentUnreadable(path.stem, "a test"))
        looks_at(faults, store, sector, MOST_LOOKS - 1)
        (suspect,) = store._looks._suspects.values()
        stores.until(store, lambda: suspect.look is not None)
        store._looks.hurry()
        stores.until(store, lambda: suspect.look is None)
        assert suspect.looks <= 0 and path.exists()
    until_well(store)
    check_rows(store, chats[0])


def test_what_was_set_aside_does_not_come_back_with_a_power_loss(
    bench: Workbench, tmp_path: Path
) -> None:
    files = FaultyFileSystem(journal=tmp_path / "journal")
    store = bench.open(files=files)
    path, chats = shared_prefix(bench, store)
    damage.flip_data_bit(path)
    with pytest.raises(SegmentUnreadable):
        read(store, chats[0])
    stores.until(store, lambda: store.stats.segments_quarantined == 1)
    files.power_loss(database="lost")
    bench.forget(store)

    assert not path.exists()
    assert length(bench.open(), chats[0]) == 0


def test_at_a_start_what_cannot_be_read_is_left_where_it_is(
    bench: Workbench, faults: Faults
) -> None:
    """It counts, and so does what builds on it: there is less room for others."""
    store = bench.open()
    path, chats = shared_prefix(bench, store)
    used = store.summary()["used_bytes"]
    bench.close(store)
    for index in bench.root.glob("*/catalog.sqlite*"):
        index.unlink()
    with faults.injected(Rule("EMFILE", "open", f"*{path.name}")):
        store = bench.open(files=FaultyFileSystem(faults), ssd_gb=stores.gb(used))
        assert length(store, chats[0]) == 0
    assert bench.offer(store, prompt(3)) is StoreOutcome.NO_SPACE
    assert len(bench.files()) == 3

    store = bench.reopen(store)
    for tokens in chats:
        check_rows(store, tokens)
