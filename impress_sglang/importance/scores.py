"""Importance of prefix tokens: column sums of the attention weights (H2O's metric).

Stage: probe. In: queries of the new tokens and keys. Out: one score per query head and prefix
token. Reference implementation in torch, on any device; kernels are compared with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bounds the score matrix to QUERY_BLOCK x m per head, whatever the length of the new part.
QUERY_BLOCK = 256
# Below the largest one, a logit whose weight does not count where weights are squared.
LEAST_LOGIT = -30.0


def column_sums(
    queries: Tensor,
    prefix_keys: Tensor,
    resident_keys: Tensor,
    new_keys: Tensor,
    scaling: float,
    *,
    squares: bool = False,
) -> Tensor:
    """Attention weights that the new tokens give to each prefix token, summed over new tokens.

    The softmax runs over [resident, prefix, causal new tokens]; scores are only kept for the
    prefix. With `g = Hq // Hk`, query head `h` uses key head `h // g`.

    Args:
        queries: [n, Hq, D], after rotation.
        prefix_keys: [m, Hk, D], the stored tokens.
        resident_keys: [c, Hk, D], tokens before them that are in the device pool; c may be 0.
        new_keys: [n, Hk, D], keys of the new tokens.
        scaling: factor of the attention logits.
        squares: of the weights are summed, by which an error of a token counts.

    Returns:
        [Hq, m] float32 on the device of `queries`. Each row sums to at most n.
    """
    num_heads = prefix_keys.shape[1]
    grouped = _by_key_head(queries, num_heads)
    prefix, resident, new = (
        keys.float().permute(1, 2, 0) for keys in (prefix_keys, resident_keys, new_keys)
    )
    total = torch.zeros(
        queries.shape[1], prefix_keys.shape[0], dtype=torch.float32, device=queries.device
    )
    for start in range(0, queries.shape[0], QUERY_BLOCK):
        block = grouped[:, :, start : start + QUERY_BLOCK] * scaling
        total += _block_sums(block, prefix, resident, new, start, squares).view_as(total)
    return total


def _by_key_head(queries: Tensor, num_key_heads: int) -> Tensor:
    """[n, Hq, D] -> [Hk, g, n, D] float32."""
    num_tokens, num_heads, dim = queries.shape
    group = num_heads // num_key_heads
    return queries.float().view(num_tokens, num_key_heads, group, dim).permute(1, 2, 0, 3)


def _block_sums(
    block: Tensor,
    prefix: Tensor,
    resident: Tensor,
    new: Tensor,
    first_query: int,
    squares: bool,
) -> Tensor:
    """[Hk, g, b, D] queries and [Hk, D, *] keys -> [Hk, g, m]."""
    heads, group, rows, dim = block.shape
    flat = block.reshape(heads, group * rows, dim)
    outside = _new_logsumexp(flat, new, group, rows, first_query)
    if resident.shape[-1]:
        outside = torch.logaddexp(outside, torch.bmm(flat, resident).logsumexp(-1))
    logits = torch.bmm(flat, prefix)
    # The matrix is passed over as seldom as possible: one exponential, and the division by the sum
    # of each row is folded into the product that sums the columns.
    peak = logits.amax(-1, keepdim=True)
    logits.sub_(peak)
    if squares:
        # Numbers that are too small for a float's exponent are slow, and squares soon are.
        logits.clamp_min_(LEAST_LOGIT)
    weights = logits.exp_()
    total = weights.sum(-1) + (outside - peak.squeeze(-1)).exp()
    shares = total.reciprocal()
    if squares:
        weights, shares = weights.square_(), shares.square_()
    columns = torch.bmm(shares.view(heads * group, 1, rows), weights.view(heads * group, rows, -1))
    return columns.view(heads, group, -1)


def _new_logsumexp(flat: Tensor, new: Tensor, group: int, rows: int, first_query: int) -> Tensor:
    """Log of the sum of exponentials over the new tokens that each query may see."""
    visible = first_query + rows
    logits = torch.bmm(flat, new[:, :, :visible]).view(-1, group, rows, visible)
    positions = torch.arange(visible, device=flat.device)
    hidden = positions[None, :] > positions[first_query:, None]
    return logits.masked_fill(hidden, float("-inf")).logsumexp(-1).flatten(1)
