"""From scores to tokens: top-k sets, their similarity, the vote, the per-head fallback.

Pure functions of scores, which compute where these are (IMPRESS, 4.3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def probe_kv_heads(num_query_heads: int, num_kv_heads: int, probe_heads: int) -> tuple[int, ...]:
    """The KV heads whose keys are read in full.

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
    share = k / num_tokens
    return float((share / (2.0 - share)) ** alpha)


def agreed_tokens(scores: Tensor, k: int, threshold: float) -> Tensor | None:
    """The tokens that all heads use, if the heads' own sets are alike (IMPRESS, 4.3).

    Args:
        scores: float32 [Hp, m] >= 0 of the probe heads.
        k: tokens per head.
        threshold: the sets are alike if their mean Jaccard index is greater; a single head's is.

    Returns:
        Ascending int64 [k] on the CPU: the tokens that most heads chose; None if heads differ.
    """
    sets = top_tokens(scores, k)
    if len(sets) > 1 and mean_jaccard(sets, scores.shape[1]) <= threshold:
        return None
    return vote(scores, sets, k).cpu()


def own_tokens(scores: Tensor, group_size: int, k: int) -> Tensor:
    """The k best tokens of each KV head, by the summed scores of its query heads.

    Args:
        scores: float32 [Hq, m].
        group_size: query heads that share a KV head.
        k: tokens per head.

    Returns:
        int64 [Hq // group_size, k] on the CPU, each row ascending.
    """
    by_kv_head = scores.view(-1, group_size, scores.shape[1]).sum(1)
    return top_tokens(by_kv_head, k).sort(dim=-1).values.cpu()


def top_tokens(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest scores of each row: [H, m] -> int64 [H, k], in no order."""
    return torch.topk(scores, k, dim=-1, sorted=False).indices


def mean_jaccard(token_sets: Tensor, num_tokens: int) -> float:
    """Mean Jaccard index over all pairs of rows of [H, k] index sets; 1.0 for a single row."""
    num_sets, k = token_sets.shape
    if num_sets < 2:
        return 1.0
    members = _membership(token_sets, num_tokens)
    common = members @ members.T
    jaccard = common / (2 * k - common)
    upper = torch.triu_indices(num_sets, num_sets, offset=1, device=token_sets.device)
    return float(jaccard[upper[0], upper[1]].mean())


def vote(scores: Tensor, token_sets: Tensor, k: int) -> Tensor:
    """The k tokens that most sets contain, ties broken by summed score: ascending int64 [k]."""
    votes = _membership(token_sets, scores.shape[1]).sum(0).double()
    summed = scores.double().sum(0)
    # Below 1, so that a score never outweighs a vote.
    tie_break = summed / (summed.sum() + 1.0)
    return torch.topk(votes + tie_break, k, sorted=False).indices.sort().values


def _membership(token_sets: Tensor, num_tokens: int) -> Tensor:
    """[H, k] index sets -> [H, m] float32 of zeros and ones."""
    members = torch.zeros(token_sets.shape[0], num_tokens, device=token_sets.device)
    return members.scatter_(1, token_sets, 1.0)
