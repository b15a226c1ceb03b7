"""Selects the tokens with the highest scores of each row on the device.

`torch.topk` is the oracle.

Scores become integers of the same order. The k-th highest integer is found by narrowing a range:
each pass over a row counts how many integers reach three bounds, which quarters the range (as in a
radix selection with digits of two bits, but without a histogram), and it ends early once k
integers reach a bound. Prefix sums then write the tokens in ascending order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INT32_MIN = tl.constexpr(-(2**31))
INT32_MAX = tl.constexpr(2**31 - 1)

# A row of keys is read in blocks; two sizes, so that few variants are compiled.
SMALL_BLOCK, SMALL_WARPS = 2048, 8
LARGE_BLOCK, LARGE_WARPS = 8192, 32


def top_tokens(scores: Tensor, k: int) -> Tensor:
    """The k best tokens of each row, in one launch that is not waited for.

    Of equal scores at the boundary any are taken, but always k in all. A NaN is the highest score.

    Args:
        scores: float32 [rows, m], each row contiguous.
        k: from 1 to m.

    Returns:
        int32 [rows, k] on the device of the scores, each row ascending.
    """
    rows, m = scores.shape
    assert scores.dtype == torch.float32 and scores.stride(1) == 1 and 1 <= k <= m
    block, warps = (SMALL_BLOCK, SMALL_WARPS) if m <= SMALL_BLOCK else (LARGE_BLOCK, LARGE_WARPS)
    # Whole blocks, so that reading them needs no mask.
    keys = scores.new_empty((rows, triton.cdiv(m, block) * block), dtype=torch.int32)
    tokens = scores.new_empty((rows, k), dtype=torch.int32)
    top_kernel[(rows,)](scores, scores.stride(0), keys, tokens, m, k, BLOCK=block, num_warps=warps)
    return tokens


# Lengths differ from request to request, and with them where rows begin.
@triton.jit(do_not_specialize=["row_stride", "m", "k"])
def top_kernel(
    scores: tl.tensor,
    row_stride: tl.tensor,
    keys: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the k best tokens of a row to out [rows, k]; a program per row of `keys`."""
    row = tl.program_id(0).to(tl.int64)
    own_keys = keys + row * tl.cdiv(m, BLOCK) * BLOCK
    own_scores = scores + row * row_stride
    for start in range(0, m, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        inside = tokens < m
        own = tl.load(own_scores + tokens, mask=inside, other=0.0)
        own = tl.where(own == 0.0, 0.0, own)  # -0 is no less than 0
        # No token inside has the key INT32_MIN.
        tl.store(own_keys + tokens, tl.where(inside, _float_order(own), INT32_MIN))
    # Other threads read what was stored.
    tl.debug_barrier()
    bound, reaching = _kth_highest(own_keys, m, k, BLOCK)
    _store(own_keys, bound, reaching - k, out + row * k, m, BLOCK)


@triton.jit
def _float_order(numbers: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order; NaN is highest, and INT32_MIN does not come out."""
    bits = numbers.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & INT32_MAX)
    return tl.where(numbers == numbers, ordered, INT32_MAX)


@triton.jit
def _kth_highest(
    keys: tl.tensor, m: tl.tensor, k: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Find a bound that at least k of m keys reach, and how many do.

    More than k reach it only if several are equal to it, so that exactly k cannot be told apart.
    Keys beyond m, up to whole blocks, must be INT32_MIN.
    """
    low = tl.full((), INT32_MIN + 1, tl.int32)
    high = tl.full((), INT32_MAX, tl.int32)
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
    BLOCK: tl.constexpr,
) -> None:
    """Write the tokens whose keys reach the bound, ascending, less the first `spare` equal ones."""
    better = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for start in range(0, m, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        taken, better_before, equal_before, better, equal = _take(
            keys, tokens, bound, spare, better, equal
        )
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
