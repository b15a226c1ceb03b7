"""A server that speculates on a CPU, where SGLang's usual kernels for that do not run.

Those that it has in Triton do, but for attention, which would take seconds to interpret: drafts
must be chains, `--speculative-eagle-topk=1`. Nothing is pinned.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.ops.attention import decode_attention, extend_attention
from sglang.kernels.ops.speculative import spec_tree
from torch import Tensor

from impress_sglang.plugin.rectangular import rectangular_attention


def _extend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    ends: Tensor,
    prefix_ends: Tensor,
    slots: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Of the new tokens of each request, in order, over those before them and themselves."""
    places = zip(
        itertools.pairwise(ends.tolist()), itertools.pairwise(prefix_ends.tolist()), strict=True
    )
    for (start, stop), (first, last) in places:
        before = slots[first:last].long()
        out[start:stop] = rectangular_attention(
            queries[start:stop],
            torch.cat([key_pool[before], keys[start:stop]]),
            torch.cat([value_pool[before], values[start:stop]]),
            scaling=queries.shape[-1] ** -0.5,
            causal=True,
        )


def _decode(
    queries: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    out: Tensor,
    ends: Tensor,
    slots: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """Of one token of each request."""
    scaling = queries.shape[-1] ** -0.5
    for row, (first, last) in enumerate(itertools.pairwise(ends[: len(queries) + 1].tolist())):
        part = slots[first:last].long()
        out[row : row + 1] = rectangular_attention(
            queries[row : row + 1], key_pool[part], value_pool[part], scaling=scaling, causal=False
        )


extend_attention.extend_attention_fwd, decode_attention.decode_attention_fwd = _extend, _decode
# Such GPUs have Triton's.
spec_tree._is_xpu = True


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **how: Any) -> Any:
        return make(*args, **{**how, "pin_memory": False} if "pin_memory" in how else how)

    return made


for _name in ("tensor", "empty", "zeros", "full", "ones", "arange"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
