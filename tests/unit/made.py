"""Worlds that a test makes, as many as it wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Closable(Protocol):
    """Ends when its test does."""

    def close(self) -> None: ...


_T = TypeVar("_T", bound=Closable)


def made_in(folder: Path, kind: Callable[..., _T]) -> Iterator[Callable[..., _T]]:
    """What makes them, each in a folder of its own; the body of a fixture, which closes them."""
    count = 0
    with ExitStack() as stack:

        def make(**options: Any) -> _T:
            nonlocal count
            count += 1
            return stack.enter_context(closing(kind(folder / f"kv{count - 1}", **options)))

        yield make
