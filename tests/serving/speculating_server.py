"""A server that speculates on a CPU, where SGLang's usual kernels for that do not run.

Those that it has in Triton do, and nothing is pinned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.ops.speculative import spec_tree

import bench.core.server as bench_server

assert bench_server
# Such GPUs have Triton's.
spec_tree._is_xpu = True


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **how: Any) -> Any:
        return make(*args, **{**how, "pin_memory": False} if "pin_memory" in how else how)

    return made


for _name in ("tensor", "empty", "zeros", "full", "ones", "arange"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda own, *_, **__: own  # type: ignore[method-assign]
