"""What benchmarks with servers share around a run: signals, a work folder, a tokenizer."""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from bench.core.servers import BenchFailed

Tokenize = Callable[[str], list[int]]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_on_signals() -> None:
    """Let each signal that asks for an end raise `KeyboardInterrupt`."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


@contextlib.contextmanager
def work_folder(keep: Path | None, name: str) -> Iterator[Path]:
    """The folder `keep`, which stays, or a temporary one that begins with `name`.

    Raises:
        BenchFailed: `keep` is not an empty folder.
    """
    if keep is None:
        # Not the system's directory for temporary files, which may be in memory.
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=Path.cwd()) as folder:
            yield Path(folder)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise BenchFailed(f"--keep {keep} must be an empty folder, or not exist")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


def load_tokenize(model: Path) -> Tokenize:
    """Text to token ids, without special tokens, by a model's tokenizer.

    Raises:
        BenchFailed: the model has none.
    """
    from transformers import AutoTokenizer

    try:
        return tokenize_with(AutoTokenizer.from_pretrained(model))
    except (OSError, ValueError) as error:
        raise BenchFailed(f"no tokenizer in {model}: {error}") from error


def tokenize_with(tokenizer: Any) -> Tokenize:
    """Text to token ids, without special tokens, by this tokenizer."""

    def tokenize(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return tokenize


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Stop, once: what is asked for again does not disturb the clean-up."""
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt
