"""The index: what the database does not take now is kept, and made up for."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from impress_sglang.storage import catalog as catalog_module
from impress_sglang.storage.catalog import Catalog, CatalogEntry
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.quality import Quality
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


def entry(name: str, count: int = 8, **fields: object) -> CatalogEntry:
    info = make_info(SHAPE, range(count), segment_id=name, quality=Quality(2, 1 / 3, 5.3, 0.15))
    return dataclasses.replace(CatalogEntry(info, 1000 + count), **fields)


def same(left: CatalogEntry, right: CatalogEntry) -> bool:
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
    coded = make_info(dataclasses.replace(SHAPE, coded=True), range(8), segment_id="c")
    wanted = [entry("a"), entry("b", 300, last_access=7, hits=3), CatalogEntry(coded, 1)]
    for own in wanted:
        catalog.add(own)

    for found in (catalog.entries(), index_in(tmp_path)):
        assert sorted(found) == ["a", "b", "c"]
        assert all(same(found[own.info.segment_id], own) for own in wanted)
        assert [found[name].info.shape.coded for name in "abc"] == [False, False, True]
    assert catalog.indexed() == {"a": 1008, "b": 1300, "c": 1}


def test_changes(catalog: Catalog, tmp_path: Path) -> None:
    catalog.add(entry("a"), entry("b"), entry("below", parent="b"))
    catalog.remove("a")
    catalog.remove("unknown")
    catalog.replace("b", entry("c", last_access=2))
    catalog.record_uses([("c", 9, 4, ""), ("unknown", 9, 4, "")])

    found = index_in(tmp_path)

    assert sorted(found) == ["below", "c"]
    assert same(found["c"], entry("c", last_access=9, hits=4))
    assert found["below"].parent == "c", "what built on the old one builds on the new one"


@pytest.mark.parametrize("refusal", REFUSALS)
def test_changes_that_are_refused_are_made_later(
    catalog: Catalog, files: FaultyFileSystem, tmp_path: Path, refusal: str
) -> None:
    catalog.add(*map(entry, ("old", "older", "kept")))
    catalog.close()
    with files.faults.injected(REFUSALS[refusal]):
        for change in (
            lambda: catalog.add(entry("new")),
            lambda: catalog.remove("old"),
            lambda: catalog.replace("older", entry("newer")),
            lambda: catalog.record_uses([("kept", 9, 4, "")]),
        ):
            with pytest.raises((sqlite3.Error, OSError)):
                change()
        assert sorted(index_in(tmp_path)) == ["kept", "old", "older"], "all or none"

    catalog.flush()

    found = index_in(tmp_path)
    assert sorted(found) == ["kept", "new", "newer"]
    assert same(found["kept"], entry("kept", last_access=9, hits=4))
    catalog.flush()
    assert sorted(catalog.entries()) == ["kept", "new", "newer"]


def test_changes_that_wait_are_made_with_the_next_one_in_their_order(
    catalog: Catalog, files: FaultyFileSystem, tmp_path: Path
) -> None:
    with files.faults.injected(REFUSALS["locked"]):
        for change in (catalog.add, lambda own: catalog.remove(own.info.segment_id), catalog.add):
            with pytest.raises(sqlite3.Error):
                change(entry("a"))
        with pytest.raises(sqlite3.Error):
            catalog.remove("a")

    catalog.add(entry("b"))

    assert list(index_in(tmp_path)) == ["b"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes are a transaction, and three may wait for a database that refuses."""
    monkeypatch.setattr(catalog_module, "_TOGETHER", 2)
    monkeypatch.setattr(catalog_module, "_MOST_WAITING", 3)


def test_more_changes_than_may_wait_are_made_at_once(
    few: None, catalog: Catalog, tmp_path: Path
) -> None:
    """As at a start without an index."""
    entries = [entry(str(number)) for number in range(10)]
    catalog.add(*entries)
    assert len(index_in(tmp_path)) == 10
    catalog.record_uses([(own.info.segment_id, 9, 4, "") for own in entries])
    assert all(own.hits == 4 for own in index_in(tmp_path).values())
    catalog.remove(*map(str, range(9)))
    assert list(index_in(tmp_path)) == ["9"]
    catalog.begin_with(entries)
    assert len(index_in(tmp_path)) == 10


def test_what_was_made_of_many_changes_stays_and_the_rest_waits(
    few: None, catalog: Catalog, files: FaultyFileSystem, tmp_path: Path
) -> None:
    catalog.add(entry("0"))
    with files.faults.injected(Rule("ENOSPC", "sql.commit", after=1)):
        with pytest.raises(sqlite3.Error):
            catalog.add(*(entry(str(number)) for number in range(1, 6)))
        assert sorted(index_in(tmp_path)) == ["0", "1", "2"]

    catalog.flush()

    assert len(index_in(tmp_path)) == 6


def test_an_index_that_is_made_anew_is_the_old_one_until_it_is_whole(
    few: None, catalog: Catalog, files: FaultyFileSystem, tmp_path: Path
) -> None:
    catalog.add(entry("old"))
    new = [entry(str(number)) for number in range(10)]
    with files.faults.injected(Rule("ENOSPC", "sql.insert", after=15)):
        with pytest.raises(sqlite3.Error):
            catalog.begin_with(new)
        assert list(index_in(tmp_path)) == ["old"]

    catalog.flush()

    assert len(index_in(tmp_path)) == 10


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
                catalog.add(entry(name))
    assert caplog.text.count("refuses more than 3 changes") == 1

    catalog.flush()

    assert sorted(index_in(tmp_path)) == ["c", "d", "e"]


def test_who_only_reads_changes_nothing(catalog: Catalog, tmp_path: Path) -> None:
    def read() -> list[str]:
        reader = Catalog(FileSystem(), tmp_path, read_only=True)
        names = list(reader.entries())
        reader.close()
        return names

    assert read() == [] and not list(tmp_path.iterdir())
    catalog.add(entry("a"))
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
    catalog.add(entry("a"))
    catalog.close()
    rule = Rule("EMFILE", "database") if fault == "EMFILE" else Rule(fault, "sql.select")
    with files.faults.injected(rule), pytest.raises((sqlite3.OperationalError, OSError)):
        catalog.entries()

    assert list(catalog.entries()) == ["a"]


def test_a_database_that_takes_no_changes_is_made_anew(
    catalog: Catalog, files: FaultyFileSystem, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is wrong in a page need not be seen by who reads all rows."""
    catalog.add(entry("a"))
    rule = Rule("malformed", "sql.insert", count=1)
    with files.faults.injected(rule), pytest.raises(sqlite3.DatabaseError):
        catalog.add(entry("b"))

    assert "rebuilding" in caplog.text
    catalog.add(entry("c"))
    assert sorted(index_in(tmp_path)) == ["b", "c"]


def test_a_flipped_bit_of_the_tables_makes_the_index_anew(tmp_path: Path) -> None:
    """SQLite may take it for other tables, quote it in a message that is no text, or not see it."""
    before = Catalog(FileSystem(), tmp_path)
    before.add(entry("a"))
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
        assert list(catalog.entries()) in ([], ["a"])
        catalog.add(entry("b"))
        assert "b" in catalog.entries()
        catalog.close()


def test_a_row_that_is_unsound_leaves(catalog: Catalog, tmp_path: Path) -> None:
    """It has tokens of a prompt, and nobody knows whose they are."""
    catalog.add(entry("a"), entry("b"))
    catalog.close()
    change_index(tmp_path, "UPDATE segments SET segment_id = 'A' WHERE segment_id = 'a'")
    assert list(catalog.entries()) == ["b"]

    catalog.flush()

    assert list(catalog.indexed()) == ["b"]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE segments SET shape = 'no json'",
        "UPDATE segments SET shape = '{}'",
        "UPDATE segments SET quality = '[0, 1.0, 16.0, 1.0]'",
        "UPDATE segments SET quality = '[2, 2.0, 5.3, 1.0]'",
        "UPDATE segments SET tokens = x'010203'",
        "ALTER TABLE segments ADD COLUMN more TEXT",
        "ALTER TABLE segments DROP COLUMN quality",
    ],
)
def test_a_row_that_cannot_be_is_a_damaged_database(
    catalog: Catalog, tmp_path: Path, damage: str
) -> None:
    catalog.add(entry("a"))
    catalog.close()
    change_index(tmp_path, damage)

    assert catalog.entries() == {}
    catalog.add(entry("b"))

    assert list(index_in(tmp_path)) == ["b"]
