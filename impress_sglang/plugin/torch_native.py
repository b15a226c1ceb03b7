"""Rectangular attention for SGLang's torch_native backend, as `patches/` has it for SGLang itself.

SGLang attends with as many queries as there are keys, and throws most of the results away: behind a
cached prefix a few new tokens take as long as all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from impress_sglang.plugin.rectangular import rectangular_attention


def attend_rectangularly(backend: Any) -> None:
    """Let a backend of SGLang's attend with the new queries only; nothing if it is another one."""
    if type(backend) is TorchNativeAttnBackend:
        original = backend._run_sdpa_forward_extend
        backend._run_sdpa_forward_extend = functools.partial(_extend, original)


def _extend(
    original: Callable[..., Tensor],
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    **named: Any,
) -> Tensor:
    """In place of `_run_sdpa_forward_extend`, whose arguments these are."""
    if encoder_lens is not None or named.get("is_cross_attn"):
        lengths = seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens
        where = query, output, k_cache, v_cache, req_to_token, req_pool_indices
        return original(*where, *lengths, **named)
    first = 0
    for row, num_keys, num_new in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
    ):
        slots, new = req_to_token[row, :num_keys], slice(first, first + num_new)
        output[new] = rectangular_attention(
            query[new],
            k_cache[slots],
            v_cache[slots],
            scaling=named.get("scaling"),
            causal=named.get("causal", False),
            window=named.get("sliding_window_size"),
        )
        first += num_new
    return output
