"""What a run has around it: signals, steps, a work folder, ports."""

from __future__ import annotations

import contextlib
import signal
import socket
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
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise BenchFailed(f"{keep} must be an empty folder, or not exist")
    yield keep.resolve()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Stop, once: what is asked for again does not disturb the clean-up."""
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


class ReservedPort:
    """A free port of 127.0.0.1 that nobody else is given until it is closed.

    A port that was only looked up can be gone when a server has imported enough to listen: to
    another server, or to the near end of any connection. This one is bound all the while. It never
    listens, and so a server that sets SO_REUSEADDR, as servers do, still gets it.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Let others have it."""
        self._socket.close()
