"""The layer that fails on purpose: each fault happens, where it was asked for, and is counted."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from impress_sglang.storage.direct_io import AlignedMemory
from tests.fault_control import ControlledFaults, FaultControl
from tests.faults import Faults, FaultyFileSystem, Killed, Rule

BLOCK = 4096
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


def read_file(files: FaultyFileSystem, path: Path) -> bytes:
    target = bytearray(len(CONTENT))
    descriptor = files.open(path, os.O_RDONLY)
    try:
        files.read(descriptor, 0, memoryview(target))
    finally:
        files.close(descriptor)
    return bytes(target)


def test_a_fault_that_never_happened_is_seen(files: FaultyFileSystem, file: Path) -> None:
    with (
        pytest.raises(AssertionError, match="never happened"),
        files.faults.injected(Rule("EIO", "rename")),
    ):
        read_file(files, file)


def test_short_reads_and_flipped_bits(files: FaultyFileSystem, file: Path) -> None:
    with files.faults.injected(Rule("short", "read")), pytest.raises(EOFError):
        read_file(files, file)
    with files.faults.injected(Rule("flip", "read")):
        assert _wrong_bits(read_file(files, file), CONTENT) == 1
    assert read_file(files, file) == CONTENT, "only the memory was wrong"


@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
@pytest.mark.parametrize("how", ["torn", "torn-silent", "torn-kill"])
def test_torn_writes(files: FaultyFileSystem, root: Path, how: str, direct: int) -> None:
    expected = {"torn": OSError, "torn-kill": Killed}
    memory = mmap.mmap(-1, len(CONTENT))
    memory[:] = CONTENT

    with files.faults.injected(Rule(how, "write")):
        descriptor = files.open(root / "torn", NEW | direct)
        with pytest.raises(expected[how]) if how in expected else contextlib.nullcontext():
            files.write(descriptor, 0, memoryview(memory))

    assert (root / "torn").read_bytes() == CONTENT[: len(CONTENT) // 2]


def test_a_killed_process_does_nothing_more(files: FaultyFileSystem, file: Path) -> None:
    descriptor = files.open(file, os.O_RDONLY)
    with files.faults.injected(Rule("kill", "rename")), pytest.raises(Killed):
        files.rename(file, file.with_name("other"))

    for operation in (files.list, files.stat, files.unlink, files.database, files.sync_directory):
        with pytest.raises(Killed):
            operation(file)
    with pytest.raises(Killed):
        read_file(files, file)
    with pytest.raises(Killed):
        write_file(files, file.with_name("new"))
    with pytest.raises(OSError):
        os.fstat(descriptor)
    other = os.open(file, os.O_RDONLY)
    assert other == descriptor
    files.close(descriptor)
    os.fstat(other)
    os.close(other)
    assert read_file(FaultyFileSystem(), file) == CONTENT


def test_rules_of_a_control_file(root: Path, file: Path) -> None:
    control = FaultControl(root / "control")
    files = FaultyFileSystem(ControlledFaults(control.path))
    bad, hung = Rule("EIO", "stat", count=2), Rule("hang", "list", name="hung")
    assert files.stat(file).st_size
    control.set(bad, hung)
    with pytest.raises(OSError):
        files.stat(file)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (files.list(root), done.set()))
    thread.start()
    assert not done.wait(0.05)

    control.set(hung, bad)
    with pytest.raises(OSError):
        files.stat(file)
    assert files.stat(file).st_size, "its count goes on"
    assert not done.wait(0.05), "it still hangs"
    control.set()
    assert done.wait(5)
    thread.join()
    assert control.hits() == {bad.name: 2, "hung": 1}
    other = FaultyFileSystem(ControlledFaults(control.path))
    assert other.stat(file).st_size, "nobody told it of rules that are gone"


# Power loss


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


def test_power_loss_may_keep_some(tmp_path: Path) -> None:
    seen: set[bytes | None] = set()
    for seed in range(60):
        root = tmp_path / str(seed)
        root.mkdir()
        files = FaultyFileSystem(journal=tmp_path / "journal" / str(seed))
        descriptor = write_file(files, root / "file", b"")
        files.write(descriptor, 0, memoryview(b"a" * 8))
        files.power_loss(everything=False, seed=seed)
        seen.add((root / "file").read_bytes() if (root / "file").exists() else None)

    assert seen == {None, b"", b"a" * 8, bytes(8), b"aaaa" + bytes(4)}


@pytest.mark.parametrize("database", ["kept", "lost"])
def test_power_loss_of_a_database(files: FaultyFileSystem, root: Path, database: str) -> None:
    base = files.database(root / "base")
    base.execute("PRAGMA journal_mode = WAL")
    base.execute("PRAGMA synchronous = NORMAL")
    base.execute("CREATE TABLE t (x)")
    base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with base:
        base.execute("INSERT INTO t VALUES (1)")

    files.power_loss(database=database)

    again = FaultyFileSystem().database(root / "base")
    assert again.execute("SELECT x FROM t").fetchall() == [(1,)] * (database == "kept")
    again.close()
    with pytest.raises(Killed):
        base.execute("SELECT 1")


@pytest.mark.parametrize("engine", ["aio", "threads"])
def test_short_and_flipped_blocks(files: FaultyFileSystem, file: Path, engine: str) -> None:
    reads, memory = files.engine(engine, 8), AlignedMemory(len(CONTENT))
    descriptor = files.open(file, os.O_RDONLY)

    def read(block: int, count: int = 1) -> int:
        """Bytes that the engine says it has read."""
        place, size = np.array([block * BLOCK]), np.array([count * BLOCK])
        reads.start(np.array([descriptor]), place, memory.address + place, size)
        _, results = reads.finish(1)
        return int(results[0])

    with files.faults.injected(Rule("short", "block")):
        assert read(0, 2) == BLOCK and read(2) == 0
    with files.faults.injected(Rule("flip", "block")):
        assert read(3) == BLOCK
    wrong = [
        _wrong_bits(bytes(memory.view[at : at + BLOCK]), CONTENT[at : at + BLOCK])
        for at in range(0, len(CONTENT), BLOCK)
    ]
    assert wrong[0] == 0 and wrong[1] > 1 < wrong[2] and wrong[3] == 1
    reads.close()


def _wrong_bits(left: bytes, right: bytes) -> int:
    assert len(left) == len(right)
    return sum((a ^ b).bit_count() for a, b in zip(left, right, strict=True))
