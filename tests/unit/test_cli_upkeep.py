"""The command line: files that nobody can use, and indexes that are only looked at."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time

import pytest

from impress_sglang.cli import directory as cli_directory
from impress_sglang.cli.main import main
from impress_sglang.cli.outcome import DONE, UNREACHABLE
from impress_sglang.storage.directory import CATALOG, MARKER
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import FORMAT_VERSION
from tests.faults import FaultyFileSystem, Rule
from tests.faulty_database import cut_database
from tests.unit import store_factory
from tests.unit.kv_factory import IDENTITY
from tests.unit.store_factory import (
    OTHER_IDENTITY,
    Workbench,
    check_rows,
    check_three_prefixes,
    index_in,
    prompt,
    three_prefixes,
)

bench = store_factory.bench_of_one_shape

Said = pytest.CaptureFixture[str]


@pytest.fixture
def left(bench: Workbench) -> Workbench:
    """A directory that a server has left: 13 tokens, 27 behind them, and 8 of another tenant."""
    bench.close(three_prefixes(bench))
    return bench


def removed(said: Said, bench: Workbench) -> list[tuple[int, int]]:
    """Files and bytes of each store."""
    assert main(["gc", "--dir", str(bench.root), "--json"]) == DONE
    return [(row["files"], row["bytes"]) for row in json.loads(said.readouterr().out)]


def segment_of(bench: Workbench, num_tokens: int) -> str:
    index = index_in(bench.root / IDENTITY)
    (found,) = (name for name, own in index.items() if own.info.num_tokens == num_tokens)
    return found


def test_what_nobody_can_use_is_removed(
    left: Workbench, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = left.open()
    left.put(store, prompt(3, 9), ttl=1000.0)
    left.put(store, prompt(3, 20))
    left.put(store, prompt(4, 8))
    left.put(store, prompt(5, 10))
    left.close(store)
    assert removed(capsys, left) == [(0, 0)]
    index = index_in(left.root / IDENTITY)
    sizes = {own.info.num_tokens: own.file_bytes for own in index.values()}
    first = left.file_of(segment_of(left, 13))
    first.unlink()
    first.with_name(f"{first.stem[:2]}{'0' * 30}.kv.tmp").write_bytes(bytes(100))
    (left.root / IDENTITY / "quarantine" / f"{'9' * 32}.kv").write_bytes(bytes(200))
    damaged = left.file_of(segment_of(left, 10))
    damaged.write_bytes(damaged.read_bytes()[:300])
    later = time.time() + 1001
    monkeypatch.setattr("time.time", lambda: later)

    assert removed(capsys, left) == [(5, 100 + 200 + 300 + sizes[9] + sizes[27])]

    # What builds on what has expired.
    assert removed(capsys, left) == [(1, sizes[11])]
    assert len(left.files()) == 2 and removed(capsys, left) == [(0, 0)]
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
    for command in (["ls"], ["stat"], ["verify"]):
        assert main([*command, "--dir", str(left.root)]) == DONE
        assert contents() == before
    capsys.readouterr()
    assert removed(capsys, left) == [(0, 0)]
    check_three_prefixes(left.open())


def test_stores_of_other_formats(left: Workbench, capsys: Said) -> None:
    sizes = [path.stat().st_size for path in left.root.glob("*/segments/*/*")]
    for identity, own in ((OTHER_IDENTITY, FORMAT_VERSION - 1), ("e" * 32, FORMAT_VERSION + 1)):
        folder = left.root / identity
        shutil.copytree(left.root / IDENTITY, folder)
        fields = json.loads((folder / MARKER).read_text())
        (folder / MARKER).write_text(json.dumps({**fields, "format": own}))
    assert sorted(removed(capsys, left)) == [(0, 0), (0, 0), (3, sum(sizes))]
    assert sorted(own.name for own in left.root.iterdir()) == [IDENTITY, "e" * 32]


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc"])
def test_a_directory_that_cannot_be_locked_is_told_of(
    left: Workbench, capsys: Said, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def files() -> FileSystem:
        found = FaultyFileSystem()
        found.faults.add(Rule("EROFS", "open-write"))
        return found

    monkeypatch.setattr(cli_directory, "FileSystem", files)
    assert main([command, "--dir", str(left.root)]) == UNREACHABLE
    assert "cannot be opened" in capsys.readouterr().err
