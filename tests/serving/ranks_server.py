"""Ranks of a model on a CPU.

SGLang's groups of processes try NCCL if it is installed, also on a CPU; here they have gloo only.
"""

from __future__ import annotations

import inspect
from typing import Any

from sglang.srt.distributed import parallel_state

_ON_GPUS = ("use_pynccl", "use_pymscclpp", "use_custom_allreduce", "use_torch_symm_mem_all_reduce")
_init = parallel_state.GroupCoordinator.__init__
_signature = inspect.signature(_init)


def _init_with_gloo(self: Any, *arguments: Any, **keywords: Any) -> None:
    bound = _signature.bind(self, *arguments, **keywords)
    bound.apply_defaults()
    bound.arguments |= {name: False for name in _ON_GPUS if name in bound.arguments}
    _init(*bound.args, **bound.kwargs)


parallel_state.GroupCoordinator.__init__ = _init_with_gloo
