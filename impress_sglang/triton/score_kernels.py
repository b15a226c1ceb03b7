"""The kernels of `impress_sglang.triton.scores`.

Two launches, as in split-key attention (https://arxiv.org/abs/2311.01282), without its values:

1. `row_sums`: each program takes some rows of queries and some blocks of keys, and writes the
   logarithm of the sum of the rows' exponentials over these keys.
2. `weight_sums`: each program takes one block of prefix keys, adds up those parts for each row, and
   sums the normalised weights of all rows in each column.

The weights themselves stay in registers. A row is the query of a new token in one of the heads that
share a KV head, so that a loaded key serves all of these heads. Exponentials and logarithms have
base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kernels have so many parameters that one per line would hide the code.
# fmt: off


@triton.jit
def _tile_rows(
    first: tl.tensor, num_queries: tl.tensor,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """For each row of a tile its token, its query head in the group, and whether the row exists."""
    rows = tl.arange(0, BLOCK_ROWS)
    tokens = first + rows // GROUP_PAD
    members = rows % GROUP_PAD
    return tokens, members, (tokens < num_queries) & (members < GROUP)


@triton.jit
def _load_vectors(
    vectors: tl.tensor, rows: tl.tensor, valid: tl.tensor,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FILL: tl.constexpr = 0.0,
) -> tl.tensor:
    """Load [len(rows), BLOCK_DIM] at the offsets `rows`; FILL in rows and channels not there."""
    channels = tl.arange(0, BLOCK_DIM)
    mask = valid[:, None] & (channels < DIM)[None, :]
    return tl.load(vectors + rows[:, None] + channels[None, :], mask=mask, other=FILL)


@triton.jit
def _load_keys(
    vectors: tl.tensor, stride: tl.tensor, rows: tl.tensor, tokens: tl.tensor, count: tl.tensor,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """Load keys [BLOCK_KEYS, BLOCK_DIM] of the head at `vectors`, which has `count` tokens.

    Token j is row `rows[j]`, or row j.
    """
    row = tokens.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + tokens, mask=tokens < count, other=0)
    return _load_vectors(vectors, row * stride, tokens < count, DIM, BLOCK_DIM)


@triton.jit
def _products(queries: tl.tensor, keys: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """Products of queries and keys, [BLOCK_ROWS, BLOCK_KEYS] float32."""
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
    # A row that has seen no key yet has -inf, which must not be subtracted from itself.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = total * tl.exp2(peak - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
    return highest, total


@triton.jit
def _log_sum(peak: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The logarithm of what `_fold` has added up; -inf where that was nothing."""
    return tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))


# Counts, and where the slots of a prefix begin in memory, differ from request to request.
@triton.jit(
    do_not_specialize=[
        "num_queries", "num_prefix", "parts", "num_resident", "part_blocks",
    ],
    do_not_specialize_on_alignment=["resident_rows"],
)
def row_sums(
    queries: tl.tensor, query_stride: tl.tensor, query_head_stride: tl.tensor,
    prefix: tl.tensor, prefix_stride: tl.tensor, prefix_head_stride: tl.tensor,
    resident: tl.tensor, resident_stride: tl.tensor, resident_head_stride: tl.tensor,
    resident_rows: tl.tensor,
    new: tl.tensor, new_stride: tl.tensor, new_head_stride: tl.tensor,
    key_heads: tl.tensor, partial: tl.tensor, scale: tl.tensor,
    num_queries: tl.tensor, num_prefix: tl.tensor, parts: tl.tensor,
    num_resident: tl.tensor, part_blocks: tl.tensor,
    GROUP_PAD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr,
) -> None:
    """Write the logarithms of the sums of exponentials per part to partial [S, Hk, Q, padded g].

    One program per tile of queries and part of the keys, and per head.
    """
    block_tokens: tl.constexpr = BLOCK_ROWS // GROUP_PAD
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    first = (tl.program_id(0) // parts) * block_tokens
    part = tl.program_id(0) % parts
    prefix_begin = tl.cdiv(num_resident, BLOCK_KEYS)
    new_begin = prefix_begin + tl.cdiv(num_prefix, BLOCK_KEYS)
    begin = part * part_blocks
    # New tokens after those of the tile are not seen.
    last = tl.minimum(first + block_tokens, num_queries)
    seen_blocks = new_begin + tl.cdiv(last, BLOCK_KEYS)
    end = tl.minimum(begin + part_blocks, seen_blocks)
    key_head = tl.load(key_heads + head).to(tl.int64)
    prefix += head.to(tl.int64) * prefix_head_stride
    resident += key_head * resident_head_stride
    new += key_head * new_head_stride

    tokens, members, valid = _tile_rows(first, num_queries, GROUP, GROUP_PAD, BLOCK_ROWS)
    heads = head * GROUP + members
    tile = _load_vectors(
        queries, tokens.to(tl.int64) * query_stride + heads * query_head_stride, valid, DIM,
        BLOCK_DIM,
    )
    peak = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.full([BLOCK_ROWS], 0.0, tl.float32)
    within = tl.arange(0, BLOCK_KEYS)
    for block in range(begin, tl.minimum(end, prefix_begin)):
        columns = block * BLOCK_KEYS + within
        keys = _load_keys(
            resident, resident_stride, resident_rows, columns, num_resident, DIM, BLOCK_DIM
        )
        seen = (columns < num_resident)[None, :]
        logits = _products(tile, keys, WIDEN) * scale
        peak, total = _fold(peak, total, tl.where(seen, logits, float("-inf")))
    for block in range(tl.maximum(begin, prefix_begin), tl.minimum(end, new_begin)):
        columns = (block - prefix_begin) * BLOCK_KEYS + within
        keys = _load_keys(prefix, prefix_stride, None, columns, num_prefix, DIM, BLOCK_DIM)
        seen = (columns < num_prefix)[None, :]
        logits = _products(tile, keys, WIDEN) * scale
        peak, total = _fold(peak, total, tl.where(seen, logits, float("-inf")))
    for block in range(tl.maximum(begin, new_begin), end):
        columns = (block - new_begin) * BLOCK_KEYS + within
        keys = _load_keys(new, new_stride, None, columns, last, DIM, BLOCK_DIM)
        seen = columns[None, :] <= tokens[:, None]
        logits = _products(tile, keys, WIDEN) * scale
        peak, total = _fold(peak, total, tl.where(seen, logits, float("-inf")))

    place = (part * num_heads + head).to(tl.int64) * num_queries + first
    out = partial + place * GROUP_PAD + tl.arange(0, BLOCK_ROWS)
    tl.store(out, _log_sum(peak, total), mask=valid)


@triton.jit
def _combine(
    partial: tl.tensor, valid: tl.tensor, parts: tl.tensor, stride: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
) -> tl.tensor:
    """Logarithm of each row's sum of exponentials over all keys; inf where there is no row."""
    # As many parts at once as registers hold: each iteration waits for memory.
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
    do_not_specialize=["num_queries", "num_prefix", "parts"],
)
def weight_sums(
    queries: tl.tensor, query_stride: tl.tensor, query_head_stride: tl.tensor,
    prefix: tl.tensor, prefix_stride: tl.tensor, prefix_head_stride: tl.tensor,
    partial: tl.tensor, sums: tl.tensor, scale: tl.tensor,
    num_queries: tl.tensor, num_prefix: tl.tensor, parts: tl.tensor,
    GROUP_PAD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr,
) -> None:
    """Sum the weights of a block of prefix keys over the queries, into sums [Hq, m].

    One program per block and head.
    """
    block_tokens: tl.constexpr = BLOCK_ROWS // GROUP_PAD
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    columns = tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    part_stride = num_heads.to(tl.int64) * num_queries * GROUP_PAD
    partial += head.to(tl.int64) * num_queries * GROUP_PAD
    prefix += head.to(tl.int64) * prefix_head_stride
    keys = _load_keys(prefix, prefix_stride, None, columns, num_prefix, DIM, BLOCK_DIM)
    weights = tl.full([BLOCK_ROWS, BLOCK_KEYS], 0.0, tl.float32)
    for first in range(0, num_queries, block_tokens):
        tokens, members, valid = _tile_rows(first, num_queries, GROUP, GROUP_PAD, BLOCK_ROWS)
        heads = head * GROUP + members
        tile = _load_vectors(
            queries, tokens.to(tl.int64) * query_stride + heads * query_head_stride, valid, DIM,
            BLOCK_DIM,
        )
        products = _products(tile, keys, WIDEN)
        log_sums = _combine(partial + first * GROUP_PAD, valid, parts, part_stride, BLOCK_ROWS)
        weights += tl.exp2(products * scale - log_sums[:, None])

    # Rows of a query head are summed only here: in the loop that would take exchanges each time.
    columns_of_heads = tl.sum(tl.reshape(weights, (block_tokens, GROUP_PAD, BLOCK_KEYS)), 0)
    members = tl.arange(0, GROUP_PAD)
    heads = (head * GROUP + members).to(tl.int64)
    out = sums + heads[:, None] * num_prefix + columns[None, :]
    mask = (members < GROUP)[:, None] & (columns < num_prefix)[None, :]
    tl.store(out, columns_of_heads, mask=mask)
