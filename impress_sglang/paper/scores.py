"""Importance of prefix tokens, and selection of the important ones (IMPRESS, 4.3).

In torch, on any device; the GPU kernel that scores probe heads is tested against it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Most weights in one tile, unless it had fewer queries than the second number: memory does not grow
# with the product of queries and tokens.
MAX_WEIGHTS, MIN_QUERIES = 1 << 24, 16


def column_sums(
    queries: Tensor,
    prefix_keys: Tensor,
    pool_keys: Tensor,
    resident_rows: Tensor,
    new_keys: Tensor,
    scaling: float,
) -> Tensor:
    """Sum the attention weights that the new tokens give to each prefix token (H2O).

    The softmax runs over [resident, prefix, causal new tokens]; scores are only kept for the
    prefix. With `g = Hq // Hk`, query head `h` uses key head `h // g`.

    Args:
        queries: [n, Hq, D], queries of the new tokens, after rotation.
        prefix_keys: [m, Hk, D], keys of the stored tokens, of all heads or the first ones.
        pool_keys: [rows, G, D], the device pool.
        resident_rows: int64 [c], its rows of earlier tokens; c may be 0.
        new_keys: [n, G, D], keys of the new tokens.
        scaling: factor of the attention logits.

    Returns:
        [Hq, m] float32 on the device of `queries`. Each row sums to at most n.
    """
    (num_queries, num_heads, _), (num_prefix, key_heads, _) = queries.shape, prefix_keys.shape
    total = torch.zeros(num_heads, num_prefix, dtype=torch.float32, device=queries.device)
    if not total.numel() or not num_queries:
        return total
    group, sums = num_heads // key_heads, total.view(key_heads, -1, num_prefix)
    num_before = len(resident_rows)
    size = max(MIN_QUERIES, MAX_WEIGHTS // (group * (num_before + num_prefix + len(new_keys))))
    for head in range(key_heads):
        # [D, keys]: keys visible to a query, in order of position.
        before = pool_keys[:, head].index_select(0, resident_rows)
        keys = torch.cat([before, prefix_keys[:, head], new_keys[:, head]]).float().T
        asking = queries[:, head * group : (head + 1) * group].float() * scaling
        for start, tile in zip(range(0, num_queries, size), asking.split(size), strict=True):
            stop = num_before + num_prefix + start + len(tile)
            # [n, g, keys]; a query sees new tokens up to its own.
            weights = tile @ keys[:, :stop]
            hidden = torch.ones(len(tile), len(tile), dtype=torch.bool, device=keys.device).triu_(1)
            weights[..., stop - len(tile) :].masked_fill_(hidden[:, None], float("-inf"))
            # One exponential; the division by each row's sum is folded into the sum of columns.
            weights.sub_(weights.amax(-1, keepdim=True)).exp_()
            shares = weights.sum(-1).reciprocal_()
            columns = torch.einsum("ng,ngk->gk", shares, weights)
            sums[head] += columns[:, num_before : num_before + num_prefix]
    return total


def probe_kv_heads(num_query_heads: int, num_kv_heads: int, probe_heads: int) -> tuple[int, ...]:
    """Choose the KV heads whose keys are read in full.

    Multi-head models: the first `probe_heads` heads, as in the paper (4.3). Grouped-query models:
    the first max(1, round(probe_heads * G / 32)) of G KV heads, which keeps the paper's share of
    bytes (3 of 32 heads).
    """
    if num_query_heads == num_kv_heads:
        count = min(probe_heads, num_kv_heads)
    else:
        count = min(num_kv_heads, max(1, round(probe_heads * num_kv_heads / 32)))
    return tuple(range(count))


def retained_tokens(num_tokens: int, retention: float) -> int:
    """k = ceil(r * m), at least 1 and at most m."""
    # 0.1 * 30 is 3.0000000000000004 in binary; the guard keeps that from becoming 4.
    return max(1, min(num_tokens, math.ceil(retention * num_tokens - 1e-9)))


def similarity_threshold(k: int, num_tokens: int, alpha: float) -> float:
    """t = j**alpha, where j is the Jaccard index that two random sets of size k would have."""
    fraction = k / num_tokens
    return float((fraction / (2.0 - fraction)) ** alpha)


def agreed_tokens(scores: Tensor, k: int, threshold: float) -> Tensor | None:
    """Return the k tokens that most heads chose, if the heads' sets are alike (IMPRESS, 4.3).

    `scores` float32 [Hp, m] >= 0 are those of the probe heads. The sets are alike if the mean
    Jaccard index of two exceeds the threshold; a single one is. Returns ascending int64 [k] on the
    CPU, ties broken by summed score; None if heads differ.
    """
    members = torch.zeros_like(scores).scatter_(1, top_tokens(scores, k), 1.0)
    if len(scores) > 1:
        common = members @ members.T
        first, second = torch.triu_indices(*common.shape, offset=1, device=scores.device)
        if float((common / (2 * k - common))[first, second].mean()) <= threshold:
            return None
    votes, summed = members.sum(0).double(), scores.double().sum(0)
    # Below 1, so that a score never outweighs a vote.
    tie_break = summed / (summed.sum() + 1.0)
    return torch.topk(votes + tie_break, k, sorted=False).indices.sort().values.cpu()


def tokens_by_head(scores: Tensor, group_size: int, k: int) -> Tensor:
    """Return the k best tokens of each KV head, by the summed scores [Hq, m] of its query heads.

    Returns int64 [Hq // group_size, k] on the CPU, each row ascending.
    """
    by_kv_head = scores.view(-1, group_size, scores.shape[1]).sum(1)
    return top_tokens(by_kv_head, k).sort(dim=-1).values.cpu()


def top_tokens(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest scores of each row: [H, m] -> int64 [H, k], in no order."""
    return torch.topk(scores, k, dim=-1, sorted=False).indices
