"""Compiles a loop when its module is imported, so that no request waits for it.

Where Numba is not installed a loop stays as it is written, which is right and slow.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(*signatures: str) -> Callable[[_F], _F]:
    """Compile for these types of arguments; the loop runs without the interpreter's lock.

    Numbers are int64 or float64, as Python's are: others would be converted slowly at each call.
    The result is kept beside the package, or else in the user's cache.
    """

    def decorate(loop: _F) -> _F:
        if importlib.util.find_spec("numba") is None:
            return loop
        numba = importlib.import_module("numba")
        try:
            found = numba.njit(list(signatures), nogil=True, cache=True)(loop)
        except RuntimeError as error:
            if "locator" not in str(error):
                raise
            logger.warning(
                "compiled loops cannot be kept, so that each start takes some ten seconds more; "
                "set NUMBA_CACHE_DIR to a folder that can be written to: %s",
                error,
            )
            found = numba.njit(list(signatures), nogil=True)(loop)
        return cast("_F", found)

    return decorate
