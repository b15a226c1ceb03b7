"""The kernels of `impress_sglang.triton.scores`.

Two launches, as in split-key attention (https://arxiv.org/abs/2311.01282), without its values:

1. `row_sums`: each program takes some rows of queries and some blocks of keys, and writes the
   logarithm of the sum of the rows' exponentials over these keys.
2. `weight_sums`: each program takes one block of prefix keys, adds up those parts for each row, and
   sums the normalised weights of all rows in each column.

The weights themselves stay in registers. A row is a new token and one of the query heads that share
a KV head, so that a key which is loaded serves them all. Exponentials and logarithms have base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kernels have so many parameters that one on each line would hide the code.
# fmt: off


@triton.jit
def _tile_rows(
    first: tl.tensor, num_new: tl.tensor,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Token and query head in its group of each row of a tile, and whether there is such a row."""
    rows = tl.arange(0, BLOCK_ROWS)
    tokens = first + rows // GROUP_PAD
    members = rows % GROUP_PAD
    return tokens, members, (tokens < num_new) & (members < GROUP)


@triton.jit
def _load_vectors(
    vectors: tl.tensor, rows: tl.tensor, valid: tl.tensor,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FILL: tl.constexpr = 0.0,
) -> tl.tensor:
    """[len(rows), BLOCK_DIM] from the offsets `rows`, FILL in rows and channels that are not."""
    channels = tl.arange(0, BLOCK_DIM)
    mask = valid[:, None] & (channels < DIM)[None, :]
    return tl.load(vectors + rows[:, None] + channels[None, :], mask=mask, other=FILL)


@triton.jit
def _load_keys(
    vectors: tl.tensor, slots: tl.tensor, stride: tl.tensor, tokens: tl.tensor, valid: tl.tensor,
    DIM: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Keys [BLOCK_KEYS, BLOCK_DIM] of the head at `vectors`; `tokens` are those of the batch."""
    if HAS_SLOTS:
        rows = tl.load(slots + tokens, mask=valid, other=0).to(tl.int64)
    else:
        rows = tokens.to(tl.int64)
    return _load_vectors(vectors, rows * stride, valid, DIM, BLOCK_DIM)


@triton.jit
def _load_prefix(
    prefix: tl.tensor, slots: tl.tensor, stride: tl.tensor, request: tl.tensor, tokens: tl.tensor,
    DIM: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Keys [BLOCK_KEYS, BLOCK_DIM] of a request's tokens."""
    valid = tokens < tl.load(request + 5)
    first = tl.load(request + 4)
    return _load_keys(prefix, slots, stride, first + tokens, valid, DIM, HAS_SLOTS, BLOCK_DIM)


@triton.jit
def _products(queries: tl.tensor, keys: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """[BLOCK_ROWS, BLOCK_KEYS] float32."""
    if WIDEN:
        return tl.dot(queries.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision="ieee")
    else:
        return tl.dot(queries, tl.trans(keys), input_precision="ieee")


@triton.jit
def _fold(
    peak: tl.tensor, total: tl.tensor, logits: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Add logits along axis 1 to the running maximum and the sum of exponentials below it."""
    highest = tl.maximum(peak, tl.max(logits, 1))
    # A row that has seen nothing yet has -inf, from which nothing can be subtracted.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
    return highest, total


@triton.jit
def _log_sum(peak: tl.tensor, total: tl.tensor) -> tl.tensor:
    """What `_fold` has added up, as a logarithm; -inf where that was nothing."""
    return tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


@triton.jit(
    do_not_specialize=["num_new"],
    do_not_specialize_on_alignment=["prefix_slots", "resident_slots", "new_slots"],
)
def row_sums(
    queries: tl.tensor, query_stride: tl.tensor, query_head_stride: tl.tensor,
    prefix: tl.tensor, prefix_slots: tl.tensor, prefix_heads: tl.tensor,
    prefix_stride: tl.tensor, prefix_head_stride: tl.tensor,
    resident: tl.tensor, resident_slots: tl.tensor, resident_heads: tl.tensor,
    resident_stride: tl.tensor, resident_head_stride: tl.tensor,
    new: tl.tensor, new_slots: tl.tensor, new_heads: tl.tensor,
    new_stride: tl.tensor, new_head_stride: tl.tensor,
    requests: tl.tensor, items: tl.tensor, partial: tl.tensor, scale: tl.tensor, num_new: tl.tensor,
    DIM: tl.constexpr, GROUP: tl.constexpr, PREFIX_SLOTS: tl.constexpr,
    RESIDENT_SLOTS: tl.constexpr, NEW_SLOTS: tl.constexpr, WIDEN: tl.constexpr,
    GROUP_PAD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Logarithms of the sums of exponentials per part -> partial [S, Hk, N, padded g]."""
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    item = items + tl.program_id(0) * 8
    begin, end = tl.load(item + 3), tl.load(item + 4)
    request = requests + tl.load(item) * 8
    new_first, new_count = tl.load(request), tl.load(request + 1)
    resident_first, resident_count = tl.load(request + 2), tl.load(request + 3)
    prefix_count = tl.load(request + 5)
    prefix_begin = (resident_count + BLOCK_KEYS - 1) // BLOCK_KEYS
    new_begin = prefix_begin + (prefix_count + BLOCK_KEYS - 1) // BLOCK_KEYS
    prefix += tl.load(prefix_heads + head).to(tl.int64) * prefix_head_stride
    resident += tl.load(resident_heads + head).to(tl.int64) * resident_head_stride
    new += tl.load(new_heads + head).to(tl.int64) * new_head_stride

    tokens, members, valid = _tile_rows(
        tl.load(item + 1), new_count, GROUP, GROUP_PAD, BLOCK_ROWS
    )
    rows = (new_first + tokens).to(tl.int64)
    heads = head * GROUP + members
    tile = _load_vectors(
        queries, rows * query_stride + heads * query_head_stride, valid, DIM, BLOCK_DIM
    )
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    within = tl.arange(0, BLOCK_KEYS)
    for block in range(begin, tl.minimum(end, prefix_begin)):
        columns = block * BLOCK_KEYS + within
        keys = _load_keys(
            resident, resident_slots, resident_stride, resident_first + columns,
            columns < resident_count, DIM, RESIDENT_SLOTS, BLOCK_DIM,
        )
        seen = (columns < resident_count)[None, :]
        logits = _products(tile, keys, WIDEN) * scale
        peak, total = _fold(peak, total, tl.where(seen, logits, float("-inf")))
    for block in range(tl.maximum(begin, prefix_begin), tl.minimum(end, new_begin)):
        columns = (block - prefix_begin) * BLOCK_KEYS + within
        keys = _load_prefix(
            prefix, prefix_slots, prefix_stride, request, columns, DIM, PREFIX_SLOTS, BLOCK_DIM,
        )
        seen = (columns < prefix_count)[None, :]
        logits = _products(tile, keys, WIDEN) * scale
        peak, total = _fold(peak, total, tl.where(seen, logits, float("-inf")))
    for block in range(tl.maximum(begin, new_begin), end):
        columns = (block - new_begin) * BLOCK_KEYS + within
        keys = _load_keys(
            new, new_slots, new_stride, new_first + columns, columns < new_count, DIM, NEW_SLOTS,
            BLOCK_DIM,
        )
        seen = columns[None, :] <= tokens[:, None]
        logits = _products(tile, keys, WIDEN) * scale
        peak, total = _fold(peak, total, tl.where(seen, logits, float("-inf")))

    part = (tl.load(item + 2) * num_heads + head).to(tl.int64)
    first = part * num_new + new_first + tl.load(item + 1)
    out = partial + first * GROUP_PAD + tl.arange(0, BLOCK_ROWS)
    tl.store(out, _log_sum(peak, total), mask=valid)


@triton.jit
def _combine(
    partial: tl.tensor, valid: tl.tensor, parts: tl.tensor, stride: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
) -> tl.tensor:
    """Logarithm of the sum of exponentials of each row over all keys; inf where there is no row."""
    # As many at once as registers hold: each iteration waits for memory.
    block_parts: tl.constexpr = 4096 // BLOCK_ROWS
    rows = tl.arange(0, BLOCK_ROWS)
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    for first in range(0, parts, block_parts):
        each = first + tl.arange(0, block_parts)
        mask = valid[:, None] & (each < parts)[None, :]
        cells = partial + rows[:, None] + each[None, :] * stride
        peak, total = _fold(peak, total, tl.load(cells, mask=mask, other=float("-inf")))
    return tl.where(valid, _log_sum(peak, total), float("inf"))


@triton.jit(
    do_not_specialize=["num_new", "num_prefix"], do_not_specialize_on_alignment=["prefix_slots"]
)
def weight_sums(
    queries: tl.tensor, query_stride: tl.tensor, query_head_stride: tl.tensor,
    prefix: tl.tensor, prefix_slots: tl.tensor, prefix_heads: tl.tensor,
    prefix_stride: tl.tensor, prefix_head_stride: tl.tensor,
    requests: tl.tensor, items: tl.tensor, partial: tl.tensor, sums: tl.tensor, scale: tl.tensor,
    num_new: tl.tensor, num_prefix: tl.tensor,
    DIM: tl.constexpr, GROUP: tl.constexpr, PREFIX_SLOTS: tl.constexpr, WIDEN: tl.constexpr,
    SQUARES: tl.constexpr, GROUP_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> None:
    """Weights of a block of prefix keys, summed over the new tokens -> sums [Hq, M]."""
    block_tokens: tl.constexpr = BLOCK_ROWS // GROUP_PAD
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    item = items + tl.program_id(0) * 8
    request = requests + tl.load(item) * 8
    columns = tl.load(item + 1) + tl.arange(0, BLOCK_KEYS)
    new_first, new_count = tl.load(request), tl.load(request + 1)
    parts = tl.load(request + 6)
    part_stride = num_heads.to(tl.int64) * num_new * GROUP_PAD
    partial += (head.to(tl.int64) * num_new + new_first) * GROUP_PAD
    prefix += tl.load(prefix_heads + head).to(tl.int64) * prefix_head_stride
    keys = _load_prefix(
        prefix, prefix_slots, prefix_stride, request, columns, DIM, PREFIX_SLOTS, BLOCK_DIM,
    )
    weights = tl.full([BLOCK_ROWS, BLOCK_KEYS], 0.0, tl.float32)
    for first in range(0, new_count, block_tokens):
        tokens, members, valid = _tile_rows(first, new_count, GROUP, GROUP_PAD, BLOCK_ROWS)
        rows = (new_first + tokens).to(tl.int64)
        heads = head * GROUP + members
        tile = _load_vectors(
            queries, rows * query_stride + heads * query_head_stride, valid, DIM, BLOCK_DIM
        )
        products = _products(tile, keys, WIDEN)
        log_sums = _combine(partial + first * GROUP_PAD, valid, parts, part_stride, BLOCK_ROWS)
        each = tl.exp2(products * scale - log_sums[:, None])
        weights += each * each if SQUARES else each

    # Rows of one query head are summed only here: in the loop that would cost exchanges each time.
    columns_of_heads = tl.sum(tl.reshape(weights, (block_tokens, GROUP_PAD, BLOCK_KEYS)), 0)
    members = tl.arange(0, GROUP_PAD)
    heads = (head * GROUP + members).to(tl.int64)
    out = sums + heads[:, None] * num_prefix + tl.load(request + 4) + columns[None, :]
    mask = (members < GROUP)[:, None] & (columns < tl.load(request + 5))[None, :]
    tl.store(out, columns_of_heads, mask=mask)
