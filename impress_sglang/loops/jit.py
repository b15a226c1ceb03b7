"""Compiles a loop when its module is imported, so that no request waits for it.

Where Numba is not installed, a loop runs as plain Python, which is correct but slow.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])


_NUMBA = importlib.import_module("numba") if importlib.util.find_spec("numba") else None
_FOLDER = Path(__file__).parent
_Type = Any


def tuple_type(kind: type[tuple[Any, ...]], fields: str, *more: _Type) -> _Type:
    """The type of named tuples with fields of these types; None where Numba is not installed."""
    return _NUMBA and _NUMBA.types.NamedTuple((*_types(fields), *more), kind)


def compiled(
    *signatures: str | tuple[str | _Type, ...], makes_arrays: bool = True
) -> Callable[[_F], _F]:
    """Compile for these types of arguments; the loop runs without the GIL.

    If one of the types has no name, a signature is a tuple with the type of each argument.
    Numbers are int64 or float64, as Python's are: others would be converted slowly at each call.
    The result is cached beside the package, or else in the user's cache, until any loop changes.

    A loop that makes no arrays and no slices of them may say so. Then it counts no references,
    which would take ten times as long as the rest where arrays are fields of tuples, and it is
    inlined in the loops that call it.
    """

    def decorate(loop: _F) -> _F:
        if _NUMBA is None or _NUMBA.config.DISABLE_JIT:
            return loop
        # Numba has no public name for the first of these.
        options = {} if makes_arrays else {"_nrt": False, "forceinline": True}
        files = [(path.name, path.stat()) for path in sorted(_FOLDER.glob("*.py"))]
        types = [
            signature
            if isinstance(signature, str)
            else tuple(_types(one)[0] if isinstance(one, str) else one for one in signature)
            for signature in signatures
        ]
        try:
            found = _NUMBA.njit(nogil=True, cache=True, **options)(loop)
            # Numba looks at the loop's own file only, but loops of others may be inlined in it.
            found._cache._cache_file._source_stamp = [
                (name, stat.st_mtime_ns, stat.st_size) for name, stat in files
            ]
            for one in types:
                found.compile(one)
            found.disable_compile()
        except Exception as error:  # a damaged cache raises many types
            logger.warning(
                "compiled loops cannot be kept, so that each start takes some ten seconds more; "
                "set NUMBA_CACHE_DIR to another folder that can be written to: %r",
                error,
            )
            found = _NUMBA.njit(types, nogil=True, **options)(loop)
        return cast("_F", found)

    return decorate


def _types(names: str) -> tuple[_Type, ...]:
    parse = importlib.import_module("numba.core.sigutils").normalize_signature
    found: tuple[_Type, ...] = parse(f"({names},)")[0]
    return found
