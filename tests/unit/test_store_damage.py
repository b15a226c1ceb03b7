"""What could not be read: second looks, quarantine, and holes that are filled again."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.store.disk_worker import MAX_LOOKS
from impress_sglang.store.health import Verdict
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.writing import StoreOutcome
from tests import damage
from tests.faults import Faults, FaultyFileSystem, Rule, read_only
from tests.unit import store_factory as stores
from tests.unit import test_store_faults as failing_store
from tests.unit.store_factory import Workbench, check_rows, length, lengths, look_up, prompt
from tests.unit.test_store_faults import read

faults, store = failing_store.faults, failing_store.store


def cut(path: Path, size: int) -> None:
    """To so many bytes, or by so many."""
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


LOOKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "good": (lambda path: None, "segments_cleared"),
    "a damaged block": (damage.flip_data_bit, "segments_quarantined"),
    "a damaged header": (functools.partial(damage.flip_bit, offset=100), "segments_quarantined"),
    **{
        f"cut to {size}": (functools.partial(cut, size=size), "segments_quarantined")
        for size in (-1, -4096, 4096, 100, 0)
    },
    "zeros": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "segments_quarantined"),
    "gone": (Path.unlink, "segments_gone"),
}


@pytest.mark.parametrize("kind", LOOKS)
def test_a_second_look_decides_about_what_could_not_be_read(bench: Workbench, kind: str) -> None:
    harm, counter = LOOKS[kind]
    store = stores.three_prefixes(bench)
    used = store.summary()["used_bytes"]
    path = stores.path_of(bench, look_up(store, prompt(2, 8), "salt"))
    harm(path)
    found = SegmentUnreadable(path.stem, "a test")
    if kind != "good":
        with pytest.raises(SegmentUnreadable) as caught:
            check_rows(store, prompt(2, 8), namespace="salt")
        found = caught.value
        assert found.segment_id == path.stem

    store.report(found)

    assert store.summary()["segments_suspect"] == 1
    assert length(store, prompt(2, 8), namespace="salt") == 0, "not before it is found good"
    stores.look_again(store)
    counts = {name: getattr(store.stats, name) for _, name in LOOKS.values()}
    assert counts == {name: int(name == counter) for name in counts}
    assert store.stats.segments_unreadable == 1
    quarantined = [file.name for file in bench.root.glob("*/quarantine/*")]
    assert quarantined == ([path.name] if counter == "segments_quarantined" else [])
    check_rows(store, prompt(1, 40))
    if kind == "good":
        check_rows(store, prompt(2, 8), namespace="salt")
    else:
        assert length(store, prompt(2, 8), namespace="salt") == 0
        assert len(store.tree) == 2
        assert store.summary()["used_bytes"] == used - bench.one
        assert not path.exists()
        assert store.health.state == "ok", "one bad file is not a bad disk"
        stores.check_index(store)


def test_a_few_damaged_files_are_kept_and_counted(bench: Workbench) -> None:
    store = bench.open(ssd_gb=stores.gb(7 * bench.one))
    names = []
    for number in range(6):
        bench.put(store, prompt(number))
        names.append(stores.name_of(store, prompt(number)))
    for number, name in enumerate(names):
        # Clocks of file systems are coarse.
        time.sleep(0.02)
        stores.lose(bench, store, name)
        (path,) = bench.root.glob(f"*/quarantine/{name}.kv")
        os.utime(path, (100 - number, 100 - number))

    kept = sorted(path.stem for path in bench.root.glob("*/quarantine/*"))
    assert kept == sorted(names[-4:]), "those set aside last, whenever they were written"
    assert store.summary()["quarantined_bytes"] == 4 * bench.one
    bench.put_all(store, *range(3))
    store = bench.reopen(store, ssd_gb=stores.gb(7 * bench.one))
    assert store.summary()["quarantined_bytes"] == 4 * bench.one
    bench.put(store, prompt(3))
    assert lengths(store, *range(4)) == [8] * 4, "they leave for room"
    assert store.summary()["quarantined_bytes"] == 0


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


def shared_prefix(bench: Workbench, store: PrefixStore) -> tuple[Path, list[tuple[int, ...]]]:
    """A stored prefix and two that build on it; the file of the first."""
    first = prompt(1, 24)
    chats = [(*first, *prompt(number, 16)) for number in (7, 8)]
    for tokens in (first, *chats):
        bench.put(store, tokens)
    return stores.path_of(bench, look_up(store, first)), chats


@pytest.fixture
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("impress_sglang.store.health.FIRST_LOOK_S", 0.01)
    monkeypatch.setattr("impress_sglang.store.health.LONGEST_LOOK_S", 0.01)


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
        assert [file.name for file in bench.root.glob("*/quarantine/*")] == [path.name]
        assert length(store, chats[1]) == 0
        bench.put(store, chats[0])
        for tokens in chats:
            check_rows(store, tokens)
        assert store.stats.segments_written == 4, "only the lost part was written again"
        assert store.stats.segments_unreadable == 1
        assert faults.hits[rule.name] == 1 + MAX_LOOKS, "the request, and the looks"


def test_looks_before_a_recovery_do_not_count(
    bench: Workbench, store: PrefixStore, faults: Faults
) -> None:
    path, chats = shared_prefix(bench, store)
    info, worker = look_up(store, chats[0]).spans[0].segment.info, store.worker
    with faults.injected(Rule("EIO", "read|block", f"*{path.name}")):
        looks = [worker.submit(worker.recheck, info) for _ in range(MAX_LOOKS - 1)]
        worker.submit(worker.retry_refused)
        looks += [worker.submit(worker.recheck, info) for _ in range(MAX_LOOKS)]
        found = [look.result() for look in looks]
    assert found == [Verdict.UNCLEAR] * (2 * MAX_LOOKS - 2) + [Verdict.BAD]
    store.report(SegmentUnreadable(path.stem, "a test"))
    stores.look_again(store)


@pytest.mark.parametrize(
    "rules",
    [
        [Rule("EIO", "read|block", "*.kv"), Rule("EMFILE", "open-write", "*/probe*")],
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
        wanted = faults.hits[rules[0].name] + 2 * MAX_LOOKS
        stores.until(store, lambda: faults.hits[rules[0].name] >= wanted)
        assert path.exists() and store.stats.segments_quarantined == 0
    stores.until_well(store)
    check_rows(store, chats[0])
    assert store.stats.segments_cleared == 1


def test_at_a_start_what_cannot_be_read_is_left_where_it_is(
    bench: Workbench, faults: Faults
) -> None:
    """It counts, and so does what builds on it: there is less room for others."""
    store = bench.open()
    path, chats = shared_prefix(bench, store)
    used = store.summary()["used_bytes"]
    bench.close(store)
    next(bench.root.glob("*/journal")).unlink()
    with faults.injected(Rule("EMFILE", "open", f"*{path.name}")):
        store = bench.open(files=FaultyFileSystem(faults), ssd_gb=stores.gb(used))
        assert length(store, chats[0]) == 0
    assert bench.offer(store, prompt(3)) is StoreOutcome.NO_SPACE
    assert len(bench.files()) == 3

    store = bench.reopen(store)
    for tokens in chats:
        check_rows(store, tokens)
