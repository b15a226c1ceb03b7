"""What of a directory survives a power loss: undoes what was never synced.

The model is POSIX's, and no kinder: bytes are durable after `fsync` of their file, a name (a new
file, a rename, a removal) after `fsync` of its directory, and nothing else is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path


@dataclasses.dataclass
class _Write:
    """An unsynced write, and what stood there before."""

    offset: int
    length: int
    before: bytes
    size_before: int


@dataclasses.dataclass
class _Name:
    """An unsynced change of a name, the directories that it waits for, and how to undo it."""

    directories: set[Path]
    undo: Callable[[], None]


class Journal:
    """Remembers what is not durable; `folder` takes copies, on the same file system."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lock = threading.RLock()
        self._writes: dict[tuple[int, int], list[_Write]] = {}
        # A descriptor of our own for each file with unsynced writes, whatever becomes of its name.
        self._files: dict[tuple[int, int], int] = {}
        self._names: list[_Name] = []
        self._copies = 0

    def write(self, descriptor: int, offset: int, length: int) -> None:
        """Before a write."""
        with self._lock:
            key = _key(descriptor)
            if key not in self._files:
                self._files[key] = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            file = self._files[key]
            before = os.pread(file, length, offset)
            size = os.fstat(file).st_size
            self._writes.setdefault(key, []).append(_Write(offset, length, before, size))

    def synced(self, descriptor: int) -> None:
        """A file was synced."""
        with self._lock:
            key = _key(descriptor)
            self._writes.pop(key, None)
            if (file := self._files.pop(key, None)) is not None:
                os.close(file)

    def created(self, path: Path) -> None:
        """A file was made."""
        self._note({path.parent}, lambda: path.unlink(missing_ok=True))

    @contextlib.contextmanager
    def rename(self, source: Path, target: Path) -> Iterator[None]:
        """Around a rename."""
        copy = self._copy_of(target)
        yield

        def undo() -> None:
            if target.exists():
                os.rename(target, source)
            if copy is not None:
                os.rename(copy, target)

        self._note({source.parent, target.parent}, undo)

    def unlink(self, path: Path) -> None:
        """Before a removal."""
        copy = self._copy_of(path)
        if copy is not None:
            self._note({path.parent}, lambda: os.rename(copy, path))

    def directory_synced(self, path: Path) -> None:
        """A directory was synced."""
        with self._lock:
            for name in self._names:
                name.directories.discard(path)
            self._names = [name for name in self._names if name.directories]

    def power_loss(self, chance: random.Random | None) -> None:
        """Undo all that was not synced, or what `chance` takes of it."""
        with self._lock:
            for key, writes in self._writes.items():
                _undo_writes(self._files[key], writes, chance)
                os.close(self._files[key])
            kept = 0 if chance is None else chance.randint(0, len(self._names))
            for name in reversed(self._names[kept:]):
                with contextlib.suppress(FileNotFoundError):
                    name.undo()
            self._writes, self._files, self._names = {}, {}, []

    def _note(self, directories: set[Path], undo: Callable[[], None]) -> None:
        with self._lock:
            self._names.append(_Name(directories, undo))

    def _copy_of(self, path: Path) -> Path | None:
        """A second name of a file that is about to lose its own."""
        with self._lock:
            self._copies += 1
            copy = self._folder / str(self._copies)
        try:
            os.link(path, copy, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return copy


def _key(descriptor: int) -> tuple[int, int]:
    stat = os.fstat(descriptor)
    return stat.st_dev, stat.st_ino


def _undo_writes(descriptor: int, writes: list[_Write], chance: random.Random | None) -> None:
    for write in reversed(writes):
        kept = 0
        fill = write.before.ljust(write.length, b"\0")
        if chance is not None:
            what = chance.choice(("kept", "lost", "zeroed", "torn"))
            kept = {"kept": write.length, "torn": write.length // 2}.get(what, 0)
            fill = bytes(write.length) if what == "zeroed" else fill
        if kept < write.length:
            os.pwrite(descriptor, fill[kept:], write.offset + kept)
    if chance is None or chance.random() < 0.5:
        os.ftruncate(descriptor, writes[0].size_before)
