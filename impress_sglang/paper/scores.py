"""Importance of prefix tokens: column sums of the attention weights (H2O's metric).

In: queries of the new tokens and keys. Out: one score per query head and prefix token. In torch, on
any device; the kernel that scores probe heads on a GPU is compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Keys are read in place, and widened in tiles of this many bytes. With smaller ones, threads would
# wait for each other more often, which takes long where cores are busy.
TILE_BYTES = 64 << 20
# The most weights at once, unless a head then had fewer than the first of these numbers of queries:
# memory does not grow with the product of queries, heads and tokens.
MOST_WEIGHTS = 1 << 24
QUERY_BLOCKS = 16, 256


def column_sums(
    queries: Tensor,
    prefix_keys: Tensor,
    resident_keys: Tensor,
    new_keys: Tensor,
    scaling: float,
    *,
    heads: Sequence[int] | None = None,
    resident_rows: Tensor | None = None,
) -> Tensor:
    """Attention weights that the new tokens give to each prefix token, summed over new tokens.

    The softmax runs over [resident, prefix, causal new tokens]; scores are only kept for the
    prefix. With `g = Hq // Hk`, query head `h` uses key head `h // g`.

    Args:
        queries: [n, Hq, D], queries of the new tokens, after rotation.
        prefix_keys: [m, Hk, D], keys of the stored tokens.
        resident_keys: [c, G, D], keys of earlier tokens in the device pool; c may be 0.
        new_keys: [n, G, D], keys of the new tokens.
        scaling: factor of the attention logits.
        heads: the Hk of the G heads that `prefix_keys` has; None: it has all.
        resident_rows: int64 [c], rows of `resident_keys` that are these tokens; None: all.

    Returns:
        [Hq, m] float32 on the device of `queries`. Each row sums to at most n.
    """
    num_queries, num_heads, _ = queries.shape
    num_prefix = len(prefix_keys)
    total = torch.zeros(num_heads, num_prefix, dtype=torch.float32, device=queries.device)
    if not total.numel() or not num_queries:
        return total
    grouped = _by_key_head(queries, prefix_keys.shape[1])
    group, (least, most) = grouped.shape[1], QUERY_BLOCKS
    num_resident = len(resident_keys if resident_rows is None else resident_rows)
    widest = group * max(num_prefix, num_resident, len(new_keys))
    size = max(least, min(most, MOST_WEIGHTS // widest))
    at_once = max(1, MOST_WEIGHTS // (widest * min(size, num_queries)))
    for part in _slices(len(grouped), at_once):
        chosen = part if heads is None else list(heads[part])
        for block in _slices(num_queries, size):
            own = grouped[part, :, block] * scaling
            outside = _log_sums_of_new(own, new_keys, chosen, block.start)
            own = own.flatten(1, 2)
            for keys in _tiles(resident_keys, chosen, resident_rows):
                outside = torch.logaddexp(outside, torch.bmm(own, keys).logsumexp(-1))
            logits = [torch.bmm(own, keys) for keys in _tiles(prefix_keys, part)]
            sums = total.view(*grouped.shape[:2], -1)[part]
            _add_sums(sums, logits, outside)
    return total


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _by_key_head(queries: Tensor, num_key_heads: int) -> Tensor:
    """[n, Hq, D] -> [Hk, g, n, D] float32."""
    num_tokens, num_heads, dim = queries.shape
    group = num_heads // num_key_heads
    return queries.float().view(num_tokens, num_key_heads, group, dim).permute(1, 2, 0, 3)


def _tiles(keys: Tensor, heads: slice | list[int], rows: Tensor | None = None) -> Iterator[Tensor]:
    """Some heads of keys [tokens, G, D] tile by tile: [heads, D, tile] float32."""
    if isinstance(heads, slice):
        keys, heads = keys[:, heads], slice(None)
    size = max(1, TILE_BYTES // (4 * keys.shape[1] * keys.shape[2]))
    for tile in _slices(len(keys if rows is None else rows), size):
        own = keys[tile] if rows is None else keys.index_select(0, rows[tile])
        yield own[:, heads].float().permute(1, 2, 0)


def _log_sums_of_new(queries: Tensor, new: Tensor, heads: slice | list[int], first: int) -> Tensor:
    """Logs of the sums of exponentials over the new tokens that queries [Hk, g, b, D] may see.

    `heads` are their KV heads; the first query is of new token `first`. Returns [Hk, g * b].
    """
    rows = queries.shape[2]
    flat, number = queries.flatten(1, 2), torch.arange(first, first + rows, device=queries.device)
    found = torch.full(flat.shape[:2], float("-inf"), device=flat.device)
    start = 0
    for keys in _tiles(new[: first + rows], heads):
        logits, stop = torch.bmm(flat, keys), start + keys.shape[-1]
        if stop > first + 1:
            hidden = torch.arange(start, stop, device=flat.device)[None, :] > number[:, None]
            by_row = logits.unflatten(1, (-1, rows)).masked_fill_(hidden, float("-inf"))
            logits = by_row.flatten(1, 2)
        found = torch.logaddexp(found, logits.logsumexp(-1))
        start = stop
    return found


def _add_sums(sums: Tensor, tiles: list[Tensor], outside: Tensor) -> None:
    """Add the weights of tiles of logits [Hk, g * b, tile] to sums [Hk, g, m]; changes both.

    `outside` [Hk, g * b] are logs of the sums of exponentials of all other logits.
    """
    peaks = [own.amax(-1, keepdim=True) for own in tiles]
    peak = peaks[0] if len(peaks) == 1 else torch.stack(peaks).amax(0)
    # As few passes over the matrix as possible: one exponential, and the division by the sum of
    # each row is folded into the product that sums the columns.
    total = (outside - peak.squeeze(-1)).exp_()
    for weights in tiles:
        weights.sub_(peak)
        total += weights.exp_().sum(-1)
    shares = total.reciprocal_().view(-1, 1, total.shape[1] // sums.shape[1])
    start = 0
    for weights in tiles:
        columns = torch.bmm(shares, weights.view(len(shares), shares.shape[2], -1))
        stop = start + columns.shape[-1]
        sums[..., start:stop] += columns.view(*sums.shape[:2], -1)
        start = stop
