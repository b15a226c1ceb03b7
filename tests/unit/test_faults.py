"""A simulated loss of power takes what was not synced, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults import Faults, FaultyFileSystem

CONTENT = bytes(range(256)) * 64
NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY


@pytest.fixture
def faults() -> Faults:
    return Faults(seed=7)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def files(faults: Faults, root: Path) -> FaultyFileSystem:
    return FaultyFileSystem(faults, journal=root.with_name("journal"))


def write_file(files: FaultyFileSystem, path: Path, content: bytes = CONTENT) -> int:
    """A new file, neither synced nor closed."""
    descriptor = files.open(path, NEW)
    files.write(descriptor, 0, memoryview(content))
    return descriptor


@pytest.fixture
def file(files: FaultyFileSystem, root: Path) -> Path:
    path = root / "file"
    descriptor = write_file(files, path)
    files.sync(descriptor)
    files.close(descriptor)
    files.sync_directory(root)
    return path


def test_power_loss_takes_what_was_not_synced(files: FaultyFileSystem, file: Path) -> None:
    root = file.parent
    files.rename(file, root / "renamed")
    files.unlink(root / "renamed")
    write_file(files, root / "new")
    files.sync(write_file(files, root / "half"))
    files.sync_directory(root.parent)

    files.power_loss()

    assert {path.name for path in root.iterdir()} == {"file"}
    assert file.read_bytes() == CONTENT


def test_power_loss_leaves_what_was_synced(files: FaultyFileSystem, file: Path) -> None:
    """The bytes of a file with the file, and its name with the folder."""
    root = file.parent
    descriptor = write_file(files, root / "new.tmp")
    files.sync(descriptor)
    files.write(descriptor, 0, memoryview(b"late"))
    files.rename(root / "new.tmp", root / "new")
    files.close(write_file(files, root / "empty"))
    files.unlink(file)
    files.sync_directory(root)
    files.rename(root / "new", file)

    files.power_loss()

    found = {path.name: path.read_bytes() for path in root.iterdir()}
    assert found == {"new": CONTENT, "empty": b""}
