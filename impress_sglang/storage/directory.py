"""The directory of the SSD store: one folder per model identity, each with a lock.

    <ssd dir>/<identity>/{lock, catalog.sqlite, segments/<2 hex digits>/<segment>.kv}

The quota is for the whole directory. Folders of other models that nobody serves are removed, oldest
first, before segments of the model being served.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path

from impress_sglang.errors import ConfigError, StoreInUseError

logger = logging.getLogger(__name__)


def claim_directory(root: Path, identity: str) -> tuple[Path, int]:
    """Create the folder of a model and lock it; returns it and the descriptor that holds the lock.

    Raises:
        ConfigError: the directory cannot be written.
        StoreInUseError: another process has the lock.
    """
    directory = root / identity
    try:
        (directory / "segments").mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise ConfigError(f"--impress-ssd-dir {root} cannot be written: {error}") from error
    if not _try_lock(descriptor):
        os.close(descriptor)
        raise StoreInUseError(
            f"--impress-ssd-dir {root} already serves this model in another process; "
            "give each server its own directory"
        )
    return directory, descriptor


def require_writable(root: Path) -> None:
    """Check early that the store can be created.

    Raises:
        ConfigError: the directory cannot be written.
    """
    probe = root / f".probe-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--impress-ssd-dir {root} cannot be written: {error}") from error


def free_bytes(directory: Path) -> int:
    """Bytes that an unprivileged process may still write to the file system."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


class OtherModels:
    """Folders of other models under the same directory, and the bytes they take."""

    def __init__(self, root: Path, own: Path) -> None:
        others = [path for path in root.iterdir() if path != own and (path / "segments").is_dir()]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        self._sizes = {path: _tree_bytes(path) for path in others}

    @property
    def used_bytes(self) -> int:
        """Bytes of all other models' files, as of the start of this process."""
        return sum(self._sizes.values())

    def remove_oldest(self) -> int:
        """Remove the least recently opened folder that no process serves; returns its bytes."""
        for path in reversed(self._sizes):
            try:
                if not path.exists() or _remove_unlocked(path):
                    return self._sizes.pop(path)
            except OSError as error:
                logger.warning("the store of another model cannot be removed: %s", error)
        return 0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unlocked(path: Path) -> bool:
    descriptor = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        if not _try_lock(descriptor):
            return False
        logger.info("removing the store of another model to make room: %s", path.name)
        shutil.rmtree(path)
        return True
    finally:
        os.close(descriptor)


def _tree_bytes(path: Path) -> int:
    return sum(_file_bytes(file) for file in path.glob("segments/*/*"))


def _file_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        # The server of that model has just removed it.
        return 0
