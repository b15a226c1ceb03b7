"""Attention of n new tokens over kv keys in O(n * kv), for the torch_native backend.

SGLang's torch_native backend pads the queries to the key length, so that 64 new tokens after 4,000
cached ones cost as much as 4,000 new ones. Every policy, recompute included, runs with this form
instead: otherwise a shortened prefix would win for the wrong reason. `patches/` has the same change
as a diff for SGLang.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def rectangular_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float | None,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Attention of the last n positions over all kv positions.

    Args:
        queries: [n, Hq, D]; query i stands at position kv - n + i.
        keys: [kv, Hk, D], Hq a multiple of Hk, kv >= n if causal.
        values: [kv, Hk, Dv].
        scaling: factor of the logits; None for 1 / sqrt(D).
        causal: hide keys at positions after the query's.
        window: with `causal`, also hide keys more than `window` positions before the query.

    Returns:
        [n, Hq, Dv] in the dtype of the queries.
    """
    num_queries, num_keys = queries.shape[0], keys.shape[0]
    mask, is_causal = None, False
    if causal and window is not None:
        mask = _causal_mask(num_queries, num_keys, queries.device, window)
    elif causal and num_queries == num_keys:
        is_causal = True
    elif causal and num_queries > 1:
        mask = _causal_mask(num_queries, num_keys, queries.device, None)
    output = scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.to(queries.dtype).transpose(0, 1).unsqueeze(0),
        values.to(queries.dtype).transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return output.squeeze(0).transpose(0, 1)


def _causal_mask(
    num_queries: int, num_keys: int, device: torch.device, window: int | None
) -> Tensor:
    """Boolean [n, kv], True where a query sees a key."""
    key_positions = torch.arange(num_keys, device=device)
    query_positions = key_positions[num_keys - num_queries :, None]
    visible = key_positions <= query_positions
    if window is not None:
        visible &= key_positions >= query_positions - window
    return visible


def attend_rectangularly(backend: Any) -> None:
    """Let a backend of SGLang's attend with the new queries only; nothing if it is another one."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

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
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    slots = [req_to_token[row, :num_keys] for row, num_keys in rows]
    return attend_rows(query, output, k_cache, v_cache, slots, extend_seq_lens.tolist(), **named)


def attend_rows(
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Sequence[Tensor],
    counts: Sequence[int],
    *,
    scaling: float | None = None,
    causal: bool = False,
    sliding_window_size: int | None = None,
    **_: Any,
) -> Tensor:
    """Attend for the new tokens of each request over its slots; `counts` are new tokens of each."""
    first = 0
    for own, count in zip(slots, counts, strict=True):
        new = slice(first, first + count)
        output[new] = rectangular_attention(
            query[new],
            k_cache[own],
            v_cache[own],
            scaling=scaling,
            causal=causal,
            window=sliding_window_size,
        )
        first += count
    return output
