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
class _File:
    """One with unsynced writes: a descriptor of our own, whatever becomes of its name, what was
    synced of it, and where it was written since."""

    descriptor: int
    synced: bytes
    writes: list[tuple[int, int]]

    def lose(self, chance: random.Random | None) -> None:
        written = os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)
        content = bytearray(self.synced.ljust(len(written), b"\0"))
        for start, stop in self.writes if chance is not None else ():
            what = chance.choice(("kept", "lost", "zeroed", "torn"))
            kept = {"kept": stop, "torn": (start + stop) // 2}.get(what, start)
            content[start:kept] = written[start:kept]
            if what == "zeroed":
                content[start:stop] = bytes(stop - start)
        os.pwrite(self.descriptor, content, 0)
        if chance is None or chance.random() < 0.5:
            os.ftruncate(self.descriptor, len(self.synced))
        os.close(self.descriptor)


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
        self._files: dict[tuple[int, int], _File] = {}
        self._names: list[_Name] = []
        self._copies = 0

    def write(self, descriptor: int, offset: int, length: int) -> None:
        """Before a write."""
        with self._lock:
            key = _key(descriptor)
            if key not in self._files:
                file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
                synced = os.pread(file, os.fstat(file).st_size, 0)
                self._files[key] = _File(file, synced, [])
            self._files[key].writes.append((offset, offset + length))

    def synced(self, descriptor: int) -> None:
        with self._lock:
            if (file := self._files.pop(_key(descriptor), None)) is not None:
                os.close(file.descriptor)

    def created(self, path: Path) -> None:
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
        with self._lock:
            for name in self._names:
                name.directories.discard(path)
            self._names = [name for name in self._names if name.directories]

    def power_loss(self, chance: random.Random | None) -> None:
        """Undo all that was not synced, or what `chance` takes of it."""
        with self._lock:
            for file in self._files.values():
                file.lose(chance)
            kept = 0 if chance is None else chance.randint(0, len(self._names))
            for name in reversed(self._names[kept:]):
                with contextlib.suppress(FileNotFoundError):
                    name.undo()
            self._files, self._names = {}, []

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
