"""The journal: what the disk does not take now is kept, and made up for."""

from __future__ import annotations

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
    "cannot be opened": Rule("EMFILE", "open-write"),
}


def segment(name: str, count: int = 8, **fields: Any) -> StoredSegment:
    info = make_info(SHAPE, range(count), segment_id=name, quality=Quality(2, 5.3, 0.15))
    return StoredSegment(info, 1000 + count, **fields)


def rows(*names: str) -> list[StoredSegment]:
    return [segment(name) for name in names]


def same(left: StoredSegment, right: StoredSegment) -> bool:
    rest = [(e.file_bytes, e.last_access, e.hits) for e in (left, right)]
    return left.info.describes_same(right.info) and rest[0] == rest[1]


@pytest.fixture
def files() -> FaultyFileSystem:
    return FaultyFileSystem()


@pytest.fixture
def journal(files: FaultyFileSystem, tmp_path: Path) -> Journal:
    return Journal(files, tmp_path)


def test_changes(journal: Journal, tmp_path: Path) -> None:
    journal.record(*rows("a", "b"))
    journal.record({"gone": ["a", "unknown"]})
    journal.record({"gone": ["b"]}, segment("c", last_access=2))
    journal.record({"use": ("c", 9, 4, "a")}, {"use": ("unknown", 9, 4, "")})

    found = index_in(tmp_path)

    assert list(found) == ["c"] and found["c"].above == "a"
    assert same(found["c"], segment("c", last_access=9, hits=4))


@pytest.mark.parametrize("refusal", REFUSALS)
def test_changes_that_are_refused_are_made_later_in_their_order(
    journal: Journal, files: FaultyFileSystem, tmp_path: Path, refusal: str
) -> None:
    journal.record(*rows("old", "older", "kept"))
    with files.faults.injected(REFUSALS[refusal]):
        for change in (
            lambda: journal.record(*rows("new")),
            lambda: journal.record({"gone": ["old"]}),
            lambda: journal.record({"gone": ["older"]}, *rows("newer", "old")),
            lambda: journal.record({"gone": ["old"]}),
            lambda: journal.record({"use": ("new", 5, 6, "")}, {"use": ("old", 1, 1, "")}),
            lambda: journal.record({"use": ("kept", 9, 4, "")}),
        ):
            with pytest.raises(OSError):
                change()
        assert "kept" in index_in(tmp_path)

    journal.record()

    for found in (index_in(tmp_path), journal.segments()):
        assert sorted(found) == ["kept", "new", "newer"]
        assert same(found["kept"], segment("kept", last_access=9, hits=4))
        assert same(found["new"], segment("new", last_access=5, hits=6))


def test_one_that_is_made_anew_is_the_old_one_until_it_is_whole(
    journal: Journal, files: FaultyFileSystem, tmp_path: Path
) -> None:
    journal.record(*rows("old"))
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes() + b"damaged\n")
    journal = Journal(files, tmp_path)
    for number, operation in enumerate(("write", "sync", "rename")):
        with files.faults.injected(Rule("ENOSPC", operation)), pytest.raises(OSError):
            journal.record(*rows(str(number)))
        assert list(index_in(tmp_path)) == ["old"]

    journal.record()

    assert len(index_in(tmp_path)) == 4 and list(tmp_path.iterdir()) == [path]
    assert b"damaged" not in path.read_bytes()


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
    monkeypatch.setattr(journal_module, "_MOST_WAITING", 3)
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

    assert change_index(tmp_path, other, sound=True) == 1
    assert list(journal.segments()) == ["b"]


def test_a_removed_file_begins_anew(journal: Journal, tmp_path: Path) -> None:
    journal.record(*rows("a"))
    (tmp_path / "journal").unlink()
    with pytest.raises(FileNotFoundError):
        journal.record(*rows("b"))
    journal.record()
    assert list(index_in(tmp_path)) == ["b"]


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
    monkeypatch.setattr(journal_module, "_MOST_WAITING", 0)
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
