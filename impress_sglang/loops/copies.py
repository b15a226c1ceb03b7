"""Copies memory between addresses, compiled: on a CPU what kernels do on a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

from impress_sglang.loops.jit import compiled
from impress_sglang.loops.types import Indices

if importlib.util.find_spec("numba"):
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic
    def _copy(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
        """Copy bytes from one address to another."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to, of = (builder.inttoptr(argument, cgutils.voidptr_t) for argument in arguments[:2])
            cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(i64, i64, i64), generate

else:

    def _copy(target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(int(target), int(source), int(num_bytes))


@compiled("(int64[::1], int64[::1], int64)")
def copy_pages(sources: Indices, targets: Indices, page_bytes: int) -> None:
    """Copy pages between addresses, int64 [n] each; no page that is read is written."""
    first, begin, size = 0, 0, 0
    for place in range(len(sources)):
        # Neighbours that stay neighbours are copied at once.
        if sources[place] != first + size or targets[place] != begin + size:
            _copy(begin, first, size)
            first, begin, size = sources[place], targets[place], 0
        size += page_bytes
    _copy(begin, first, size)
