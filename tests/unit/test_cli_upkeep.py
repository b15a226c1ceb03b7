"""The command line: indexes that are made anew, and what nobody can use."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sqlite3
import time
from types import SimpleNamespace
from typing import Any

import pytest

from impress_sglang.cli import directory as cli_directory
from impress_sglang.cli.main import main
from impress_sglang.cli.outcome import DONE, UNREACHABLE
from impress_sglang.storage.directory import CATALOG, MARKER
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import FORMAT_VERSION
from impress_sglang.store.catalog import Catalog
from impress_sglang.store.stored import StoredSegment
from tests.faults import SQL, FaultyFileSystem, Killed, Rule
from tests.faulty_database import cut_database
from tests.unit import store_factory
from tests.unit.kv_factory import IDENTITY, flip_byte
from tests.unit.store_factory import (
    OTHER_IDENTITY,
    Workbench,
    check_rows,
    check_three_prefixes,
    index_in,
    length,
    prompt,
    three_prefixes,
    use,
)

bench = store_factory.bench_of_one_shape

Said = pytest.CaptureFixture[str]
REMAINS = "9" * 32
# Of two that are alike the one that is not kept.
TWIN = "f" * 32


@pytest.fixture
def left(bench: Workbench) -> Workbench:
    """A directory that a server has left: 13 tokens, 27 behind them, and 8 of another tenant."""
    store = three_prefixes(bench)
    use(store, prompt(1, 40))
    use(store, prompt(1, 13))
    bench.close(store)
    return bench


def run(said: Said, bench: Workbench, *arguments: object) -> list[dict[str, Any]]:
    """What was printed as JSON."""
    assert main([*map(str, arguments), "--dir", str(bench.root), "--json"]) == DONE
    rows = json.loads(said.readouterr().out)
    assert isinstance(rows, list)
    return rows


def removed(said: Said, bench: Workbench, *options: str) -> dict[str, tuple[int, int]]:
    """Files and bytes of each kind."""
    return {row["what"]: (row["files"], row["bytes"]) for row in run(said, bench, "gc", *options)}


def index_of(bench: Workbench) -> dict[str, StoredSegment]:
    return index_in(bench.root / IDENTITY)


def segment_of(bench: Workbench, num_tokens: int) -> str:
    (found,) = (name for name, own in index_of(bench).items() if own.info.num_tokens == num_tokens)
    return found


def forget(bench: Workbench, segment_id: str) -> None:
    catalog = Catalog(FileSystem(), bench.root / IDENTITY)
    catalog.change(removed=[segment_id])
    catalog.close()


def same_rows(one: dict[str, StoredSegment], other: dict[str, StoredSegment]) -> bool:
    return one.keys() == other.keys() and all(
        own.info.describes_same(other[name].info)
        and (own.file_bytes, own.last_access, own.hits, own.above)
        == (other[name].file_bytes, other[name].last_access, other[name].hits, other[name].above)
        for name, own in one.items()
    )


def expected(store: str = IDENTITY, **counts: int) -> dict[str, Any]:
    none = dict.fromkeys(("not_indexed", "without_file", "quarantined", "unreadable_now"), 0)
    return {"store": store, **none, **counts}


def test_an_index_is_made_anew_with_what_only_the_old_one_knew(
    left: Workbench, capsys: Said
) -> None:
    before = index_of(left)
    assert any(own.hits for own in before.values()) and any(own.above for own in before.values())
    other = left.open(OTHER_IDENTITY)
    left.put(other, prompt(2))
    left.close(other)
    assert run(capsys, left, "rebuild") == [
        expected(segments=3),
        expected(OTHER_IDENTITY, segments=1),
    ]
    assert same_rows(index_of(left), before)
    check_three_prefixes(left.open())


def test_files_and_index_that_do_not_agree(left: Workbench, capsys: Said) -> None:
    first, behind, tenant = (segment_of(left, tokens) for tokens in (13, 27, 8))
    forget(left, first)
    left.file_of(tenant).unlink()
    flip_byte(left.file_of(behind), 100)
    # The index alone would take that file for good.
    assert run(capsys, left, "rebuild") == [
        expected(segments=1, not_indexed=1, without_file=1, quarantined=1)
    ]
    assert index_of(left).keys() == {first} and left.files() == {f"{first}.kv"}
    assert len(list(left.root.glob("*/quarantine/*"))) == 1
    store = left.open()
    check_rows(store, prompt(1, 13))
    assert length(store, prompt(1, 40)) == 13


@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_without_an_index_only_uses_are_forgotten(
    left: Workbench, capsys: Said, damage: str
) -> None:
    path = left.root / IDENTITY / CATALOG
    path.unlink() if damage == "missing" else path.write_bytes(b"no index" * 1000)
    assert run(capsys, left, "rebuild") == [expected(segments=3, not_indexed=3)]
    assert all(
        (own.last_access, own.hits, own.above) == (0, 0, "") for own in index_of(left).values()
    )
    check_three_prefixes(left.open())


def install(monkeypatch: pytest.MonkeyPatch, *rules: Rule) -> None:
    def files() -> FileSystem:
        found = FaultyFileSystem()
        found.faults.add(*rules)
        return found

    monkeypatch.setattr(cli_directory, "FileSystem", files)


@pytest.mark.parametrize("command", ["rebuild", "gc"])
def test_a_command_that_is_killed_leaves_a_store_that_opens(
    left: Workbench, capsys: Said, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    before, after, done = index_of(left), 0, False
    unfinished = left.root / IDENTITY / "segments" / "99" / f"{REMAINS}.kv.tmp"
    unfinished.parent.mkdir(exist_ok=True)
    while not done:
        unfinished.write_bytes(bytes(10))
        install(monkeypatch, Rule("kill", after=after))
        try:
            done = main([command, "--dir", str(left.root)]) == DONE
        except Killed:
            after += 1
        assert same_rows(index_of(left), before)
    assert after > 20 and not unfinished.exists()
    check_three_prefixes(left.open())


@pytest.mark.parametrize("operations", ["sql.delete", "sql.insert", "sql.commit", SQL])
def test_a_database_that_refuses_keeps_what_it_has(
    left: Workbench, capsys: Said, monkeypatch: pytest.MonkeyPatch, operations: str
) -> None:
    before = index_of(left)
    install(monkeypatch, Rule("ENOSPC", operations))
    assert main(["rebuild", "--dir", str(left.root)]) == UNREACHABLE
    assert "full" in capsys.readouterr().err and same_rows(index_of(left), before)


def test_a_file_that_cannot_be_read_now_stays(
    left: Workbench, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = segment_of(left, 13)
    forget(left, first)
    before = left.files()
    install(monkeypatch, Rule("EIO", "read", f"*/{first}.kv"))
    assert run(capsys, left, "rebuild") == [expected(segments=2, unreadable_now=1)]
    # What builds on it may have a place when it can be read.
    assert removed(capsys, left) == {} and left.files() == before
    monkeypatch.undo()
    assert run(capsys, left, "rebuild") == [expected(segments=3, not_indexed=1)]
    check_three_prefixes(left.open())


def test_what_nobody_can_use_is_removed(
    left: Workbench, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = left.open()
    left.put(store, prompt(3, 9), ttl=1000.0)
    left.put(store, prompt(3, 20))
    left.put(store, prompt(4, 8))
    left.close(store)
    assert removed(capsys, left) == {}
    sizes = {own.info.num_tokens: own.file_bytes for own in index_of(left).values()}
    first = segment_of(left, 13)
    left.file_of(first).with_name(f"{first[:2]}{'0' * 30}.kv.tmp").write_bytes(bytes(100))
    (left.root / IDENTITY / "quarantine" / f"{REMAINS}.kv").write_bytes(bytes(200))
    left.file_of(first).unlink()
    later = time.time() + 1001
    monkeypatch.setattr(cli_directory, "time", SimpleNamespace(time=lambda: later))

    expected = {
        "unfinished": (1, 100),
        "damaged": (1, 200),
        "expired": (1, sizes[9]),
        "without a place": (2, sizes[27] + sizes[11]),
    }
    before = sorted(left.root.rglob("*.kv*"))
    assert removed(capsys, left, "--dry-run") == expected
    assert sorted(left.root.rglob("*.kv*")) == before
    assert removed(capsys, left) == expected
    assert len(left.files()) == 2 == len(index_of(left)) and removed(capsys, left) == {}
    store = left.open()
    check_rows(store, prompt(4, 8))
    check_rows(store, prompt(2, 8), namespace="salt")


@pytest.mark.parametrize("index", ["missing", "garbage", "columns", "log"])
def test_who_only_looks_changes_no_index(left: Workbench, capsys: Said, index: str) -> None:
    def contents() -> dict[str, bytes]:
        # SQLite has a file there for its own use while it reads a log.
        return {
            str(own): own.read_bytes()
            for own in left.root.rglob("*")
            if own.is_file() and not own.name.endswith("-shm")
        }

    path = left.root / IDENTITY / CATALOG
    if index == "missing":
        path.unlink()
    elif index == "garbage":
        path.write_bytes(b"no index" * 1000)
    else:
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("ALTER TABLE segments ADD COLUMN more TEXT")
            if index == "log":
                connection.execute("ALTER TABLE segments DROP COLUMN more")
        # As a server that is killed leaves it.
        cut_database(path, [connection], keep_log=True)
    before = contents()
    for command in (["gc", "--dry-run"], ["ls"], ["stat"], ["verify"]):
        assert main([*command, "--dir", str(left.root)]) == DONE
        assert contents() == before
    capsys.readouterr()
    assert removed(capsys, left, "--dry-run") == removed(capsys, left) == {}
    check_three_prefixes(left.open())


def test_damaged_files_and_second_ones_of_a_place(left: Workbench, capsys: Said) -> None:
    store = left.open()
    left.put(store, prompt(1, 50))
    left.close(store)
    damaged, one = left.file_of(segment_of(left, 10)), segment_of(left, 8)
    size = damaged.stat().st_size - 1
    os.truncate(damaged, size)
    entry = index_of(left)[one]
    twin = dataclasses.replace(entry.info, segment_id=TWIN)
    catalog = Catalog(FileSystem(), left.root / IDENTITY)
    catalog.change([dataclasses.replace(entry, info=twin).row])
    catalog.close()
    folder = left.root / IDENTITY / "segments" / TWIN[:2]
    folder.mkdir(exist_ok=True)
    shutil.copy(left.file_of(one), folder / f"{TWIN}.kv")
    assert removed(capsys, left) == {"damaged": (1, size), "without a place": (1, left.one)}
    assert not list(left.root.glob("*/quarantine/*"))
    check_three_prefixes(left.open())


def test_stores_of_other_formats(left: Workbench, capsys: Said) -> None:
    sizes = [path.stat().st_size for path in left.root.glob("*/segments/*/*")]
    for identity, own in ((OTHER_IDENTITY, FORMAT_VERSION - 1), ("e" * 32, FORMAT_VERSION + 1)):
        folder = left.root / identity
        shutil.copytree(left.root / IDENTITY, folder)
        fields = json.loads((folder / MARKER).read_text())
        (folder / MARKER).write_text(json.dumps({**fields, "format": own}))
    assert run(capsys, left, "rebuild") == [expected(segments=3)]
    assert removed(capsys, left, "--dry-run") == {"older format": (3, sum(sizes))}
    assert removed(capsys, left) == {"older format": (3, sum(sizes))}
    assert sorted(own.name for own in left.root.iterdir()) == [IDENTITY, "e" * 32]
    assert removed(capsys, left) == {} and len(left.files()) == 3


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "rebuild", "gc"])
def test_a_directory_that_cannot_be_locked_is_told_of(
    left: Workbench, capsys: Said, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    install(monkeypatch, Rule("EROFS", "open-write"))
    assert main([command, "--dir", str(left.root)]) == UNREACHABLE
    assert "cannot be opened" in capsys.readouterr().err
