"""All disk access of the store in one class, and memory that disks write to directly.

So tests can use a disk that fails, and benchmarks a slow one. Methods raise the errors of the
operating system: `OSError`, and `EOFError` for a file that ends too early. If a file system does
not support O_DIRECT (tmpfs, some network file systems), the same calls use the page cache.

Symbolic links are not followed, because the stored data are prompts.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from impress_sglang.storage.engines import BlockEngine, make_engine, read_exactly
from impress_sglang.storage.layout import BLOCK_BYTES, round_up

_FILE_MODE = 0o600
_DIRECTORY_MODE = 0o700


class AlignedMemory:
    """Memory that starts at a page boundary, as O_DIRECT requires, and its address.

    `view` and `words` (uint64) are the same bytes; their number is a multiple of 8.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        # Causes fewer page faults when the memory is first filled.
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self.words = np.frombuffer(self._memory, np.uint64)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def __len__(self) -> int:
        return len(self._memory)


class AlignedBuffer:
    """Aligned memory that grows on demand; all views share it, so it can have only one user."""

    def __init__(self) -> None:
        self._memory = AlignedMemory(BLOCK_BYTES)

    def view(self, num_bytes: int) -> memoryview:
        """Return the first `num_bytes` bytes; earlier views stay valid."""
        size = len(self._memory)
        if num_bytes > size:
            self._memory = AlignedMemory(round_up(max(num_bytes, 2 * size), 1 << 20))
        return self._memory.view[:num_bytes]


class FileSystem:
    """File operations of the store.

    Stateless and thread-safe. Descriptors are ints as from `os.open`.
    """

    def open(self, path: Path, flags: int) -> int:
        """Open a file and return its descriptor; `flags` as for `os.open`, new files are 0600."""
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            # Headers are read exactly: reading ahead by the kernel is of no use.
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor

    @contextlib.contextmanager
    def opened(self, path: Path, flags: int) -> Iterator[int]:
        """Open a file as `open`, and close it after the block."""
        descriptor = self.open(path, flags)
        try:
            yield descriptor
        finally:
            self.close(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, offset: int, target: memoryview) -> None:
        """Fill `target` from a file; `EOFError` if the file ends before it is full."""
        read_exactly(descriptor, offset, target)

    def write(self, descriptor: int, offset: int, source: memoryview) -> None:
        """Write all of `source` to a file."""
        done = 0
        while done < len(source):
            done += os.pwritev(descriptor, [source[done:]], offset + done)

    def set_mtime(self, descriptor: int, written_ns: int) -> None:
        """Set the modification time of a file, in nanoseconds as of `time.time_ns`."""
        os.utime(descriptor, ns=(written_ns, written_ns))

    def sync(self, descriptor: int) -> None:
        """Make the content of a file durable."""
        os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Make renames and removals in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file atomically; replaces a file named `target`."""
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file; no error if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def make_directory(self, path: Path, *, parents: bool = False) -> None:
        """Make a directory of mode 0700 and make it durable; no error if it exists.

        With `parents`, also make its parents, which are not made durable.
        """
        try:
            os.mkdir(path, _DIRECTORY_MODE)
            if not parents:
                self.sync_directory(path.parent)
        except FileNotFoundError:
            if not parents:
                raise
            self.make_directory(path.parent, parents=True)
            self.make_directory(path)
        except FileExistsError:
            if not stat.S_ISDIR(self.stat(path).st_mode):
                raise

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def list(self, path: Path) -> list[str]:
        """List the names in a directory, sorted; empty if it does not exist."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            return sorted(os.listdir(descriptor))
        finally:
            os.close(descriptor)

    def stat(self, path: Path | str) -> os.stat_result:
        """Return the status of a file, directory, or symbolic link itself."""
        return os.stat(path, follow_symlinks=False)

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that an unprivileged process may still write to a file system."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def supports_direct_io(self, path: Path) -> bool:
        """Whether files in a directory can be opened with O_DIRECT."""
        probe = path / f".direct-{os.getpid()}"
        try:
            self.close(self.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT))
        except OSError:
            return False
        finally:
            self.unlink(probe)
        return True

    def engine(self, name: str, depth: int) -> BlockEngine:
        """Make the engine that reads blocks of open segments; see `engines.make_engine`."""
        return make_engine(name, depth)


_installed = FileSystem()


def install(files: FileSystem) -> None:
    """Set the file system of stores that this process opens from now on: benchmarks and tests
    install one in the processes of a server that is slow or fails on purpose."""
    global _installed
    _installed = files


def installed() -> FileSystem:
    """Return the file system of stores that are opened without one."""
    return _installed
