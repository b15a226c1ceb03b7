"""Several models in one directory."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from impress_sglang.management.store import PrefixStore
from impress_sglang.management.writing import StoreOutcome
from impress_sglang.storage.directory import MARKER, StoreDirectory
from impress_sglang.storage.files import FileSystem
from tests.faults import FaultyFileSystem, Rule
from tests.unit import store_factory
from tests.unit.store_factory import OTHER_IDENTITY, Workbench, check_rows, gb, lengths, prompt

bench = store_factory.bench_of_one_shape


def old_model(
    bench: Workbench, identity: str, num_bytes: int, age: int, *, format_named: bool = True
) -> Path:
    """The store of a model that is not served; older formats are not named in markers."""
    directory = StoreDirectory(FileSystem(), bench.root, identity)
    segment = directory.segment_path("ab" + "0" * 30)
    segment.parent.mkdir()
    segment.write_bytes(bytes(num_bytes))
    directory.close()
    if not format_named:
        fields = json.loads((directory.path / MARKER).read_text())
        del fields["format"]
        (directory.path / MARKER).write_text(json.dumps(fields))
    os.utime(directory.path, (1_700_000_000 - age, 1_700_000_000 - age))
    return directory.path


def put_at_last(bench: Workbench, store: PrefixStore, tokens: tuple[int, ...]) -> None:
    """The first offer finds no room, but that stores of other models can go; a later one does."""
    assert bench.offer(store, tokens) is StoreOutcome.NO_SPACE
    for removing in list(store._quota._removing.values()):
        removing.exception()
    store.poll()
    bench.put(store, tokens)


def test_stores_of_older_formats_count_and_go_before_those_of_other_models(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where they were used later than these; one log line says so at the start."""
    caplog.set_level(logging.INFO)
    older = old_model(bench, "1" * 32, bench.one, age=10, format_named=False)
    other = old_model(bench, "2" * 32, bench.one, age=20)
    store = bench.open(ssd_gb=gb(3 * bench.one))
    said = [record.message for record in caplog.records if "older formats" in record.message]
    assert len(said) == 1 and said[0].startswith("1 stores")
    assert store.summary()["other_models_bytes"] == 2 * bench.one
    bench.put(store, prompt(1))

    put_at_last(bench, store, prompt(2))
    assert other.exists() and not older.exists()
    put_at_last(bench, store, prompt(3))
    assert not other.exists()
    assert store.stats.segments_evicted == 0


def test_as_many_models_go_as_are_in_the_way(bench: Workbench) -> None:
    folders = [old_model(bench, str(n) * 32, bench.one, age=10 * n) for n in (1, 2, 3)]
    store = bench.open(ssd_gb=gb(4 * bench.one))

    # 16 tokens are two chunks a column: almost two of the small segments.
    put_at_last(bench, store, prompt(5, 16))

    assert [folder.exists() for folder in folders] == [True, True, False]
    put_at_last(bench, store, prompt(6, 16))
    assert not any(folder.exists() for folder in folders)


def test_the_store_of_a_model_that_is_served_is_not_removed(bench: Workbench) -> None:
    other = bench.open(OTHER_IDENTITY)
    bench.put(other, prompt(1))
    store = bench.open(ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1))

    put_at_last(bench, store, prompt(2))

    check_rows(other, prompt(1))
    assert lengths(store, 1, 2) == [0, 8]
    bench.put(store, prompt(3))


def test_the_store_of_another_model_may_vanish(bench: Workbench) -> None:
    """Another server, or its user, has removed it; an offer must not fail for that."""
    folder = old_model(bench, "1" * 32, bench.one, age=10)
    store = bench.open(ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1))
    shutil.rmtree(folder)

    put_at_last(bench, store, prompt(2))

    assert lengths(store, 1, 2) == [8, 8]
    assert not folder.exists()


def test_the_store_of_another_model_that_cannot_be_removed_is_left_alone(bench: Workbench) -> None:
    """It belongs to another user, for example: the offer makes room elsewhere."""
    folder = old_model(bench, "1" * 32, bench.one, age=10)
    files = FaultyFileSystem()
    store = bench.open(ssd_gb=gb(2 * bench.one), files=files)
    bench.put(store, prompt(1))

    with files.faults.injected(Rule("EACCES", "unlink", f"{folder}/*")):
        put_at_last(bench, store, prompt(2))

    assert lengths(store, 1, 2) == [0, 8]
    assert folder.exists()
    assert store.summary()["other_models_bytes"] == bench.one
    assert store.health.state == "ok"
