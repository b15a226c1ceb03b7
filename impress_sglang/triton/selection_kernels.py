"""Kernels of `selection.py`, which says how they work."""

from __future__ import annotations

import triton
import triton.language as tl

INT32_MIN = tl.constexpr(-(2**31))
INT32_MAX = tl.constexpr(2**31 - 1)
INT64_MAX = tl.constexpr(2**63 - 1)

# A sum of float32 numbers, as the bits of a float64 minus SUM_BASE, needs 61 bits: in a float64 the
# exponent of the smallest float32 is 874, and that of the largest sum less than 874 + 512.
SUM_BASE = tl.constexpr(873 << 52)
SUM_BITS = tl.constexpr(61)
SUM_MAX = tl.constexpr(2**61 - 1)


# Lengths differ from request to request, and with them where rows begin.
@triton.jit(do_not_specialize=["row_stride", "m", "k"])
def top_kernel(
    scores: tl.tensor,
    row_stride: tl.tensor,
    keys: tl.tensor,
    out: tl.tensor,
    common: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Find the k best tokens by sums of GROUP rows; a program per row of `keys` [rows, padded m].

    With `common` [rows, rows] the set is written as flags, uint8 [rows, padded m], and the row of
    `common` is set to zero; otherwise the tokens are written, [rows, k].
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.cdiv(m, BLOCK) * BLOCK
    own_keys = keys + row * length
    for start in range(0, m, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < m
        summed = tl.zeros((BLOCK,), tl.float32)
        for member in tl.static_range(GROUP):
            source = scores + (row * GROUP + member) * row_stride
            summed += tl.load(source + tokens, mask=inside, other=0.0)
        # No token inside has the key INT32_MIN.
        tl.store(own_keys + tokens, tl.where(inside, _float_order(summed), INT32_MIN))
    # Other threads read what was stored.
    tl.debug_barrier()
    lowest = tl.full((), INT32_MIN + 1, tl.int32)
    highest = tl.full((), INT32_MAX, tl.int32)
    bound, reaching = _kth_highest(own_keys, lowest, highest, m, k, BLOCK)
    if common is None:
        _store(own_keys, bound, reaching - k, out + row * k, m, False, BLOCK)
    else:
        _store(own_keys, bound, reaching - k, out + row * length, m, True, BLOCK)
        rows = tl.num_programs(0)
        for start in range(0, rows, BLOCK):
            others = start + tl.arange(0, BLOCK)
            tl.store(common + row * rows + others, 0, mask=others < rows)


@triton.jit(do_not_specialize=["row_stride", "m"])
def vote_kernel(
    scores: tl.tensor,
    row_stride: tl.tensor,
    flags: tl.tensor,
    common: tl.tensor,
    keys: tl.tensor,
    m: tl.tensor,
    length: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DROPPED_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute the keys of the vote, and how many tokens two sets share; one program per block.

    Keys int64 [length] are ordered by votes, then by summed scores; beyond m they are -1. Shared
    tokens are added to `common` [HEADS, HEADS], above the diagonal.
    """
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    heads = tl.arange(0, HEADS_PADDED)
    inside = tokens < m
    places = flags + heads.to(tl.int64)[:, None] * length + tokens[None, :]
    members = tl.load(places, mask=heads[:, None] < HEADS, other=0).to(tl.int32)
    votes = tl.sum(members, 0)
    # In float64, because the oracle distinguishes sums that are the same float32.
    summed = tl.zeros((BLOCK,), tl.float64)
    own_scores = scores + tokens
    own_flags = flags + tokens
    for head in range(HEADS):
        summed += tl.load(own_scores, mask=inside, other=0.0).to(tl.float64)
        shared = tl.sum(members * tl.load(own_flags).to(tl.int32)[None, :], 1)
        later = (heads > head) & (heads < HEADS)
        tl.atomic_add(common + head * HEADS + heads, shared, mask=later, sem="relaxed")
        own_scores += row_stride
        own_flags += length
    tl.store(keys + tokens, tl.where(inside, _vote_order(votes, summed, DROPPED_BITS), -1))


@triton.jit(do_not_specialize=["m", "k"])
def choice_kernel(
    keys: tl.tensor,
    common: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    threshold: tl.tensor,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the decision, the similarity's bits and the k tokens with the highest keys."""
    if HEADS == 1:
        similarity = tl.full((), 1.0, tl.float32)
        tl.store(out, 1)
    else:
        similarity = _mean_jaccard(common, k, HEADS, HEADS_PADDED)
        tl.store(out, (similarity > threshold).to(tl.int32))
    tl.store(out + 1, similarity.to(tl.int32, bitcast=True))
    lowest = tl.full((), 0, tl.int64)
    highest = tl.full((), INT64_MAX, tl.int64)
    bound, reaching = _kth_highest(keys, lowest, highest, m, k, BLOCK)
    _store(keys, bound, reaching - k, out + HEADER, m, False, BLOCK)


@triton.jit
def _float_order(numbers: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order; NaN is highest, and INT32_MIN does not come out."""
    bits = numbers.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & INT32_MAX)
    return tl.where(numbers == numbers, ordered, INT32_MAX)


@triton.jit
def _vote_order(votes: tl.tensor, summed: tl.tensor, DROPPED_BITS: tl.constexpr) -> tl.tensor:
    """Votes int32 and sums float64 >= 0 -> int64 >= 0, by votes and then by sums.

    As many bits of a sum are dropped as votes need beyond two. The oracle, which adds a share of
    all sums to the votes in float64, keeps no more.
    """
    bits = summed.to(tl.int64, bitcast=True) - SUM_BASE
    bits = tl.where(summed > 0, tl.minimum(bits, SUM_MAX), 0)
    return (votes.to(tl.int64) << (SUM_BITS - DROPPED_BITS)) | (bits >> DROPPED_BITS)


@triton.jit
def _mean_jaccard(
    common: tl.tensor, k: tl.tensor, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr
) -> tl.tensor:
    """Mean of c / (2k - c) over the pairs above the diagonal of `common` [HEADS, HEADS]."""
    heads = tl.arange(0, HEADS_PADDED)
    pairs = (heads[:, None] < heads[None, :]) & (heads[None, :] < HEADS)
    shared = tl.load(common + heads[:, None] * HEADS + heads[None, :], mask=pairs, other=0)
    # Each quotient is rounded to float32 as in the oracle; in float64 it is exact enough for that.
    jaccard = (shared.to(tl.float64) / (2 * k - shared).to(tl.float64)).to(tl.float32)
    total = tl.sum(tl.sum(jaccard.to(tl.float64), 1), 0)
    return (total / (HEADS * (HEADS - 1) // 2)).to(tl.float32)


@triton.jit
def _kth_highest(
    keys: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Find a bound that at least k of m keys reach, and how many do.

    More than k reach it only if several are equal to it, so that exactly k cannot be told apart.
    Keys beyond m, up to whole blocks, must be below `lowest`.
    """
    low, high = lowest, highest
    reaching = tl.zeros((), tl.int32) + m
    # At least k keys reach `low`, and fewer than k are above `high`.
    while low < high:
        second = _between(low, high)
        first = _between(low, second)
        third = _between(second, high)
        at_first = tl.zeros((BLOCK,), tl.int32)
        at_second = tl.zeros((BLOCK,), tl.int32)
        at_third = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, m, BLOCK):
            own = tl.load(keys + start + tl.arange(0, BLOCK))
            at_first += (own >= first).to(tl.int32)
            at_second += (own >= second).to(tl.int32)
            at_third += (own >= third).to(tl.int32)
        low, high, reaching = _narrow(low, high, reaching, first, tl.sum(at_first, 0), k)
        low, high, reaching = _narrow(low, high, reaching, second, tl.sum(at_second, 0), k)
        low, high, reaching = _narrow(low, high, reaching, third, tl.sum(at_third, 0), k)
        high = tl.where(reaching == k, low, high)
    return low, reaching


@triton.jit
def _narrow(
    low: tl.tensor,
    high: tl.tensor,
    reaching: tl.tensor,
    bound: tl.tensor,
    count: tl.tensor,
    k: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The range once `count` keys were found to reach a bound; call with ascending bounds."""
    enough = count >= k
    return (
        tl.where(enough, bound, low),
        tl.where(enough, high, tl.minimum(high, bound - 1)),
        tl.where(enough, count, reaching),
    )


@triton.jit
def _between(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The mean, rounded up, without overflow: above `low` unless both are equal."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _store(
    keys: tl.tensor,
    bound: tl.tensor,
    spare: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the tokens whose keys reach the bound, ascending, but not the first `spare` equal ones.

    With FLAGS, write 1 for each of these tokens and 0 for others, in whole blocks.
    """
    better = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for start in range(0, m, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        taken, better_before, equal_before, better, equal = _take(
            keys, tokens, bound, spare, better, equal
        )
        if FLAGS:
            tl.store(out + tokens, taken.to(tl.uint8))
        else:
            place = better_before + tl.maximum(equal_before - spare, 0)
            tl.store(out + place, tokens, mask=taken)


@triton.jit
def _take(
    keys: tl.tensor,
    tokens: tl.tensor,
    bound: tl.tensor,
    spare: tl.tensor,
    better: tl.tensor,
    equal: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Which tokens of a block to take; how many are better and equal, before each and in all."""
    own = tl.load(keys + tokens)
    is_better = own > bound
    is_equal = own == bound
    # Both counts in one scan, since a block has fewer than 2**15 tokens.
    both = is_better.to(tl.int32) | (is_equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    better_before = better + (before & 0xFFFF)
    equal_before = equal + (before >> 16)
    taken = is_better | (is_equal & (equal_before >= spare))
    total = tl.sum(both, 0)
    return taken, better_before, equal_before, better + (total & 0xFFFF), equal + (total >> 16)
