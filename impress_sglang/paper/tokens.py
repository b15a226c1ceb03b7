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
    """The k tokens that most heads chose, if the heads' own sets are alike (IMPRESS, 4.3).

    `scores` float32 [Hp, m] >= 0 are those of the probe heads. The sets are alike if the mean
    Jaccard index of two is greater than the threshold; a single one is. Returns ascending int64 [k]
    on the CPU, ties broken by summed score; None if heads differ.
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


def own_tokens(scores: Tensor, group_size: int, k: int) -> Tensor:
    """The k best tokens of each KV head, by the summed scores [Hq, m] of its `group_size` heads.

    Returns int64 [Hq // group_size, k] on the CPU, each row ascending.
    """
    by_kv_head = scores.view(-1, group_size, scores.shape[1]).sum(1)
    return top_tokens(by_kv_head, k).sort(dim=-1).values.cpu()


def top_tokens(scores: Tensor, k: int) -> Tensor:
    """Indices of the k highest scores of each row: [H, m] -> int64 [H, k], in no order."""
    return torch.topk(scores, k, dim=-1, sorted=False).indices
