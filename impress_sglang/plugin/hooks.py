"""Hooks: what this package changes in SGLang, registered from one list and checked to be in place.

SGLang only logs a hook that it could not apply, and a later plugin may replace a hooked function.
So `check_in_place` looks for each hook of the list before anything is served.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from impress_sglang.errors import UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True)
class Hook:
    """A function of ours that hooks a function of SGLang.

    `target` is the dotted name of the latter; `kind` is SGLang's `before`, `after` or `around`.
    """

    target: str
    function: Callable[..., Any]
    kind: str


def register(hooks: Sequence[Hook]) -> None:
    """Register hooks with SGLang, which applies them after all plugins are activated."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def check_in_place(hooks: Sequence[Hook]) -> None:
    """Check that each hook is part of what SGLang would call.

    Raises:
        UnsupportedError: names the targets of hooks that are not.
    """
    missing = [hook.target for hook in hooks if not _is_in_place(hook)]
    if missing:
        raise UnsupportedError(
            f"hooks of IMPRESS are not in place at {', '.join(missing)}; check that no other "
            "plugin replaces them, and what SGLang logged when it loaded plugins"
        )


def _is_in_place(hook: Hook) -> bool:
    """Whether a wrapper of the target, at any depth, refers to the hook's function."""
    try:
        function = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return False
    held = (value for wrapper in _unwrap(function) for value in _closure(wrapper))
    return any(value is hook.function for value in held)


def _unwrap(function: Any) -> Iterator[Any]:
    # A class or static method has its function in an attribute.
    function = getattr(function, "__func__", function)
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _closure(function: Any) -> list[object]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
