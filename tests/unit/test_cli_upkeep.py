"""The command line: files that nobody can use, and indexes that are only looked at."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from impress_sglang.cli import DONE
from impress_sglang.cli.main import main
from impress_sglang.storage.directory import MARKER
from impress_sglang.storage.segment import FORMAT_VERSION
from tests.unit.kv_factory import IDENTITY
from tests.unit.store_factory import (
    OTHER_IDENTITY,
    Workbench,
    check_rows,
    index_in,
    prompt,
    three_prefixes,
)

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


def test_stores_of_other_formats(left: Workbench, capsys: Said) -> None:
    sizes = [path.stat().st_size for path in left.root.glob("*/segments/*/*")]
    for identity, own in ((OTHER_IDENTITY, FORMAT_VERSION - 1), ("e" * 32, FORMAT_VERSION + 1)):
        folder = left.root / identity
        shutil.copytree(left.root / IDENTITY, folder)
        fields = json.loads((folder / MARKER).read_text())
        (folder / MARKER).write_text(json.dumps({**fields, "format": own}))
    assert sorted(removed(capsys, left)) == [(0, 0), (0, 0), (3, sum(sizes))]
    assert sorted(own.name for own in left.root.iterdir()) == [IDENTITY, "e" * 32]
