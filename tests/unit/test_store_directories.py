"""Several models in one directory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from impress_sglang.errors import ConfigError, StoreInUseError
from impress_sglang.management.store import PrefixStore
from tests.unit import store_factory
from tests.unit.store_factory import OTHER_IDENTITY, Workbench, check_rows, gb, length, prompt

bench = store_factory.bench
store = store_factory.store


def test_two_stores_of_one_model_cannot_share_a_directory(
    bench: Workbench, store: PrefixStore
) -> None:
    with pytest.raises(StoreInUseError, match="--impress-ssd-dir"):
        bench.open()

    bench.close(store)
    bench.open()


def test_two_models_can_share_a_directory(bench: Workbench, store: PrefixStore) -> None:
    other = bench.open(OTHER_IDENTITY)
    bench.put(store, prompt(1))

    assert length(other, prompt(1)) == 0
    assert length(store, prompt(1)) == 8


def test_a_directory_that_cannot_be_written_is_a_config_error(bench: Workbench) -> None:
    bench.root.write_text("a file")

    with pytest.raises(ConfigError, match="--impress-ssd-dir"):
        bench.open()


def old_model(bench: Workbench, identity: str, num_bytes: int, age: int) -> Path:
    """The folder of a model that is not served."""
    folder = bench.root / identity
    (folder / "segments" / "ab").mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "segments" / "ab" / "abcd.kv").write_bytes(bytes(num_bytes))
    os.utime(folder, (1_700_000_000 - age, 1_700_000_000 - age))
    return folder


def test_other_models_count_in_the_quota_and_go_first(bench: Workbench) -> None:
    newer = old_model(bench, "1" * 32, bench.one, age=10)
    older = old_model(bench, "2" * 32, bench.one, age=20)
    store = bench.open(ssd_gb=gb(4 * bench.one))
    bench.put(store, prompt(1))
    bench.put(store, prompt(2))
    assert store.summary()["other_models_bytes"] == 2 * bench.one
    assert older.exists()

    bench.put(store, prompt(3))
    assert not older.exists() and newer.exists()
    assert store.summary()["other_models_bytes"] == bench.one
    bench.put(store, prompt(4))
    assert not newer.exists()
    assert store.stats.segments_evicted == 0
    bench.put(store, prompt(5))
    assert [length(store, prompt(n)) for n in range(1, 6)] == [0, 8, 8, 8, 8]


def test_the_folder_of_a_model_that_is_served_is_not_removed(bench: Workbench) -> None:
    other = bench.open(OTHER_IDENTITY)
    bench.put(other, prompt(1))
    store = bench.open(ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1))

    bench.put(store, prompt(2))

    check_rows(other, prompt(1))
    assert [length(store, prompt(n)) for n in (1, 2)] == [0, 8]


def test_the_folder_of_another_model_may_vanish(bench: Workbench) -> None:
    """Another server, or its user, has removed it; an offer must not fail for that."""
    folder = old_model(bench, "1" * 32, bench.one, age=10)
    store = bench.open(ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1))
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()

    bench.put(store, prompt(2))

    assert length(store, prompt(2)) == 8
    assert not folder.exists()


def test_the_folder_of_another_model_that_cannot_be_removed_is_left_alone(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It belongs to another user, for example: the offer makes room elsewhere."""
    folder = old_model(bench, "1" * 32, bench.one, age=10)
    store = bench.open(ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    bench.put(store, prompt(2))

    assert [length(store, prompt(n)) for n in (1, 2)] == [0, 8]
    assert folder.exists()
    assert store.summary()["other_models_bytes"] == bench.one
