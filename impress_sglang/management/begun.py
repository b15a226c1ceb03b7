"""What was begun for orders that go in several steps, between which requests are served."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
Work = TypeVar("Work")

MOST_BEGUN = 8


class Begun(Generic[Name, Work]):
    """Work by the names of orders: who has given one goes on with it until it is done.

    Nobody says that he goes away. So what was begun first is forgotten when there is too much, and
    who goes on with it after all begins anew.
    """

    def __init__(self) -> None:
        """Nothing is begun."""
        self._begun: dict[Name, Work] = {}

    def __len__(self) -> int:
        return len(self._begun)

    def get(self, name: Name) -> Work | None:
        """What was begun under a name and has neither ended nor been forgotten."""
        return self._begun.get(name)

    def begin(self, name: Name, work: Work) -> Work:
        """Keep work under a name that has none; returns it."""
        assert name not in self._begun
        if len(self._begun) == MOST_BEGUN:
            del self._begun[next(iter(self._begun))]
        self._begun[name] = work
        return work

    def end(self, name: Name) -> None:
        """It is done; no error if it was forgotten."""
        self._begun.pop(name, None)

    def clear(self) -> None:
        """All of it is void."""
        self._begun.clear()
