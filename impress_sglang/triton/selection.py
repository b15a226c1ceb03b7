"""Selects tokens by scores on the device: top-k sets, and the paper's similarity and vote.

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
from torch import Tensor

from impress_sglang.triton.selection_kernels import choice_kernel, top_kernel, vote_kernel

# Elements of a choice's buffer before its tokens: the decision, and the similarity's bits.
HEADER = 2

# A row of keys is read in blocks; two sizes, so that few variants are compiled.
SMALL_BLOCK, SMALL_WARPS = 2048, 8
LARGE_BLOCK, LARGE_WARPS = 8192, 32
# Flags that a program of the vote holds at once.
VOTE_FLAGS = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What the probe heads agree on: IMPRESS 4.3.

    `buffer` is int32 [HEADER + k]; the decision and similarity can be read after `to_host`.
    """

    buffer: Tensor

    def to_host(self) -> Choice:
        """A copy in CPU memory; waits for that copy alone."""
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
    but always k in all. A NaN counts as the highest score. One launch, which is not waited for.

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
    top_kernel[(rows,)](
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

    Oracle: `importance.selectors.PaperSelector` with `mean_jaccard` and `vote` of
    `importance.selection`. Three launches, which are not waited for.

    Args:
        scores: float32 [Hp, m] >= 0 of the probe heads, each row contiguous.
        k: tokens per head, from 1 to m.
        threshold: heads are alike if the similarity is greater; a single head always is.

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
    top_kernel[(heads,)](
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
    vote_kernel[(length // vote_block,)](
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
    choice_kernel[(1,)](
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
    """The largest float32 that is not greater than `number`.

    Kernels take float32. A float32 similarity is greater than `number` exactly if it is greater
    than this.
    """
    rounded = np.float32(number)
    if float(rounded) > number:
        rounded = np.nextafter(rounded, np.float32(-np.inf))
    return float(rounded)
