"""The layer that fails on purpose: each fault happens, where it was asked for, and is counted."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from impress_sglang.storage.direct_io import AlignedMemory
from impress_sglang.storage.engines import BlockEngine
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


def read_file(files: FaultyFileSystem, path: Path, size: int = len(CONTENT)) -> bytes:
    target = bytearray(size)
    descriptor = files.open(path, os.O_RDONLY)
    try:
        files.read(descriptor, 0, memoryview(target))
    finally:
        files.close(descriptor)
    return bytes(target)


OPERATIONS: dict[str, Callable[[FaultyFileSystem, Path], object]] = {
    "open": lambda files, file: files.open(file, os.O_RDONLY),
    "open-write": lambda files, file: files.open(file, os.O_RDWR),
    "close": lambda files, file: files.close(files.open(file, os.O_RDONLY)),
    "read": read_file,
    "write": lambda files, file: write_file(files, file.with_name("new")),
    "sync": lambda files, file: files.sync(files.open(file, os.O_RDONLY)),
    "sync_directory": lambda files, file: files.sync_directory(file.parent),
    "rename": lambda files, file: files.rename(file, file.with_name("other")),
    "unlink": lambda files, file: files.unlink(file),
    "make_directory": lambda files, file: files.make_directory(file.with_name("folder")),
    "remove_directory": lambda files, file: files.remove_directory(file.with_name("none")),
    "list": lambda files, file: files.list(file.parent),
    "stat": lambda files, file: files.stat(file),
    "free_bytes": lambda files, file: files.free_bytes(file.parent),
    "engine": lambda files, file: files.engine("threads", 1),
    "database": lambda files, file: files.database(file.with_name("base")),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("error", ["EIO", "ESTALE"])
def test_each_operation_fails_with_each_error(
    files: FaultyFileSystem, file: Path, operation: str, error: str
) -> None:
    rule = Rule(error, operation)

    with files.faults.injected(rule), pytest.raises(OSError) as caught:
        OPERATIONS[operation](files, file)

    assert caught.value.errno == getattr(errno, error)
    assert rule.hits == 1
    assert read_file(files, file) == CONTENT, "what failed changed nothing"


def test_a_fault_that_never_happened_is_seen(files: FaultyFileSystem, file: Path) -> None:
    with (
        pytest.raises(AssertionError, match="never happened"),
        files.faults.injected(Rule("EIO", "rename")),
    ):
        read_file(files, file)
    files.faults.add(Rule("EIO", "write", name="mine"))
    with pytest.raises(AssertionError, match="mine"):
        files.faults.assert_hit()


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

    for operation in set(OPERATIONS) - {"close"}:
        with pytest.raises(Killed):
            OPERATIONS[operation](files, file)
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
    descriptor = files.open(root / "half", NEW)
    files.write(descriptor, 0, memoryview(b"a" * BLOCK))
    files.sync(descriptor)
    files.sync_directory(root.parent)
    files.write(descriptor, 0, memoryview(b"b" * 2 * BLOCK))

    files.power_loss()

    assert {path.name for path in root.iterdir()} == {"file"}
    assert file.read_bytes() == CONTENT


def test_power_loss_leaves_what_was_synced(files: FaultyFileSystem, file: Path) -> None:
    root = file.parent
    descriptor = write_file(files, root / "new.tmp")
    files.sync(descriptor)
    files.write(descriptor, 0, memoryview(b"late"))
    files.rename(root / "new.tmp", root / "new")
    files.unlink(file)
    files.sync_directory(root)
    files.rename(root / "new", file)

    files.power_loss()

    assert {path.name for path in root.iterdir()} == {"new"}
    assert (root / "new").read_bytes() == CONTENT


def test_a_rename_without_a_sync_of_its_file_leaves_no_bytes(
    files: FaultyFileSystem, root: Path
) -> None:
    """The mistake that power loss is for: the name is durable and the content is not."""
    files.close(write_file(files, root / "new.tmp"))
    files.rename(root / "new.tmp", root / "new")
    files.sync_directory(root)

    files.power_loss()

    assert (root / "new").read_bytes() == b""


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


# Engines


class Reads:
    """A file of blocks, an engine, and memory for reads of it."""

    def __init__(self, files: FaultyFileSystem, file: Path, engine: str, depth: int = 8) -> None:
        self.files, self.blocks = files, len(CONTENT) // BLOCK
        self.engine: BlockEngine = files.engine(engine, depth)
        self.descriptor = files.open(file, os.O_RDONLY)
        self.memory = AlignedMemory(2 * len(CONTENT))

    def start(self, *blocks: int, count: int = 1) -> dict[int, int]:
        places = np.array(blocks, np.int64) * BLOCK
        numbers = self.engine.start(
            np.full(len(blocks), self.descriptor),
            places,
            self.memory.address + places,
            np.full(len(blocks), count * BLOCK),
        )
        return dict(zip(numbers.tolist(), blocks, strict=True))

    def finish(self, at_least: int) -> dict[int, int]:
        numbers, results = self.engine.finish(at_least)
        return dict(zip(numbers.tolist(), results.tolist(), strict=True))

    def right(self, block: int) -> bool:
        place = slice(block * BLOCK, (block + 1) * BLOCK)
        return bytes(self.memory.view[place]) == CONTENT[place]


@pytest.fixture(params=["aio", "threads"])
def reads(request: pytest.FixtureRequest, files: FaultyFileSystem, file: Path) -> Reads:
    return Reads(files, file, request.param)


def test_short_and_flipped_blocks(reads: Reads) -> None:
    with reads.files.faults.injected(Rule("short", "block")):
        (number,) = reads.start(0, count=2)
        assert reads.finish(1) == {number: BLOCK}
        (number,) = reads.start(2)
        assert reads.finish(1) == {number: 0}
    with reads.files.faults.injected(Rule("flip", "block")):
        (number,) = reads.start(3)
        assert reads.finish(1) == {number: BLOCK}
    assert [reads.right(block) for block in range(4)] == [True, False, False, False]
    reads.engine.close()


def _wrong_bits(left: bytes, right: bytes) -> int:
    assert len(left) == len(right)
    return sum((a ^ b).bit_count() for a, b in zip(left, right, strict=True))
