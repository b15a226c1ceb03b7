"""Importance of prefix tokens on a GPU; `paper.scores.column_sums` defines the numbers.

1. `row_sums`: each program takes a tile of queries of one head, and writes the logarithm of the sum
   of each row's exponentials over all keys that it sees.
2. `weight_sums`: each program takes a tile of prefix keys, and sums the weights of all rows.

Weights stay in registers. Exponentials and logarithms have base 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from impress_sglang.errors import UnsupportedError
from impress_sglang.triton import power_of_two

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def column_sums(
    queries: Tensor,
    prefix_keys: Tensor,
    pool_keys: Tensor,
    resident_rows: Tensor,
    new_keys: Tensor,
    scaling: float,
) -> Tensor:
    """The same as `impress_sglang.paper.scores.column_sums`, on a GPU or in Triton's interpreter.

    Products are summed in float32; float32 inputs are not rounded to TF32. It raises
    `UnsupportedError` if the dtype of queries and keys has no kernel.
    """
    if queries.dtype not in DTYPES:
        raise UnsupportedError(f"no scoring kernel for queries of {queries.dtype}")
    (num_queries, num_query_heads, dim), num_prefix = queries.shape, len(prefix_keys)
    sums = torch.zeros(num_query_heads, num_prefix, device=queries.device)
    if not num_prefix or not num_queries:
        return sums
    heads = prefix_keys.shape[1]
    before = pool_keys.index_select(0, resident_rows)[:, :heads]
    # [Hk, keys, D]: what a query sees, in the order of positions.
    keys = torch.cat([before, prefix_keys, new_keys[:, :heads]]).transpose(0, 1).contiguous()
    rows = queries.transpose(0, 1).contiguous()
    logs = torch.empty(num_query_heads, num_queries, device=queries.device)
    wide = queries.dtype == torch.float32
    tile_rows, tile_keys = (16, 32) if wide else (64, 64)
    common = rows, keys, logs, scaling * math.log2(math.e)
    counts = num_queries, keys.shape[1], len(before), num_prefix
    constants = {
        "GROUP": num_query_heads // heads,
        "DIM": dim,
        "BLOCK_DIM": max(16, power_of_two(dim)),
        "ROWS": tile_rows,
        "KEYS": tile_keys,
        # The interpreter takes the bits of bfloat16 numbers for integers when it multiplies.
        "WIDEN": not isinstance(row_sums, triton.JITFunction),
    }
    row_sums[(triton.cdiv(num_queries, tile_rows), num_query_heads)](*common, *counts, **constants)
    grid = triton.cdiv(num_prefix, tile_keys), num_query_heads
    weight_sums[grid](*common, sums, *counts, **constants)
    return sums


@triton.jit
def _tile(
    vectors: tl.tensor, first: tl.tensor, count: tl.tensor,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SIZE: tl.constexpr, WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load contiguous vectors from number `first` on: [SIZE, BLOCK_DIM], zeros where none are."""
    number, channels = first + tl.arange(0, SIZE), tl.arange(0, BLOCK_DIM)
    mask = (number < count)[:, None] & (channels < DIM)[None, :]
    tile = tl.load(vectors + number.to(tl.int64)[:, None] * DIM + channels, mask=mask, other=0.0)
    return tile.to(tl.float32) if WIDEN else tile


# Counts differ from request to request.
@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_before", "num_prefix"])
def row_sums(
    queries: tl.tensor, keys: tl.tensor, logs: tl.tensor, scale: tl.tensor,
    num_queries: tl.tensor, num_keys: tl.tensor, num_before: tl.tensor, num_prefix: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Write the logarithms of the sums of exponentials to logs [Hq, n]."""
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS
    keys += head // GROUP * num_keys * DIM
    queries += head * num_queries * DIM
    tile = _tile(queries, first, num_queries, DIM, BLOCK_DIM, ROWS, WIDEN)
    numbers = first + tl.arange(0, ROWS)
    # Query i sees all that was there before, and new tokens up to its own.
    last = num_before + num_prefix + numbers
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    for start in range(0, tl.minimum(num_before + num_prefix + first + ROWS, num_keys), KEYS):
        other = _tile(keys, start, num_keys, DIM, BLOCK_DIM, KEYS, WIDEN)
        logits = tl.dot(tile, tl.trans(other), input_precision="ieee") * scale
        columns = start + tl.arange(0, KEYS)
        logits = tl.where(columns[None, :] <= last[:, None], logits, float("-inf"))
        # The first key is seen by all, so that no peak is -inf after it.
        highest = tl.maximum(peak, tl.max(logits, 1))
        total = total * tl.exp2(peak - highest) + tl.sum(tl.exp2(logits - highest[:, None]), 1)
        peak = highest
    tl.store(logs + head * num_queries + numbers, peak + tl.log2(total), mask=numbers < num_queries)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_before", "num_prefix"])
def weight_sums(
    queries: tl.tensor, keys: tl.tensor, logs: tl.tensor, scale: tl.tensor, sums: tl.tensor,
    num_queries: tl.tensor, num_keys: tl.tensor, num_before: tl.tensor, num_prefix: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Sum the weights of a tile of prefix keys over the queries, into sums [Hq, m]."""
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * KEYS
    keys += (head // GROUP * num_keys + num_before) * DIM
    queries += head * num_queries * DIM
    prefix_keys = _tile(keys, first, num_prefix, DIM, BLOCK_DIM, KEYS, WIDEN)
    weights = tl.full([ROWS, KEYS], 0.0, tl.float32)
    for start in range(0, num_queries, ROWS):
        tile = _tile(queries, start, num_queries, DIM, BLOCK_DIM, ROWS, WIDEN)
        numbers = start + tl.arange(0, ROWS)
        log = tl.load(
            logs + head * num_queries + numbers, mask=numbers < num_queries, other=float("inf")
        )
        products = tl.dot(tile, tl.trans(prefix_keys), input_precision="ieee")
        weights += tl.exp2(products * scale - log[:, None])
    columns = first + tl.arange(0, KEYS)
    out = sums + head * num_prefix + columns
    tl.store(out, tl.sum(weights, 0), mask=columns < num_prefix)
