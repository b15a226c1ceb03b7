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
    """Attention of the last n of kv positions, [n, Hq, Dv] in the dtype of the queries.

    Queries [n, Hq, D], keys [kv, Hk, D] and values [kv, Hk, Dv], Hq a multiple of Hk, kv >= n if
    causal. `scaling` is a factor of the logits; None for 1 / sqrt(D). With `causal`, keys after a
    query are hidden; with a `window`, so are those more than `window` positions before it.
    """
    num_queries, num_keys = queries.shape[0], keys.shape[0]
    square, mask = window is None and num_queries == num_keys, None
    if causal and not square and (num_queries > 1 or window is not None):
        # True where a query sees a key.
        places = torch.arange(num_keys, device=queries.device)
        query_places = places[num_keys - num_queries :, None]
        mask = places <= query_places
        if window is not None:
            mask &= places >= query_places - window
    output = scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.to(queries.dtype).transpose(0, 1).unsqueeze(0),
        values.to(queries.dtype).transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=causal and square,
        scale=scaling,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return output.squeeze(0).transpose(0, 1)


def attend_rectangularly(backend: Any) -> None:
    """Make a torch_native backend attend with the new queries only; other backends stay."""
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
    """Replacement of `_run_sdpa_forward_extend`, with its arguments; each row begins at its entry
    of `starts`, or at 0."""
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
