"""From scores to tokens on the device: top-k sets, and the paper's similarity and vote.

Stage: select. The torch code in `impress_sglang.importance.selection` is the oracle. Nothing here
waits for the device, except `to_host`.

Scores become integers of the same order. The k-th highest integer is found by narrowing a range:
each pass over a row counts how many integers reach three bounds, which quarters the range (as in a
radix selection with digits of two bits, but without a histogram), and it ends early once k
integers reach a bound. Prefix sums then write the tokens in ascending order.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a choice's buffer before its tokens: the decision, and the similarity's bits.
HEADER = 2

# A row of keys is read in blocks; two sizes, so that few variants are compiled.
SMALL_BLOCK, SMALL_WARPS = 2048, 8
LARGE_BLOCK, LARGE_WARPS = 8192, 32
# Flags that a program of the vote holds at once.
VOTE_FLAGS = 8192

INT32_MIN = tl.constexpr(-(2**31))
INT32_MAX = tl.constexpr(2**31 - 1)
INT64_MAX = tl.constexpr(2**63 - 1)

# A sum of float32 numbers, as the bits of a float64 minus this, needs 61 bits: the exponent of the
# smallest float32 is 874 in a float64, and of the largest sum less than 874 + 512.
SUM_BASE = tl.constexpr(873 << 52)
SUM_BITS = tl.constexpr(61)
SUM_MAX = tl.constexpr(2**61 - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What the probe heads agree on: IMPRESS 4.3.

    `buffer` is int32 [HEADER + k]; what is in it may be asked for after `to_host`.
    """

    buffer: Tensor

    def to_host(self) -> Choice:
        """The same in CPU memory; waits for that one copy."""
        return Choice(to_host(self.buffer))

    @property
    def alike(self) -> bool:
        """Whether the heads' sets are so alike that one set serves all heads."""
        assert self.buffer.device.type == "cpu", "to_host() comes first"
        return bool(self.buffer[0])

    @property
    def similarity(self) -> float:
        """Mean Jaccard index over all pairs of heads; 1.0 for a single head."""
        assert self.buffer.device.type == "cpu", "to_host() comes first"
        return float(self.buffer[1:HEADER].view(torch.float32))

    @property
    def tokens(self) -> Tensor:
        """Ascending int32 [k]: the tokens that most heads chose, wherever the buffer is."""
        return self.buffer[HEADER:]


def top_tokens_per_head(scores: Tensor, group_size: int, k: int) -> Tensor:
    """The k best tokens of each KV head, by the summed scores of its query heads.

    Oracle: `importance.selection.per_head_tokens`. Of equal sums at the boundary any are taken,
    and always k. A NaN counts as the highest score. One launch; nothing is waited for.

    Args:
        scores: float32 [Hq, m], each row contiguous.
        group_size: query heads that share a KV head.
        k: tokens per head, from 1 to m.

    Returns:
        int32 [Hq // group_size, k] on the device of the scores, each row ascending.
    """
    rows, m = scores.shape[0] // group_size, scores.shape[1]
    assert scores.shape[0] == rows * group_size, "heads do not fill groups"
    _check(scores, k)
    block, warps = _block(m)
    keys = scores.new_empty((rows, _padded(m, block)), dtype=torch.int32)
    tokens = scores.new_empty((rows, k), dtype=torch.int32)
    _top_kernel[(rows,)](
        scores,
        scores.stride(0),
        keys,
        tokens,
        None,
        m,
        k,
        GROUP=group_size,
        BLOCK=block,
        num_warps=warps,
    )
    return tokens


def paper_choice(scores: Tensor, k: int, threshold: float) -> Choice:
    """Similarity of the probe heads' top-k sets, the decision, and the vote: IMPRESS 4.3.

    Oracle: `importance.identify.PaperRule` with `mean_jaccard` and `vote` of
    `importance.selection`. Three launches; nothing is waited for.

    Args:
        scores: float32 [Hp, m] >= 0 of the probe heads, each row contiguous.
        k: tokens per head, from 1 to m.
        threshold: heads are alike if the similarity is greater; a single head is.

    Returns:
        The choice, on the device of the scores.
    """
    heads, m = scores.shape
    _check(scores, k)
    block, warps = _block(m)
    length = _padded(m, block)
    top_keys = scores.new_empty((heads, length), dtype=torch.int32)
    flags = scores.new_empty((heads, length), dtype=torch.uint8)
    common = scores.new_empty((heads, heads), dtype=torch.int32)
    vote_keys = scores.new_empty(length, dtype=torch.int64)
    buffer = scores.new_empty(HEADER + k, dtype=torch.int32)
    heads_padded = triton.next_power_of_2(heads)
    _top_kernel[(heads,)](
        scores,
        scores.stride(0),
        top_keys,
        flags,
        common,
        m,
        k,
        GROUP=1,
        BLOCK=block,
        num_warps=warps,
    )
    vote_block = min(SMALL_BLOCK, max(128, VOTE_FLAGS // heads_padded))
    _vote_kernel[(length // vote_block,)](
        scores,
        scores.stride(0),
        flags,
        common,
        vote_keys,
        m,
        length,
        HEADS=heads,
        HEADS_PADDED=heads_padded,
        DROPPED_BITS=max(0, heads.bit_length() - 2),
        BLOCK=vote_block,
        num_warps=8,
    )
    _choice_kernel[(1,)](
        vote_keys,
        common,
        buffer,
        m,
        k,
        _float32_at_most(threshold),
        HEADS=heads,
        HEADS_PADDED=heads_padded,
        HEADER=HEADER,
        BLOCK=block,
        num_warps=warps,
    )
    return Choice(buffer)


def to_host(buffer: Tensor) -> Tensor:
    """A copy of a contiguous tensor in CPU memory, pinned if it comes from a CUDA device.

    Waits until what the current stream of that device has computed so far is done and the copy is
    made, and for nothing else.
    """
    if buffer.device.type == "cpu":
        return buffer.clone()
    assert buffer.is_contiguous()
    host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
    stream = torch.cuda.current_stream(buffer.device)
    host.copy_(buffer, non_blocking=True)
    stream.record_event().synchronize()
    return host


def _check(scores: Tensor, k: int) -> None:
    assert scores.dtype == torch.float32 and scores.stride(1) == 1
    assert 1 <= k <= scores.shape[1]


def _block(m: int) -> tuple[int, int]:
    """Elements of a block and warps of its program, for rows of m."""
    return (SMALL_BLOCK, SMALL_WARPS) if m <= SMALL_BLOCK else (LARGE_BLOCK, LARGE_WARPS)


def _padded(m: int, block: int) -> int:
    """Length of a row in whole blocks, so that reading it needs no mask."""
    return triton.cdiv(m, block) * block


def _float32_at_most(number: float) -> float:
    """The largest float32 that is not greater.

    Kernels take float32. A float32 similarity is greater than `number` exactly if it is greater
    than this.
    """
    rounded = np.float32(number)
    if float(rounded) > number:
        rounded = np.nextafter(rounded, np.float32(-np.inf))
    return float(rounded)


# Lengths differ from request to request, and where rows begin with them.
@triton.jit(do_not_specialize=["row_stride", "m", "k"])
def _top_kernel(
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
    """A program per row of `keys` [rows, padded m]: the k best tokens by the sum of GROUP rows.

    With `common` [rows, rows] the set is written as flags, uint8 [rows, padded m], and the row of
    `common` is set to zero; else its tokens, [rows, k].
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
        # Nothing that is inside has this key.
        tl.store(own_keys + tokens, tl.where(inside, _float_order(summed), INT32_MIN))
    # Other threads read what was stored.
    tl.debug_barrier()
    lowest = tl.full((), INT32_MIN + 1, tl.int32)
    highest = tl.full((), INT32_MAX, tl.int32)
    bound, reaching = _kth_highest(own_keys, lowest, highest, m, k, BLOCK)
    if common is None:
        _store_tokens(own_keys, bound, reaching - k, out + row * k, m, BLOCK)
    else:
        _store_flags(own_keys, bound, reaching - k, out + row * length, m, BLOCK)
        rows = tl.num_programs(0)
        for start in range(0, rows, BLOCK):
            others = start + tl.arange(0, BLOCK)
            tl.store(common + row * rows + others, 0, mask=others < rows)


@triton.jit(do_not_specialize=["row_stride", "m"])
def _vote_kernel(
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
    """A program per block of tokens: keys of the vote, and members that two sets have in common.

    Keys int64 [length] are ordered by votes, then by summed scores; beyond m they are -1. Common
    members are added to `common` [HEADS, HEADS], above the diagonal.
    """
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    heads = tl.arange(0, HEADS_PADDED)
    inside = tokens < m
    places = flags + heads.to(tl.int64)[:, None] * length + tokens[None, :]
    members = tl.load(places, mask=heads[:, None] < HEADS, other=0).to(tl.int32)
    votes = tl.sum(members, 0)
    # In float64, because the oracle tells sums apart that are one float32.
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
def _choice_kernel(
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
    """One program: the decision, the similarity's bits and the k tokens with the highest keys."""
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
    _store_tokens(keys, bound, reaching - k, out + HEADER, m, BLOCK)


@triton.jit
def _float_order(numbers: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order; NaN is highest, and INT32_MIN does not come out."""
    bits = numbers.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & INT32_MAX)
    return tl.where(numbers == numbers, ordered, INT32_MAX)


@triton.jit
def _vote_order(votes: tl.tensor, summed: tl.tensor, DROPPED_BITS: tl.constexpr) -> tl.tensor:
    """Votes int32 and sums float64 >= 0 -> int64 >= 0, by votes and then by sums.

    Of a sum as many bits are dropped as votes need beyond two. The oracle, which adds a share of
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
    """A bound that at least k of m keys reach, and how many do.

    More than k do only if so many are equal to the bound that k of them cannot be told apart. Keys
    beyond m, up to whole blocks, are below `lowest`.
    """
    low, high = lowest, highest
    reaching = tl.zeros((), tl.int32) + m
    # Keys that reach `low` are at least k, keys above `high` are fewer.
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
    """The range after `count` keys were found to reach a bound; ascending bounds, one by one."""
    enough = count >= k
    return (
        tl.where(enough, bound, low),
        tl.where(enough, high, tl.minimum(high, bound - 1)),
        tl.where(enough, count, reaching),
    )


@triton.jit
def _between(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The mean, rounded up, without overflow: above `low`, unless both are equal."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _store_tokens(
    keys: tl.tensor,
    bound: tl.tensor,
    spare: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Tokens whose keys reach the bound, ascending, less the first `spare` that are equal to it."""
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
def _store_flags(
    keys: tl.tensor,
    bound: tl.tensor,
    spare: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """1 for tokens that `_store_tokens` would store, else 0, in whole blocks."""
    better = tl.zeros((), tl.int32)
    equal = tl.zeros((), tl.int32)
    for start in range(0, m, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        taken, _, _, better, equal = _take(keys, tokens, bound, spare, better, equal)
        tl.store(out + tokens, taken.to(tl.uint8))


@triton.jit
def _take(
    keys: tl.tensor,
    tokens: tl.tensor,
    bound: tl.tensor,
    spare: tl.tensor,
    better: tl.tensor,
    equal: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Tokens of a block to take, and how many are better and equal before each and so far."""
    own = tl.load(keys + tokens)
    is_better = own > bound
    is_equal = own == bound
    # Both counts in one scan; a block has fewer than 2**15 tokens.
    both = is_better.to(tl.int32) | (is_equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    better_before = better + (before & 0xFFFF)
    equal_before = equal + (before >> 16)
    taken = is_better | (is_equal & (equal_before >= spare))
    total = tl.sum(both, 0)
    return taken, better_before, equal_before, better + (total & 0xFFFF), equal + (total >> 16)
