"""What a run has around it: signals, steps, a work folder."""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).parents[2]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class BenchFailed(RuntimeError):
    """The benchmark cannot go on; the message says why, for the user."""


def interrupt_on_signals() -> None:
    """Let each signal that asks for an end raise `KeyboardInterrupt`."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Say how long something took, once it is done."""
    began = time.monotonic()
    yield
    print(f"{text}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def work_folder(keep: Path | None, parent: Path | None = None) -> Iterator[Path]:
    """The folder `keep`, which stays, or a temporary one in `parent` (build/ of the clone).

    Raises:
        BenchFailed: `keep` is not an empty folder.
    """
    if keep is None:
        # Not the system's directory for temporary files, which may be in memory.
        parent = parent or ROOT / "build"
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder:
            yield Path(folder)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise BenchFailed(f"--keep {keep} must be an empty folder, or not exist")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Stop, once: what is asked for again does not disturb the clean-up."""
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt
