"""The index: what the database does not take now is kept, and made up for."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.quality import Quality
from impress_sglang.store import catalog as catalog_module
from impress_sglang.store.catalog import Catalog, Row
from impress_sglang.store.stored import StoredSegment
from tests.faults import SQL, FaultyFileSystem, Rule
from tests.unit.kv_factory import make_info, make_shape
from tests.unit.store_factory import change_index, index_in

SHAPE = make_shape(probe=())
REFUSALS = {
    "full": Rule("ENOSPC", "sql.insert|sql.delete|sql.update|sql.commit"),
    "locked": Rule("locked", "sql.insert|sql.delete|sql.update|sql.commit"),
    "dead": Rule("EIO", SQL),
    "cannot be opened": Rule("EMFILE", "database|sql.*"),
    "commit": Rule("EIO", "sql.commit"),
}


def segment(name: str, count: int = 8, **fields: object) -> StoredSegment:
    info = make_info(SHAPE, range(count), segment_id=name, quality=Quality(2, 1 / 3, 5.3, 0.15))
    return dataclasses.replace(StoredSegment(info, 1000 + count), **fields)


def rows(*names: str) -> list[Row]:
    return [segment(name).row for name in names]


def same(left: StoredSegment, right: StoredSegment) -> bool:
    rest = [(e.file_bytes, e.last_access, e.hits) for e in (left, right)]
    return left.info.describes_same(right.info) and rest[0] == rest[1]


@pytest.fixture
def files() -> FaultyFileSystem:
    return FaultyFileSystem()


@pytest.fixture
def catalog(files: FaultyFileSystem, tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(files, tmp_path)
    yield catalog
    files.faults.clear()
    catalog.close()


def test_rows_are_read_back(catalog: Catalog, tmp_path: Path) -> None:
    coded = make_info(dataclasses.replace(SHAPE, code_bits=6.0), range(8), segment_id="c")
    below = segment("b", 300, last_access=7, hits=3, parent=segment("a"))
    wanted = [segment("a"), below, StoredSegment(coded, 1)]
    catalog.change(own.row for own in wanted)

    for found in (catalog.segments(), index_in(tmp_path)):
        assert sorted(found) == ["a", "b", "c"]
        assert all(same(found[own.segment_id], own) for own in wanted)
        assert [found[name].info.shape.coded for name in "abc"] == [False, False, True]
        assert [found[name].above for name in "abc"] == ["", "a", ""]


def test_changes(catalog: Catalog, tmp_path: Path) -> None:
    catalog.change(rows("a", "b"))
    catalog.change(removed=["a", "unknown"])
    catalog.change([segment("c", last_access=2).row], ["b"])
    catalog.record_uses([("c", 9, 4, "a"), ("unknown", 9, 4, "")])

    found = index_in(tmp_path)

    assert list(found) == ["c"] and found["c"].above == "a"
    assert same(found["c"], segment("c", last_access=9, hits=4))


@pytest.mark.parametrize("refusal", REFUSALS)
def test_changes_that_are_refused_are_made_later(
    catalog: Catalog, files: FaultyFileSystem, tmp_path: Path, refusal: str
) -> None:
    catalog.change(rows("old", "older", "kept"))
    catalog.close()
    with files.faults.injected(REFUSALS[refusal]):
        for change in (
            lambda: catalog.change(rows("new")),
            lambda: catalog.change(removed=["old"]),
            lambda: catalog.change(rows("newer"), ["older"]),
            lambda: catalog.record_uses([("new", 5, 6, ""), ("old", 1, 1, "")]),
            lambda: catalog.record_uses([("kept", 9, 4, "")]),
        ):
            with pytest.raises((sqlite3.Error, OSError)):
                change()
        assert sorted(index_in(tmp_path)) == ["kept", "old", "older"], "all or none"

    catalog.flush()

    found = index_in(tmp_path)
    assert sorted(found) == ["kept", "new", "newer"]
    assert same(found["kept"], segment("kept", last_access=9, hits=4))
    assert same(found["new"], segment("new", last_access=5, hits=6))
    catalog.flush()
    assert sorted(catalog.segments()) == ["kept", "new", "newer"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes of three segments may wait for a database that refuses."""
    monkeypatch.setattr(catalog_module, "_MOST_WAITING", 3)


def test_of_changes_that_are_refused_for_too_long_the_oldest_are_forgotten(
    few: None,
    catalog: Catalog,
    files: FaultyFileSystem,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next start finds these segments by their files."""
    with files.faults.injected(REFUSALS["full"]):
        for name in "abcde":
            with pytest.raises(sqlite3.Error):
                catalog.change(rows(name))
    assert caplog.text.count("refuses more than 3 changes") == 1

    catalog.flush()

    assert sorted(index_in(tmp_path)) == ["c", "d", "e"]


def test_who_only_reads_changes_nothing(catalog: Catalog, tmp_path: Path) -> None:
    def read() -> list[str]:
        reader = Catalog(FileSystem(), tmp_path, read_only=True)
        names = list(reader.segments())
        reader.close()
        return names

    assert read() == [] and not list(tmp_path.iterdir())
    catalog.change(rows("a"))
    assert read() == ["a"], "what another process has not folded into the database yet"
    catalog.close()
    (path,) = tmp_path.iterdir()
    for damage in (b"no index" * 1000, b"", path.read_bytes()[:4096], path.read_bytes()):
        path.write_bytes(damage)
        assert read() == (["a"] if damage == path.read_bytes() and len(damage) > 8000 else [])
        assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == damage


@pytest.mark.parametrize("fault", ["EIO", "EMFILE", "locked"])
def test_a_database_that_cannot_be_read_now_is_left_as_it_is(
    catalog: Catalog, files: FaultyFileSystem, tmp_path: Path, fault: str
) -> None:
    catalog.change(rows("a"))
    catalog.close()
    rule = Rule("EMFILE", "database") if fault == "EMFILE" else Rule(fault, "sql.select")
    with files.faults.injected(rule), pytest.raises((sqlite3.OperationalError, OSError)):
        catalog.segments()

    assert list(catalog.segments()) == ["a"]


def test_a_database_that_takes_no_changes_is_made_anew(
    catalog: Catalog, files: FaultyFileSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is wrong in a page need not be seen by who reads all rows."""
    catalog.change(rows("a"))
    rule = Rule("malformed", "sql.insert", count=1)
    with files.faults.injected(rule), pytest.raises(sqlite3.DatabaseError):
        catalog.change(rows("b"))

    assert "rebuilding" in caplog.text
    catalog.change(rows("c"))
    assert sorted(index_in(tmp_path)) == ["b", "c"]


def test_a_flipped_bit_of_the_tables_makes_the_index_anew(tmp_path: Path) -> None:
    """SQLite may take it for other tables, quote it in a message that is no text, or not see it."""
    before = Catalog(FileSystem(), tmp_path)
    before.change(rows("a"))
    before.close()
    path = tmp_path / "catalog.sqlite"
    good = path.read_bytes()
    first = good.index(b"CREATE TABLE uses")
    stop = good.rindex(b"STRICT", first, good.index(b"\x00", good.index(b"CREATE TABLE segments")))
    for at in range(first - 60, stop, 7):
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        catalog = Catalog(FileSystem(), tmp_path)
        assert list(catalog.segments()) in ([], ["a"])
        catalog.change(rows("b"))
        assert "b" in catalog.segments()
        catalog.close()


@pytest.mark.parametrize(
    "damage",
    [
        "ALTER TABLE segments ADD COLUMN more TEXT",
        "ALTER TABLE segments DROP COLUMN file_bytes",
        "DROP TABLE uses",
    ],
)
def test_other_tables_are_a_damaged_database(catalog: Catalog, tmp_path: Path, damage: str) -> None:
    catalog.change(rows("a"))
    catalog.close()
    change_index(tmp_path, damage)

    assert catalog.segments().keys() <= {"a"}
    catalog.change(rows("b"))

    assert "b" in index_in(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "description = CAST(replace(CAST(description AS TEXT), 'float', 'floau') AS BLOB)",
        "description = CAST('no json' AS BLOB)",
        "tokens = x'010203'",
        "file_bytes = file_bytes + 4096",
    ],
)
def test_a_row_that_is_wrong_is_none(catalog: Catalog, tmp_path: Path, damage: str) -> None:
    catalog.change(rows("a"))
    catalog.close()
    assert change_index(tmp_path, f"UPDATE segments SET {damage}") == 1
    assert catalog.segments() == {}
