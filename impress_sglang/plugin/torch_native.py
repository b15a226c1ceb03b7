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
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> Tensor:
    """In place of `_run_sdpa_forward_extend`, whose arguments these are."""
    if encoder_lens is not None or is_cross_attn:
        return original(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            encoder_lens,
            scaling,
            enable_gqa,
            causal,
            is_cross_attn,
            sliding_window_size,
        )
    first = 0
    lengths = zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
    )
    for row, num_keys, num_new in lengths:
        slots = req_to_token[row, :num_keys]
        output[first : first + num_new] = rectangular_attention(
            query[first : first + num_new],
            k_cache[slots],
            v_cache[slots],
            scaling=scaling,
            causal=causal,
            window=sliding_window_size,
        )
        first += num_new
    return output
