"""Attention of n new tokens over kv keys in O(n * kv), for the torch_native backend.

SGLang's torch_native backend pads the queries to the key length, so that 64 new tokens after 4,000
cached ones cost as much as 4,000 new ones. Every policy, recompute included, runs with this form
instead: otherwise a shortened prefix would win for the wrong reason. `patches/` has the same change
as a diff for SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    # Models with states have two.
    backend = getattr(backend, "full_attn_backend", backend)
    if type(backend) is TorchNativeAttnBackend:
        original = backend._run_sdpa_forward_extend

        def extend(*where: Any, **named: Any) -> Tensor:
            # The last of `where` are the lengths of an encoder.
            if where[-1] is not None or named["is_cross_attn"]:
                return original(*where, **named)
            return extend_rows(None, *where, **named)

        backend._run_sdpa_forward_extend = extend


def extend_rows(
    starts: Sequence[int] | None,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    encoder_lens: None,
    *,
    scaling: float,
    causal: bool,
    sliding_window_size: int | None,
    **_: Any,
) -> Tensor:
    """In place of `_run_sdpa_forward_extend`, whose arguments these are; each row begins at its
    entry of `starts`, or at 0."""
    rows, stops = req_pool_indices.tolist(), seq_lens.tolist()
    starts, first = starts or [0] * len(rows), 0
    for row, start, stop, count in zip(rows, starts, stops, extend_seq_lens.tolist(), strict=True):
        new, slots = slice(first, first + count), req_to_token[row, start:stop]
        output[new] = rectangular_attention(
            query[new],
            k_cache[slots],
            v_cache[slots],
            scaling=scaling,
            causal=causal,
            window=sliding_window_size,
        )
        first += count
    return output
