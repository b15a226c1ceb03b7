"""Copies pages from anywhere in memory to anywhere, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from impress_sglang.triton import power_of_two

# What one program moves at most: each thread has several loads of 16 bytes in flight.
PIECE_BYTES = 4096
# The most bytes that a thread moves at once.
WORD_BYTES = 16

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}


def copy_pages(table: Tensor, page_bytes: int, grain: int) -> None:
    """Copy pages, in one launch that is not waited for.

    `table` int64 [2 * n], readable by the device, has the addresses of n pages, then those where
    they go; no page that is read is written. Neither it nor the sources may change until the device
    is done. Every address and `page_bytes` are multiples of `grain`, a power of two, at most
    `WORD_BYTES`.
    """
    count = len(table) // 2
    if not count:
        return
    word = _WORDS[grain]
    size = word.primitive_bitwidth // 8
    words = min(page_bytes, PIECE_BYTES) // size
    block = power_of_two(words)
    sizes = {"WORD": word, "WORDS": page_bytes // size, "BLOCK": block, "GRAIN": grain}
    _copy_kernel[(count, -(-(page_bytes // size) // block))](table, count, **sizes, num_warps=2)


# How many there are, and where the table begins in memory, differ from launch to launch.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table"])
def _copy_kernel(
    table: tl.tensor, count: tl.tensor, WORD: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, GRAIN: tl.constexpr,
) -> None:  # fmt: skip
    """One program per page and piece of it."""
    page = tl.program_id(0)
    source = tl.load(table + page).to(tl.pointer_type(WORD))
    target = tl.load(table + count + page).to(tl.pointer_type(WORD))
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WORDS
    # The compiler sees no divisibility in loaded values; for a pointer the hint is in bytes.
    words = tl.load(tl.multiple_of(source, GRAIN) + columns, mask=mask)
    tl.store(tl.multiple_of(target, GRAIN) + columns, words, mask=mask)
