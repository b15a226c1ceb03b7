"""What forked servers find by a table, SGLang finds by walking through all modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from sglang.srt.plugins.hook_registry import _propagate_patch

from bench.core.zygote import BoundNames


def original() -> None: ...


def wrapped() -> None: ...


def table() -> Callable[..., int]:
    return BoundNames().replace


@pytest.mark.parametrize("find", [table, lambda: _propagate_patch], ids=["table", "walk"])
def test_all_names_of_a_function_are_bound_anew(
    find: Callable[[], Callable[..., int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of modules that came later, but of no name that means something else by now."""
    source, early, late, other = modules = [ModuleType(f"own_{number}") for number in range(4)]
    for own in (source, early, other):
        own.function = own.again = original  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, own.__name__, own)
    replace = find()
    late.function = late.again = original  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, late.__name__, late)
    other.function = print  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules[__name__], "original", None)

    assert replace(source.function, wrapped, source) == 5

    bound = [(vars(own)["function"], vars(own)["again"]) for own in modules]
    kept = bound[0][0]
    assert kept is not wrapped
    assert bound == [(kept, kept), (wrapped, wrapped), (wrapped, wrapped), (print, wrapped)]
