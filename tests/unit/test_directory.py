"""The folder of a store: its marker, and what is none of ours, which is never read or removed.

Several models in one directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from impress_sglang.errors import ConfigError
from impress_sglang.storage import directory as directory_module
from impress_sglang.storage.directory import MARKER, StoreDirectory, is_store, remove_store
from impress_sglang.storage.files import FileSystem
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.writing import StoreOutcome
from tests.faults import FaultyFileSystem, Killed, Rule
from tests.unit.kv_factory import IDENTITY
from tests.unit.store_factory import OTHER_IDENTITY, Workbench, check_rows, gb, lengths, prompt

FILES = FileSystem()
SEGMENT = "ab" + "0" * 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def make_store(
    root: Path,
    identity: str = OTHER_IDENTITY,
    *,
    segments: Sequence[str] = (SEGMENT,),
    size: int = 100,
    age: int = 0,
) -> Path:
    """A store that nobody serves, with segments of so many bytes, last used `age` seconds ago."""
    directory = StoreDirectory(FILES, root, identity)
    for name in segments:
        path = directory.segment_path(name)
        FILES.make_directory(path.parent)
        path.write_bytes(bytes(size))
    directory.close()
    os.utime(directory.path, (1_700_000_000 - age, 1_700_000_000 - age))
    return directory.path


def contents(path: Path) -> dict[str, bytes | str]:
    """A path and all below it: bytes of files, targets of links."""
    found: dict[str, bytes | str] = {}
    for entry in (path, *sorted(path.rglob("*"))):
        name = str(entry.relative_to(path))
        if entry.is_symlink():
            found[name] = os.readlink(entry)
        else:
            found[name] = entry.read_bytes() if entry.is_file() else "folder"
    return found


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
    assert directory_module.other_stores(FILES, root / IDENTITY) == {}
    assert not remove_store(FILES, folder)
    with pytest.raises(ConfigError, match=r"store\.json"):
        StoreDirectory(FILES, root, OTHER_IDENTITY)
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


FOREIGN = ("photos", "0" * 31, "0" * 33, "A" * 32, "g" * 32, f"{OTHER_IDENTITY}.old", "lost+found")


def test_only_a_folder_that_is_named_like_an_identity_is_a_store(root: Path) -> None:
    for name in FOREIGN:
        make_store(root).rename(root / name)
        assert not is_store(FILES, root / name)
    assert directory_module.other_stores(FILES, root / IDENTITY) == {}


def test_other_stores_are_listed_latest_first_with_their_bytes(root: Path) -> None:
    for age, count in enumerate((1, 3, 2)):
        names = [f"a{n}" + "0" * 30 for n in range(count)]
        make_store(root, str(age + 1) * 32, segments=names, age=age)
    make_store(root, IDENTITY)
    (root / "notes.txt").write_text("mine")
    (root / ("4" * 32)).mkdir()
    # It takes room until that store goes.
    aside = root / ("3" * 32) / "quarantine" / f"{SEGMENT}.kv"
    aside.parent.mkdir(exist_ok=True)
    aside.write_bytes(bytes(50))

    found = directory_module.other_stores(FILES, root / IDENTITY)

    sizes = [(path.name[0], size) for path, size in found.items()]
    assert sizes == [("1", 100), ("2", 300), ("3", 250)]


def test_a_store_that_was_closed_is_not_made_anew(root: Path) -> None:
    """A probe that was given up while the disk hung may come back after that."""
    directory = StoreDirectory(FILES, root, IDENTITY)
    directory.close()
    shutil.rmtree(directory.path)
    with pytest.raises(FileNotFoundError, match="was closed"):
        directory.restore()
    StoreDirectory(FILES, root, IDENTITY).close()


STRANGERS = (
    "notes.txt",
    "segments/README",
    "segments/ab/x.kv",
    f"segments/cd/{SEGMENT}.kv",
    f"segments/ab/{SEGMENT}.kv.bak",
    "quarantine/report.txt",
    f"segments/old/{SEGMENT}.kv",
)


@pytest.mark.parametrize("name", STRANGERS)
def test_files_of_others_in_a_store_are_not_seen_and_stay(root: Path, name: str) -> None:
    folder = make_store(root)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")

    assert [name for name, _, _ in directory_module.segment_files(FILES, folder)] == [SEGMENT]
    assert directory_module.quarantined_files(FILES, folder) == []
    assert remove_store(FILES, folder)

    left = contents(folder)
    assert left[name] == b"mine" and f"segments/ab/{SEGMENT}.kv" not in left
    StoreDirectory(FILES, root, OTHER_IDENTITY).close()
    assert is_store(FILES, folder), "it can be used again"


def test_a_store_is_removed_with_all_that_is_ours(root: Path) -> None:
    folder = make_store(root, segments=(SEGMENT, "cd" + "0" * 30))
    for name in ("journal", "journal.tmp", "probe", directory_module.PINS, directory_module.CODING):
        (folder / name).write_text("x")
    (folder / "quarantine" / f"{SEGMENT}.kv").write_text("x")
    (folder / "segments" / "cd" / f"cd{'1' * 30}.kv.tmp").write_text("x")

    assert remove_store(FILES, folder)

    assert not folder.exists()
    assert remove_store(FILES, folder), "it is gone, whoever removed it"


def test_what_is_left_of_a_removal_that_was_cut_off_is_still_a_store(root: Path) -> None:
    """After each step: it can be removed to its end, or served again."""
    steps = 0
    while True:
        folder = make_store(root)
        files = FaultyFileSystem()
        files.faults.add(Rule("kill", "unlink|remove_directory", after=steps))
        try:
            remove_store(files, folder)
            break
        except Killed:
            left = any(root.iterdir())
        StoreDirectory(FILES, root, OTHER_IDENTITY).close()
        assert is_store(FILES, folder)
        if left:
            assert remove_store(FILES, folder) and not folder.exists()
        steps += 1
    assert steps > 6


@pytest.mark.parametrize("name", ["segments", "segments/ab", "quarantine", "journal"])
def test_links_inside_a_store_are_not_followed(root: Path, tmp_path: Path, name: str) -> None:
    folder = make_store(root)
    inside = folder / name
    elsewhere = tmp_path / "elsewhere"
    if inside.is_dir():
        inside.rename(elsewhere)
        (elsewhere / f"{SEGMENT}.kv").write_text("mine")
    else:
        elsewhere.write_text("mine")
    inside.symlink_to(elsewhere)
    before = contents(elsewhere)

    found = [name for name, _, _ in directory_module.segment_files(FILES, folder)]
    assert found == ([] if "segments" in name else [SEGMENT])
    assert directory_module.quarantined_files(FILES, folder) == []
    remove_store(FILES, folder)

    assert contents(elsewhere) == before


@pytest.mark.parametrize("name", [".", MARKER, "lock"])
def test_a_store_that_is_a_link_or_has_one_as_marker_or_lock_is_refused(
    root: Path, tmp_path: Path, name: str
) -> None:
    folder, elsewhere = make_store(root), tmp_path / "elsewhere"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    before = contents(tmp_path)

    with pytest.raises(ConfigError, match="--impress-ssd-dir"):
        StoreDirectory(FILES, root, OTHER_IDENTITY)
    found = directory_module.other_stores(FILES, root / IDENTITY)
    assert not found or (name != "." and found == {folder: 100})
    assert name != "." or not is_store(FILES, folder)
    with contextlib.suppress(OSError):
        assert not remove_store(FILES, folder)
    assert contents(tmp_path) == before


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
    ages = {str(n) * 32: 10 * n for n in (1, 2, 3, 4)}
    folders = [make_store(bench.root, n, size=bench.one, age=age) for n, age in ages.items()]
    marker = folders[0] / MARKER
    fields = json.loads(marker.read_text())
    # As older formats wrote it.
    del fields["format"]
    marker.write_text(json.dumps(fields))
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


@pytest.mark.parametrize("why", ["it is served", "it is another user's"])
def test_a_store_of_another_model_that_cannot_be_removed_is_left_alone(
    bench: Workbench, why: str
) -> None:
    """The offer makes room elsewhere."""
    files, other = FaultyFileSystem(), bench.open(OTHER_IDENTITY)
    bench.put(other, prompt(1))
    if why != "it is served":
        bench.close(other)
        files.faults.add(Rule("EACCES", "unlink", f"*/{OTHER_IDENTITY}/*"))
    store = bench.open(ssd_gb=gb(2 * bench.one), files=files)
    bench.put(store, prompt(1))

    put_at_last(bench, store, prompt(2))

    assert lengths(store, 1, 2) == [0, 8]
    assert store.summary()["other_models_bytes"] == bench.one
    assert store.health.state == "ok"
    bench.put(store, prompt(3))
    check_rows(other if why == "it is served" else bench.open(OTHER_IDENTITY), prompt(1))
