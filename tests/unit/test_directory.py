"""The folder of a store: its marker, and what is none of ours, which is never read or removed.

Several models in one directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from impress_sglang.errors import ConfigError
from impress_sglang.storage.directory import (
    CODING,
    MARKER,
    PINS,
    StoreDirectory,
    is_store,
    other_stores,
    quarantined_files,
    remove_store,
    segment_files,
)
from impress_sglang.storage.files import FileSystem
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.writing import StoreOutcome
from tests.faults import FaultyFileSystem, Rule
from tests.unit.kv_factory import IDENTITY
from tests.unit.store_factory import OTHER_IDENTITY, Workbench, check_rows, gb, lengths, prompt

FILES = FileSystem()
OTHER = "f" * 32
SEGMENT = "ab" + "0" * 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def make_store(
    root: Path, identity: str = OTHER, *, segments: tuple[str, ...] = (SEGMENT,), size: int = 100
) -> Path:
    """A store that nobody serves, with segments of so many bytes."""
    directory = StoreDirectory(FILES, root, identity)
    for name in segments:
        path = directory.segment_path(name)
        FILES.make_directory(path.parent)
        path.write_bytes(bytes(size))
    directory.close()
    return directory.path


def contents(path: Path) -> dict[str, bytes | str]:
    """All below a folder: bytes of files, targets of links."""
    found: dict[str, bytes | str] = {}
    for entry in sorted(path.rglob("*")):
        name = str(entry.relative_to(path))
        if entry.is_symlink():
            found[name] = os.readlink(entry)
        else:
            found[name] = entry.read_bytes() if entry.is_file() else "folder"
    return found


def test_names_of_namespaces_last_and_differ_between_stores(root: Path) -> None:
    names = []
    for identity in (IDENTITY, IDENTITY, OTHER):
        directory = StoreDirectory(FILES, root, identity)
        names.append([directory.namespace(text) for text in ("", "salt", "a" * 10_000)])
        directory.close()

    assert names[0] == names[1]
    assert len({name for of_one in names for name in of_one}) == 6
    assert all(len(name) == 32 for name in names[0])


BAD_MARKERS: dict[str, bytes | None] = {
    "none": None,
    "empty": b"",
    "torn": b'{"kind": "impress-sglang sto',
    "of others": b'{"kind": "photos", "key": "%s"}' % (b"ab" * 32),
    "no object": b'["impress-sglang store"]',
    "no text": b"\xff\xfe\x00",
    "without a key": b'{"kind": "impress-sglang store"}',
    "too long": b'%4096s{"kind": "impress-sglang store", "key": "%s"}' % (b"", b"ab" * 32),
    **{
        f"with {key!r} as key": b'{"kind": "impress-sglang store", "key": %s}' % key
        for key in (b'""', b'"no hex"', b'"%s"' % (b"ab" * 100), b"7")
    },
}


@pytest.mark.parametrize("marker", BAD_MARKERS)
def test_a_folder_without_a_good_marker_is_neither_served_nor_removed(
    root: Path, marker: str
) -> None:
    """Not even an old store of ours: who knows what is in it."""
    folder = make_store(root)
    content = BAD_MARKERS[marker]
    (folder / MARKER).unlink()
    if content is not None:
        (folder / MARKER).write_bytes(content)
    before = contents(root)

    assert not is_store(FILES, folder)
    assert other_stores(FILES, root / IDENTITY) == {}
    assert not remove_store(FILES, folder)
    with pytest.raises(ConfigError, match=r"store\.json"):
        StoreDirectory(FILES, root, OTHER)
    assert contents(root) == before


def test_a_store_whose_making_was_cut_off_is_made_again(root: Path) -> None:
    files = FaultyFileSystem()
    for rule in (
        Rule("ENOSPC", "write", "*store.json.tmp"),
        Rule("EIO", "sync", "*store.json.tmp"),
        Rule("EIO", "rename"),
        Rule("EIO", "make_directory", "*segments"),
    ):
        with files.faults.injected(rule), pytest.raises(ConfigError, match="--impress-ssd-dir"):
            StoreDirectory(files, root, IDENTITY)

    StoreDirectory(files, root, IDENTITY).close()
    assert is_store(FILES, root / IDENTITY)


FOREIGN = ("photos", "0" * 31, "0" * 33, "A" * 32, "g" * 32, f"{OTHER}.old", "lost+found")


@pytest.mark.parametrize("name", FOREIGN)
def test_only_a_folder_that_is_named_like_an_identity_is_a_store(root: Path, name: str) -> None:
    make_store(root).rename(root / name)

    assert not is_store(FILES, root / name)
    assert other_stores(FILES, root / IDENTITY) == {}


def test_other_stores_are_listed_latest_first_with_their_bytes(root: Path) -> None:
    for age, count in enumerate((1, 3, 2)):
        names = tuple(f"a{n}" + "0" * 30 for n in range(count))
        folder = make_store(root, str(age + 1) * 32, segments=names)
        os.utime(folder, (1_700_000_000 - age, 1_700_000_000 - age))
    make_store(root, IDENTITY)
    (root / "notes.txt").write_text("mine")
    (root / ("4" * 32)).mkdir()
    # It takes room until that store goes.
    aside = root / ("3" * 32) / "quarantine" / f"{SEGMENT}.kv"
    aside.parent.mkdir(exist_ok=True)
    aside.write_bytes(bytes(50))

    found = other_stores(FILES, root / IDENTITY)

    sizes = [(path.name[0], size) for path, size in found.items()]
    assert sizes == [("1", 100), ("2", 300), ("3", 250)]


STRANGERS = {
    "in the folder": "notes.txt",
    "in segments": "segments/README",
    "in a folder of segments": "segments/ab/x.kv",
    "in the folder of others": f"segments/cd/{SEGMENT}.kv",
    "with a longer name": f"segments/ab/{SEGMENT}.kv.bak",
    "in quarantine": "quarantine/report.txt",
    "a folder of segments that is none": f"segments/old/{SEGMENT}.kv",
}


def test_a_store_that_was_closed_is_not_made_anew(root: Path) -> None:
    """A probe that was given up while the disk hung may come back after that."""
    directory = StoreDirectory(FILES, root, IDENTITY)
    directory.close()
    shutil.rmtree(directory.path)
    with pytest.raises(FileNotFoundError, match="was closed"):
        directory.restore()
    StoreDirectory(FILES, root, IDENTITY).close()


@pytest.mark.parametrize("name", STRANGERS.values(), ids=STRANGERS)
def test_files_of_others_in_a_store_are_not_seen_and_stay(root: Path, name: str) -> None:
    folder = make_store(root)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")

    assert [name for name, _, _ in segment_files(FILES, folder)] == [SEGMENT]
    assert quarantined_files(FILES, folder) == []
    assert remove_store(FILES, folder)

    left = contents(folder)
    assert left[name] == b"mine" and f"segments/ab/{SEGMENT}.kv" not in left
    StoreDirectory(FILES, root, OTHER).close()
    assert is_store(FILES, folder), "it can be used again"


def test_a_store_is_removed_with_all_that_is_ours(root: Path) -> None:
    folder = make_store(root, segments=(SEGMENT, "cd" + "0" * 30))
    for name in ("journal", "journal.tmp", "probe", PINS, CODING):
        (folder / name).write_text("x")
    (folder / "quarantine" / f"{SEGMENT}.kv").write_text("x")
    (folder / "segments" / "cd" / f"cd{'1' * 30}.kv.tmp").write_text("x")

    assert remove_store(FILES, folder)

    assert not folder.exists()
    assert remove_store(FILES, folder), "it is gone, whoever removed it"


@pytest.mark.parametrize("operation", ["unlink", "remove_directory"])
def test_what_is_left_of_a_removal_that_was_cut_off_is_still_a_store(
    root: Path, operation: str
) -> None:
    """After each step: it can be removed to its end, or served again."""
    steps = 0
    while True:
        folder = make_store(root)
        files = FaultyFileSystem()
        files.faults.add(Rule("kill", operation, after=steps))
        try:
            remove_store(files, folder)
            break
        except BaseException as error:
            assert type(error).__name__ == "Killed"
        left = contents(root)
        StoreDirectory(FILES, root, OTHER).close()
        assert is_store(FILES, folder)
        if left:
            assert remove_store(FILES, folder) and not folder.exists()
        steps += 1
    assert steps > 2


@pytest.mark.parametrize("name", ["segments", "segments/ab", "quarantine", "journal"])
def test_links_inside_a_store_are_not_followed(root: Path, tmp_path: Path, name: str) -> None:
    folder = make_store(root)
    inside = folder / name
    elsewhere = tmp_path / "elsewhere"
    if inside.is_dir():
        shutil.copytree(inside, elsewhere)
        shutil.rmtree(inside)
        (elsewhere / f"{SEGMENT}.kv").write_text("mine")
    else:
        elsewhere.write_text("mine")
    inside.symlink_to(elsewhere)
    before = contents(elsewhere) if elsewhere.is_dir() else elsewhere.read_text()

    found = [name for name, _, _ in segment_files(FILES, folder)]
    assert found == ([] if "segments" in name else [SEGMENT])
    assert quarantined_files(FILES, folder) == []
    remove_store(FILES, folder)

    assert (contents(elsewhere) if elsewhere.is_dir() else elsewhere.read_text()) == before


@pytest.mark.parametrize("name", [".", MARKER, "lock"])
def test_a_store_that_is_a_link_or_has_one_as_marker_or_lock_is_refused(
    root: Path, tmp_path: Path, name: str
) -> None:
    folder, elsewhere = make_store(root), tmp_path / "elsewhere"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    before = contents(tmp_path)

    with pytest.raises(ConfigError, match="--impress-ssd-dir"):
        StoreDirectory(FILES, root, OTHER)
    found = other_stores(FILES, root / IDENTITY)
    assert not found or (name != "." and found == {folder: 100})
    assert name != "." or not is_store(FILES, folder)
    with contextlib.suppress(OSError):
        assert not remove_store(FILES, folder)
    assert contents(tmp_path) == before


def old_model(
    bench: Workbench, identity: str, num_bytes: int, age: int, *, format_named: bool = True
) -> Path:
    """The store of a model that is not served; older formats are not named in markers."""
    folder = make_store(bench.root, identity, size=num_bytes)
    if not format_named:
        fields = json.loads((folder / MARKER).read_text())
        del fields["format"]
        (folder / MARKER).write_text(json.dumps(fields))
    os.utime(folder, (1_700_000_000 - age, 1_700_000_000 - age))
    return folder


def put_at_last(bench: Workbench, store: PrefixStore, tokens: tuple[int, ...]) -> None:
    """The first offer finds no room, but that stores of other models can go; a later one does."""
    assert bench.offer(store, tokens) is StoreOutcome.NO_SPACE
    for removing in list(store.quota._removing.values()):
        removing.exception()
    store.poll()
    bench.put(store, tokens)


def test_stores_of_older_formats_count_and_go_before_those_of_other_models(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where they were used later than these, of which as many go as are in the way; one log
    line says so at the start."""
    caplog.set_level(logging.INFO)
    folders = [old_model(bench, "1" * 32, bench.one, age=10, format_named=False)]
    folders += [old_model(bench, str(n) * 32, bench.one, age=10 * n) for n in (2, 3, 4)]
    store = bench.open(ssd_gb=gb(5 * bench.one))
    said = [record.message for record in caplog.records if "older formats" in record.message]
    assert len(said) == 1 and said[0].startswith("1 stores")
    assert store.summary()["other_models_bytes"] == 4 * bench.one
    bench.put(store, prompt(1))

    put_at_last(bench, store, prompt(2))
    assert [folder.exists() for folder in folders] == [False, True, True, True]
    # 16 tokens are two chunks a column: almost two of the small segments.
    put_at_last(bench, store, prompt(5, 16))
    assert [folder.exists() for folder in folders] == [False, True, False, False]
    assert store.stats.segments_evicted == 0


def test_the_store_of_a_model_that_is_served_is_not_removed(bench: Workbench) -> None:
    other = bench.open(OTHER_IDENTITY)
    bench.put(other, prompt(1))
    store = bench.open(ssd_gb=gb(2 * bench.one))
    bench.put(store, prompt(1))

    put_at_last(bench, store, prompt(2))

    check_rows(other, prompt(1))
    assert lengths(store, 1, 2) == [0, 8]
    bench.put(store, prompt(3))


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
