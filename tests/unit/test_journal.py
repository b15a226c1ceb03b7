"""The journal: what the disk does not take now is kept, and made up for."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.quality import Quality
from impress_sglang.store import journal as journal_module
from impress_sglang.store.journal import Journal, append, decode
from impress_sglang.store.stored import StoredSegment
from tests.faults import FaultyFileSystem, Rule
from tests.unit.kv_factory import make_info, make_shape
from tests.unit.store_factory import change_index, index_in

SHAPE = make_shape(probe=())
REFUSALS = {
    "full": Rule("ENOSPC", "write"),
    "torn": Rule("torn", "write"),
    "dead": Rule("EIO", "write|open-write|rename"),
    "cannot be synced": Rule("EIO", "sync"),
    "cannot be renamed": Rule("EIO", "rename"),
    "cannot be opened": Rule("EMFILE", "open-write"),
}


def segment(name: str, count: int = 8, **fields: Any) -> StoredSegment:
    info = make_info(SHAPE, range(count), segment_id=name, quality=Quality(2, 5.3, 0.15))
    return StoredSegment(info, 1000 + count, **fields)


def rows(*names: str) -> list[StoredSegment]:
    return [segment(name) for name in names]


def state(found: dict[str, StoredSegment]) -> dict[str, tuple[Any, ...]]:
    return {
        s.segment_id: (s.info.num_tokens, s.info.quality, *s.journal_usage[1:])
        for s in found.values()
    }


@pytest.fixture
def files() -> FaultyFileSystem:
    return FaultyFileSystem()


@pytest.fixture
def journal(files: FaultyFileSystem, tmp_path: Path) -> Journal:
    return Journal(files, tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_read_is_what_was_recorded(
    files: FaultyFileSystem, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its order, whatever the disk refuses for a while, and whenever the file is made anew."""
    monkeypatch.setattr(journal_module, "_SLACK_BYTES", 2000)
    chance, journal, path = random.Random(seed), Journal(files, tmp_path), tmp_path / "journal"
    expected, before, changed = dict[str, Any](), dict[str, Any](), set[str]()
    for number in range(150):
        if before and not changed and chance.random() < 0.03:
            # Then it begins anew.
            path.unlink()
            expected, before = {}, {}
        name, kind = chance.choice("abcdefghi"), chance.choice(["add", "use", "gone"])
        changed.add(name)
        change: Any = {"gone": [name, "unknown"]}
        if kind == "add":
            expected |= state({name: (change := segment(name, 8 + number))})
        elif kind == "gone":
            expected.pop(name, None)
        else:
            change = {"use": (name, number, 4, "above")}
            if name in expected:
                expected[name] = (*expected[name][:2], *change["use"][1:])
        if chance.random() < 0.4:
            files.faults.add(chance.choice([*REFUSALS.values()]))
        try:
            journal.record(change)
        except OSError:
            kept = {name: before[name] for name in before.keys() - changed}
            assert kept.items() <= state(index_in(tmp_path)).items(), "until the new one is whole"
            continue
        finally:
            files.faults.clear()
        assert state(index_in(tmp_path)) == state(journal.segments()) == expected
        assert list(tmp_path.iterdir()) == [path]
        before, changed = expected.copy(), set()
        if chance.random() < 0.1:
            path.write_bytes(path.read_bytes() + b"damaged\n")
            journal = Journal(files, tmp_path)
    journal.record()
    assert state(index_in(tmp_path)) == expected


def test_it_is_made_anew_once_most_of_it_is_out_of_date(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_SLACK_BYTES", 1000)
    journal.record(*rows("a"))
    journal.record({"purge": {"at": time.time()}})
    journal.record({"purge": {"at": 0.0}})
    sizes = []
    for number in range(300):
        journal.record({"use": ("a", number + 1, 1, "")})
        sizes.append((tmp_path / "journal").stat().st_size)
    assert max(sizes) < 10_000 and sizes != sorted(sizes)
    assert index_in(tmp_path)["a"].last_access == 300
    content = (tmp_path / "journal").read_bytes()
    assert content.count(b'"purge"') == 1, "orders outlast that for a day"


def test_too_many_changes_that_wait_are_forgotten(
    journal: Journal,
    files: FaultyFileSystem,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next start finds these segments by their files."""
    monkeypatch.setattr(journal_module, "_MAX_PENDING_CHANGES", 3)
    journal.record(*rows("old"))
    with files.faults.injected(REFUSALS["torn"]):
        for name in "abcd":
            with pytest.raises(OSError):
                journal.record(*rows(name))
    assert caplog.text.count("refuses more than 3 changes") == 1

    journal.record(*rows("e"))

    assert {"old", "e"} <= index_in(tmp_path).keys()
    assert all(decode(line) for line in (tmp_path / "journal").read_bytes().splitlines(True))


@pytest.mark.parametrize("fault", ["EIO", "EMFILE"])
def test_one_that_cannot_be_read_now_is_left_as_it_is(
    journal: Journal, files: FaultyFileSystem, fault: str
) -> None:
    journal.record(*rows("a"))
    with files.faults.injected(Rule(fault, "open|read")), pytest.raises(OSError):
        journal.segments()

    assert list(journal.segments()) == ["a"]


def test_every_flipped_bit_costs_one_line_and_is_made_good(tmp_path: Path) -> None:
    """Nobody knows what is in a damaged line, and it may have tokens of a prompt."""
    Journal(FileSystem(), tmp_path).record(*rows("a", "b", "c"))
    path = tmp_path / "journal"
    good = path.read_bytes()
    for at in range(0, len(good), 37):
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        journal = Journal(FileSystem(), tmp_path)
        found = journal.segments()
        assert (len(found) >= 1 and found.keys() < {"a", "b", "c"}) or at < good.index(b"\n") + 1
        journal.record(*rows("d"))
        assert index_in(tmp_path).keys() == found.keys() | {"d"}
        assert all(decode(line) for line in path.read_bytes().splitlines(True))


@pytest.mark.parametrize("change", [{"bytes": None, "add": 1}, {"tokens": "a"}])
def test_a_line_of_another_version_is_none(
    journal: Journal, tmp_path: Path, change: dict[str, Any]
) -> None:
    journal.record(*rows("a", "b"))
    is_first = iter([True])

    def other(record: dict[str, Any]) -> dict[str, Any]:
        return record | change if "add" in record and next(is_first, False) else record

    assert change_index(tmp_path, other) == 1
    assert list(journal.segments()) == ["b"]


@pytest.mark.parametrize("loss", ["removed", "damaged", "refused"])
@pytest.mark.parametrize("started", ["before", "after"])
def test_orders_to_purge_outlast_a_file_that_loses_them(
    files: FaultyFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loss: str,
    started: str,
) -> None:
    """Whether this process or an earlier one has given them."""
    monkeypatch.setattr(journal_module, "_MAX_PENDING_CHANGES", 0)
    path, orders = tmp_path / "journal", [{"at": time.time() + number} for number in range(2)]
    journal = Journal(files, tmp_path)
    journal.record(*rows("a"), {"purge": orders[0]})
    if started == "after":
        journal = Journal(files, tmp_path)
        journal.segments()
    if loss == "refused":
        with files.faults.injected(Rule("EIO", "open-write")), pytest.raises(OSError):
            journal.record({"purge": orders[1]})
    else:
        journal.record({"purge": orders[1]})
    if loss == "removed":
        path.unlink()
        with pytest.raises(FileNotFoundError):
            journal.record(*rows("b"))
    elif loss == "damaged":
        *lines, _ = path.read_bytes().splitlines(True)
        path.write_bytes(b"".join(lines) + b"damaged\n")
        journal.segments()
    journal.record(*rows("c"))
    assert journal.orders == orders
    fresh = Journal(files, tmp_path)
    fresh.segments()
    assert fresh.orders == orders


def test_who_trims_a_folder_says_what_is_gone(journal: Journal, tmp_path: Path) -> None:
    append(FileSystem(), tmp_path, {"gone": ["a"]})
    assert not list(tmp_path.iterdir())
    journal.record(*rows("a", "b", "c"))
    path = tmp_path / "journal"
    append(FileSystem(), tmp_path, {"gone": ["a"]})
    assert sorted(index_in(tmp_path)) == ["b", "c"]
    path.write_bytes(path.read_bytes() + b"torn")
    append(FileSystem(), tmp_path, {"gone": ["b"]})
    assert sorted(index_in(tmp_path)) == ["c"]
