"""Attention of n new tokens over kv keys in O(n * kv), for the torch_native backend.

SGLang's torch_native backend pads the queries to the key length, so that 64 new tokens after 4,000
cached ones cost as much as 4,000 new ones. Every policy, recompute included, runs with this form
instead: otherwise a shortened prefix would win for the wrong reason. `patches/` has the same change
as a diff for SGLang.
"""

from __future__ import annotations

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
