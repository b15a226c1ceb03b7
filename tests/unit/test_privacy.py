"""What is stored are prompts: who else may read them, and what of a request is on the disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from impress_sglang.storage.directory import require_writable
from impress_sglang.storage.files import FileSystem
from tests.unit import store_factory
from tests.unit.kv_factory import flip_byte
from tests.unit.store_factory import (
    OTHER_IDENTITY,
    Workbench,
    check_rows,
    index_of,
    length,
    look_up,
    lose,
    name_of,
    path_of,
    prompt,
)
from tests.unit.waiting import wait_until

bench = store_factory.bench_of_one_shape

SALT = "a-salt-that-nobody-must-see-b7d1"


@pytest.fixture
def no_umask() -> Iterator[None]:
    """Of a process that does not care: what it makes could be open to all."""
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(root: Path) -> list[str]:
    """What others can do something with, by name and mode."""
    found = []
    for path in (root, *root.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            found.append(f"{path.name} {mode:o}")
    return found


@pytest.mark.usefixtures("no_umask")
def test_nothing_that_a_store_makes_is_open_to_others(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "kv"
    bench = Workbench(root, store_factory.SHAPES["probe heads"])
    store = bench.open()
    bench.put(store, prompt(1), namespace=SALT)
    bench.put(store, prompt(2))
    lose(bench, store, name_of(store, prompt(2)))
    gate = bench.begin(store, prompt(3))
    wait_until(lambda: list(root.rglob("*.kv.tmp")))
    names = {path.name for path in root.rglob("*")}
    assert {"catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"} <= names
    assert list(root.glob("*/quarantine/*.kv"))

    assert open_to_others(tmp_path / "a") == []
    gate.opened.set()
    bench.close_all()
    assert open_to_others(tmp_path / "a") == []


@pytest.mark.usefixtures("no_umask")
def test_the_probes_are_not_open_to_others_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystem, "unlink", lambda self, path: None)

    require_writable(tmp_path / "a" / "b")
    FileSystem().supports_direct_io(tmp_path / "a")
    store = Workbench(tmp_path / "a", store_factory.SHAPES["probe heads"]).open()
    store._directory.check_writable()

    assert len(list((tmp_path / "a").rglob("*probe*"))) == 2
    assert open_to_others(tmp_path / "a") == []
    store.close()


def test_the_modes_of_what_is_there_already_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)

    FileSystem().make_directory(tmp_path / "mine" / "a" / "kv", parents=True)

    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("mine", "mine/a")]
    assert modes == [0o755, 0o700]


@pytest.mark.parametrize("operation", ["open", "make_directory", "list", "database"])
def test_links_are_not_followed(tmp_path: Path, operation: str) -> None:
    files, link = FileSystem(), tmp_path / "link"
    folder = operation in ("make_directory", "list")
    target = tmp_path / "target"
    if folder:
        target.mkdir()
        (target / "file").touch()
    else:
        target.write_text("mine")
    link.symlink_to(target)

    if operation == "list":
        assert files.list(link) == [] and files.list(target) == ["file"]
        return
    with pytest.raises(OSError):
        if operation == "open":
            files.open(link, os.O_RDONLY)
        elif operation == "database":
            files.database(link)
        else:
            files.make_directory(link)


def test_salts_are_nowhere_on_the_disk(bench: Workbench) -> None:
    """Nor can they be guessed from what is there, without the key, which is in the marker alone."""
    store = bench.open()
    bench.put(store, prompt(1), namespace=SALT)
    bench.put(store, prompt(1, 20), namespace=SALT)
    bench.put(store, prompt(2), namespace=SALT)
    lose(bench, store, name_of(store, prompt(2), namespace=SALT))
    store = bench.reopen(store)
    check_rows(store, prompt(1, 20), namespace=SALT)
    assert length(store, prompt(1, 20)) == length(store, prompt(1), namespace=SALT[:-1]) == 0

    everything = {path: path.read_bytes() for path in bench.root.rglob("*") if path.is_file()}
    assert {"catalog.sqlite", "catalog.sqlite-wal", "store.json"} <= {p.name for p in everything}
    assert sum(path.suffix == ".kv" for path in everything) == 3
    for path, content in everything.items():
        for form in (SALT.encode(), SALT.encode().hex().encode(), SALT.encode("utf-16-le")):
            assert form not in content, path
    name = store.namespace(SALT).encode()
    assert name in everything[path_of(bench, look_up(store, prompt(1), SALT))], "guards this test"
    key = store._directory._key.hex().encode()
    assert [path.name for path, content in everything.items() if key in content] == ["store.json"]


def test_a_name_of_a_namespace_is_of_no_use_in_another_store(bench: Workbench) -> None:
    """Who has seen one cannot tell whether the same salt is used elsewhere."""
    store, other = bench.open(), bench.open(OTHER_IDENTITY)

    assert store.namespace(SALT) != other.namespace(SALT)
    bench.put(store, prompt(1), namespace=SALT)
    assert length(store, prompt(1), namespace=store.namespace(SALT)) == 0


def test_the_key_of_a_store_outlives_its_index_and_its_segments(bench: Workbench) -> None:
    store = bench.open()
    bench.put(store, prompt(1), namespace=SALT)
    path = path_of(bench, look_up(store, prompt(1), SALT))
    bench.close(store)
    flip_byte(path, 50)
    next(bench.root.glob("*/catalog.sqlite")).unlink()

    store = bench.open()

    assert length(store, prompt(1), namespace=SALT) == 0
    bench.put(store, prompt(1), namespace=SALT)
    check_rows(bench.reopen(store), prompt(1), namespace=SALT)
    assert len(index_of(bench)) == 1
