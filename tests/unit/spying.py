"""What a test looks at while the product does its work."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest


class Call(NamedTuple):
    """What a function was given by place, and what it gave."""

    args: tuple[Any, ...]
    result: Any


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Call]:
    """All calls of a function from now on; it does what it did."""
    calls: list[Call] = []
    original = getattr(owner, name)

    def noted(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        calls.append(Call(args, result))
        return result

    monkeypatch.setattr(owner, name, noted)
    return calls
