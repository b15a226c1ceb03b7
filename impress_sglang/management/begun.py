"""Work begun for orders that take several steps, between which requests are served."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
Work = TypeVar("Work")

MOST_BEGUN = 8


class Begun(Generic[Name, Work]):
    """Work by the names of orders: whoever has given an order continues it until it is done.

    Callers do not say that they give up. So the oldest work is forgotten when there is too much,
    and a caller who continues it after all begins again.
    """

    def __init__(self) -> None:
        """Begin with no work."""
        self._begun: dict[Name, Work] = {}

    def __len__(self) -> int:
        return len(self._begun)

    def get(self, name: Name) -> Work | None:
        """The work of this name; None if there is none, or it has ended or was forgotten."""
        return self._begun.get(name)

    def begin(self, name: Name, work: Work) -> Work:
        """Keep work under a name that has none; returns it."""
        assert name not in self._begun
        if len(self._begun) == MOST_BEGUN:
            del self._begun[next(iter(self._begun))]
        self._begun[name] = work
        return work

    def end(self, name: Name) -> None:
        """End the work of this name; no error if it was forgotten."""
        self._begun.pop(name, None)

    def clear(self) -> None:
        """Forget all work."""
        self._begun.clear()
