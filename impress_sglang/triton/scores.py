"""Importance of prefix tokens on a GPU: column sums of the attention weights (H2O's metric).

Stage: probe. In: queries of the new tokens of a batch, and keys where they stand: in slots of a
pool, in a staging buffer, or as codes of a sketch. Out: one score per query head and prefix token.
`impress_sglang.importance.scores.column_sums` is the reference, and defines the numbers.

Two launches, as in split-key attention (https://arxiv.org/abs/2311.01282), without its values:

1. Each program takes some rows of queries and some blocks of keys, and writes the logarithm of the
   sum of the rows' exponentials over these keys.
2. Each program takes one block of prefix keys, adds up those parts for each row, and sums the
   normalised weights of all rows in each column.

The weights themselves stay in registers. A row is a new token and one of the query heads that share
a KV head, so that a key which is loaded serves them all. Exponentials and logarithms have base 2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from impress_sglang.errors import UnsupportedError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Programs of the first launch per multiprocessor: enough to hide the latency of each other's loads.
WAVES = 2
# What stands for the number of multiprocessors in Triton's interpreter.
INTERPRETED_PROCESSORS = 4
# Numbers per request and per program in a plan; 32 bytes, so that each part stays aligned.
FIELDS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRows:
    """Keys of the tokens of one kind, for all requests of a batch, request after request.

    Attributes:
        vectors: [rows, heads, D] on the device of the queries and of their dtype, after rotation.
            Any strides, the last is 1; a slice of a pool need not be copied.
        slots: int32 or int64 [tokens] on that device, the row of each token; None if row i is
            token i. Rows that no token names are never read.
        heads: the head of `vectors` that belongs to each probed KV head; None: all, in order.
    """

    vectors: Tensor
    slots: Tensor | None = None
    heads: tuple[int, ...] | None = None

    @property
    def num_heads(self) -> int:
        """Probed KV heads, Hk."""
        return self.vectors.shape[1] if self.heads is None else len(self.heads)


@dataclasses.dataclass(frozen=True, slots=True)
class SketchRows:
    """Keys of prefixes in few bits, see `impress_sglang.storage.sketch.sketch_keys`.

    Attributes:
        codes: uint8 [bytes, G, D] on the device of the queries; the last stride is 1. The codes of
            several requests stand in one buffer, and each begins in a byte of its own.
        table: float32 [2, G, D], contiguous, what code 0 stands for and the step; with several
            requests [B, 2, G, D].
        bits: per element; 2, 4 or 8.
        start: the first wanted token, counted from the first one in `codes` (as in
            `restore_keys`); with several requests one number for each, all counted from the first
            token in `codes`.
    """

    codes: Tensor
    table: Tensor
    bits: int
    start: int | tuple[int, ...] = 0

    @property
    def num_heads(self) -> int:
        """KV heads, all of which are probed."""
        return self.codes.shape[1]


def column_sums(
    queries: Tensor,
    prefix: KeyRows | SketchRows,
    resident: KeyRows | None,
    new_keys: KeyRows | Tensor,
    scaling: float,
    *,
    new_lengths: Sequence[int],
    prefix_lengths: Sequence[int],
    resident_lengths: Sequence[int],
) -> Tensor:
    """Attention weights that the new tokens give to each prefix token, summed over new tokens.

    Per request the same numbers as `impress_sglang.importance.scores.column_sums`: the softmax runs
    over [resident, prefix, causal new tokens], and query head `h` uses probed KV head
    `h // (Hq // Hk)`. Products are summed in float32; float32 inputs are not rounded to TF32.

    Nothing waits for the device. The work is laid out on the host from the lengths, which is
    remembered for the next layer of the same batch. Queries and keys of one call are on the current
    CUDA device, or on the CPU in Triton's interpreter. A new combination of dtypes, D, group and
    tile (see `tile_shape`) is compiled when it first occurs.

    Args:
        queries: [N, Hq, D] of the new tokens, request after request, after rotation; float16,
            bfloat16 or float32. Any strides, the last is 1.
        prefix: keys of the stored tokens.
        resident: keys of the tokens before them that are in the device pool; None if there are
            none.
        new_keys: keys of the new tokens; a tensor [N, Hk, D] stands for `KeyRows(tensor)`.
        scaling: factor of the attention logits.
        new_lengths: new tokens n of each request; they sum to N.
        prefix_lengths: prefix tokens m of each request; 0 is allowed.
        resident_lengths: resident tokens of each request; 0 is allowed.

    Returns:
        [Hq, sum of prefix_lengths] float32 on the device of `queries`, request after request.

    Raises:
        UnsupportedError: the dtype of queries or keys has no kernel.
    """
    new = new_keys if isinstance(new_keys, KeyRows) else KeyRows(new_keys)
    before = new if resident is None else resident
    lengths = Lengths(tuple(new_lengths), tuple(prefix_lengths), tuple(resident_lengths))
    _check(queries, prefix, resident, new, lengths)
    num_new, num_query_heads, dim = queries.shape
    num_prefix, num_heads, device = sum(lengths.prefix), prefix.num_heads, queries.device
    sums = torch.empty(num_query_heads, num_prefix, dtype=torch.float32, device=device)
    if not num_prefix:
        return sums

    group = num_query_heads // num_heads
    bits = prefix.bits if isinstance(prefix, SketchRows) else 0
    processors, stream = _processors(device), _stream(device)
    tile = tile_shape(lengths, num_heads, group, dim, queries.dtype, bits, processors)
    starts = _starts(prefix, len(lengths.new))
    plan = _plan(lengths, starts, tile, num_heads, processors, device, stream)
    partial = torch.empty(
        plan.splits, num_heads, num_new, tile.group, dtype=torch.float32, device=device
    )
    constants = {
        "GROUP_PAD": tile.group,
        "BLOCK_ROWS": tile.rows,
        "BLOCK_KEYS": tile.keys,
        "BLOCK_DIM": tile.dim,
        "DIM": dim,
        "BITS": bits,
        "GROUP": group,
        "PREFIX_SLOTS": isinstance(prefix, KeyRows) and prefix.slots is not None,
        "RESIDENT_SLOTS": before.slots is not None,
        "NEW_SLOTS": new.slots is not None,
        # The interpreter takes the bits of bfloat16 numbers for integers when it multiplies.
        "WIDEN": not isinstance(_row_sums, triton.JITFunction),
    }
    launch: Callable[..., None] = functools.partial(
        _launch, tile=tile, num_heads=num_heads, **constants
    )
    scale = scaling * math.log2(math.e)
    strided = (queries, queries.stride(0), queries.stride(1))
    factors = (queries, queries, partial)
    if isinstance(prefix, SketchRows):
        factors = _new_factors(queries)
        work = (plan.requests, plan.row_items)
        launch(_apply_table, plan.row_items, *strided, prefix.table, *work, *factors)
    common = (*strided, *factors, *_arguments(prefix, plan, stream))
    others = (*_arguments(before, plan, stream), *_arguments(new, plan, stream))
    row_work = (plan.requests, plan.row_items, partial)
    launch(_row_sums, plan.row_items, *common, *others, *row_work, scale, num_new)
    key_work = (plan.requests, plan.key_items, partial, sums)
    launch(_weight_sums, plan.key_items, *common, *key_work, scale, num_new, num_prefix)
    return sums


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each request of a batch, by kind."""

    new: tuple[int, ...]
    prefix: tuple[int, ...]
    resident: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What one program multiplies at once: `rows` queries and `keys` keys of `dim` channels.

    `group` query heads of each token, padded to a power of two, are neighbouring rows.
    """

    group: int
    rows: int
    keys: int
    dim: int
    warps: int
    stages: int

    @property
    def tokens(self) -> int:
        """New tokens whose rows are in one tile."""
        return self.rows // self.group


def tile_shape(
    lengths: Lengths,
    num_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    bits: int,
    processors: int,
) -> Tile:
    """The tile for a batch: few different ones, because each is compiled by itself.

    Rows: 16, 64 or 128, as few as hold the longest request's; at most 64 if vectors have more than
    128 channels or there are two factors of each query, so that two tiles of keys fit into shared
    memory beside them. Keys: 64, or 128 where the prefixes are so long that each multiprocessor
    gets several such blocks. Float32 is multiplied outside the tensor cores, from registers, so its
    tiles are small.
    """
    padded_group, padded_dim = _power_of_two(group), max(16, _power_of_two(dim))
    long = padded_dim > 128
    if dtype == torch.float32:
        rows = max(16, padded_group)
        return Tile(padded_group, rows, 16 if long else 32, padded_dim, warps=8, stages=2)
    wanted = max(lengths.new, default=1) * padded_group
    sizes = (16, 64) if long or bits else (16, 64, 128)
    rows = max(padded_group, next((size for size in sizes if size >= wanted), sizes[-1]))
    blocks = sum(-(-tokens // 128) for tokens in lengths.prefix) * num_heads
    keys = 64 if long or bits or blocks < 4 * processors else 128
    return Tile(padded_group, rows, keys, padded_dim, warps=8 if rows >= 128 else 4, stages=2)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """Who computes what; int32 on the device, `FIELDS` numbers each.

    requests: first and number of new, resident and prefix tokens; first code; parts per row.
    row_items: request, first token of a tile of queries, part, first and last block of keys. Blocks
    are counted through the resident, then the prefix, then the new tokens.
    key_items: request, first token of a block of prefix keys.
    """

    requests: Tensor
    row_items: Tensor
    key_items: Tensor
    splits: int


# The stream is part of the key because the upload is ordered before kernels of that stream only.
@functools.lru_cache(maxsize=64)
def _plan(
    lengths: Lengths,
    starts: tuple[int, ...],
    tile: Tile,
    num_heads: int,
    processors: int,
    device: torch.device,
    stream: int,
) -> _Plan:
    blocks = [
        tuple(-(-tokens // tile.keys) for tokens in kinds)
        for kinds in zip(lengths.resident, lengths.prefix, lengths.new, strict=True)
    ]
    # Nobody asks for the rows of a request without a prefix.
    tiles = [
        range(0, new if prefix else 0, tile.tokens)
        for new, prefix in zip(lengths.new, lengths.prefix, strict=True)
    ]
    work = num_heads * sum(
        len(firsts) * sum(counts) for firsts, counts in zip(tiles, blocks, strict=True)
    )
    per_part = max(1, -(-work // (WAVES * processors)))
    parts = [-(-sum(counts) // per_part) for counts in blocks]
    rows = []
    for request, firsts in enumerate(tiles):
        resident, prefix, _ = blocks[request]
        for first in firsts:
            seen = min(first + tile.tokens, lengths.new[request])
            visible = resident + prefix + -(-seen // tile.keys)
            for part in range(parts[request]):
                begin = part * per_part
                rows.append((request, first, part, begin, min(begin + per_part, visible)))
    keys = [
        (request, first)
        for request, tokens in enumerate(lengths.prefix)
        for first in range(0, tokens, tile.keys)
    ]
    requests = np.stack(
        [
            column
            for kind in (lengths.new, lengths.resident, lengths.prefix)
            for column in (np.cumsum((0, *kind[:-1])), kind)
        ]
        + [starts, parts],
        axis=1,
    )
    tables = [_padded(requests), _padded(rows), _padded(keys)]
    on_device = _upload(np.concatenate(tables), device)
    sections = on_device.split([len(table) for table in tables])
    return _Plan(sections[0], sections[1], sections[2], max(parts))


def _padded(rows: Sequence[tuple[int, ...]] | np.ndarray) -> np.ndarray:
    """Rows of numbers -> int32 [rows, FIELDS]."""
    table = np.zeros((len(rows), FIELDS), dtype=np.int32)
    if len(rows):
        filled = np.asarray(rows)
        table[:, : filled.shape[1]] = filled
    return table


@functools.lru_cache(maxsize=64)
def _head_map(heads: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return _upload(np.array(heads, dtype=np.int32), device)


def _upload(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    host = torch.from_numpy(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(
    kernel: Any, items: Tensor, *arguments: object, tile: Tile, num_heads: int, **constants: int
) -> None:
    """Run a kernel for each item and KV head; it takes of the constants those that it names."""
    if not len(items):
        return
    own = {name: value for name, value in constants.items() if name in kernel.arg_names}
    kernel[(len(items), num_heads)](*arguments, **own, num_warps=tile.warps, num_stages=tile.stages)


def _new_factors(queries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what `_apply_table` writes: factors and their rests [N, Hq, D], offsets [N, Hq]."""
    shape, device = queries.shape, queries.device
    offsets = torch.empty(shape[:2], dtype=torch.float32, device=device)
    if queries.dtype == torch.float32:
        factors = torch.empty(shape, dtype=torch.float32, device=device)
        return factors, factors, offsets
    factors, rests = torch.empty((2, *shape), dtype=torch.bfloat16, device=device)
    return factors, rests, offsets


def _starts(prefix: KeyRows | SketchRows, num_requests: int) -> tuple[int, ...]:
    """Position in `codes` of each request's first token."""
    if isinstance(prefix, KeyRows):
        return (0,) * num_requests
    return (prefix.start,) if isinstance(prefix.start, int) else prefix.start


def _arguments(source: KeyRows | SketchRows, plan: _Plan, stream: int) -> tuple[object, ...]:
    """Rows, slots, heads and strides as the kernels take them."""
    heads = None
    # Slots that are not there are never read; any integers stand for them.
    slots = plan.requests
    if isinstance(source, SketchRows):
        rows = source.codes
    else:
        rows, heads = source.vectors, source.heads
        slots = slots if source.slots is None else source.slots
    heads = tuple(range(source.num_heads)) if heads is None else heads
    return rows, slots, _head_map(heads, rows.device, stream), rows.stride(0), rows.stride(1)


def _check(
    queries: Tensor,
    prefix: KeyRows | SketchRows,
    resident: KeyRows | None,
    new: KeyRows,
    lengths: Lengths,
) -> None:
    sources = [rows for rows in (prefix, resident, new) if isinstance(rows, KeyRows)]
    dtypes = {queries.dtype, *(rows.vectors.dtype for rows in sources)}
    if len(dtypes) > 1 or queries.dtype not in DTYPES:
        raise UnsupportedError(
            f"no scoring kernel for queries and keys of {', '.join(map(str, dtypes))}; both must "
            "have the same of float16, bfloat16 and float32"
        )
    num_new, num_query_heads, dim = queries.shape
    num_requests = len(lengths.new)
    assert len(lengths.prefix) == len(lengths.resident) == num_requests
    assert sum(lengths.new) == num_new
    assert resident is not None or not any(lengths.resident)
    assert queries.stride(2) == 1
    assert num_query_heads % prefix.num_heads == 0
    for rows in sources:
        assert rows.num_heads == prefix.num_heads
        assert rows.vectors.shape[2] == dim and rows.vectors.stride(2) == 1
        assert rows.heads is None or max(rows.heads) < rows.vectors.shape[1]
    if isinstance(prefix, SketchRows):
        assert prefix.bits in (2, 4, 8) and prefix.codes.dtype == torch.uint8
        assert prefix.codes.shape[2] == dim and prefix.codes.stride(2) == 1
        assert prefix.table.dtype == torch.float32 and prefix.table.is_contiguous()
        assert prefix.table.numel() == num_requests * 2 * prefix.num_heads * dim
        assert len(_starts(prefix, num_requests)) == num_requests


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


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
    dtype: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, HAS_SLOTS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_KEYS, BLOCK_DIM] of a request's tokens: keys or, if BITS is not 0, codes.

    Codes have the type `dtype`; those of 8 bits are exact in bfloat16, too.
    """
    valid = tokens < tl.load(request + 5)
    if BITS:
        per_byte: tl.constexpr = 8 // BITS
        positions = tl.load(request + 6) + tokens
        rows = (positions // per_byte).to(tl.int64) * stride
        packed = _load_vectors(prefix, rows, valid, DIM, BLOCK_DIM, 0).to(tl.int32)
        shifts = (positions % per_byte) * BITS
        return ((packed >> shifts[:, None]) & (2**BITS - 1)).to(tl.float32).to(dtype)
    else:
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


@triton.jit
def _round_to_bfloat16(numbers: tl.tensor) -> tl.tensor:
    """To nearest, as float32: the interpreter's own conversion truncates."""
    bits = numbers.to(tl.int32, bitcast=True)
    return ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _apply_table(
    queries: tl.tensor, query_stride: tl.tensor, query_head_stride: tl.tensor,
    table: tl.tensor, requests: tl.tensor, items: tl.tensor,
    factors: tl.tensor, rests: tl.tensor, offsets: tl.tensor,
    DIM: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    """Queries for codes: q * (low + step * code) = q * low + (q * step) * code.

    So keys need no arithmetic. Of q * step, what bfloat16 holds goes to `factors` and, again, of
    the rest to `rests`; all but 2^-17 of it. For float32 queries the factors are float32.
    """
    item = items + tl.program_id(0) * 8
    if tl.load(item + 2) == 0:
        head = tl.program_id(1)
        num_heads = tl.num_programs(1)
        index = tl.load(item)
        request = requests + index * 8
        tokens, members, valid = _tile_rows(
            tl.load(item + 1), tl.load(request + 1), GROUP, GROUP_PAD, BLOCK_ROWS
        )
        tokens = (tl.load(request) + tokens).to(tl.int64)
        heads = head * GROUP + members
        rows = tokens * query_stride + heads * query_head_stride
        exact = _load_vectors(queries, rows, valid, DIM, BLOCK_DIM).to(tl.float32)
        channels = tl.arange(0, BLOCK_DIM)
        entry = table + (index * 2 * num_heads + head) * DIM + channels
        low = tl.load(entry, mask=channels < DIM, other=0.0)
        step = tl.load(entry + num_heads * DIM, mask=channels < DIM, other=0.0)

        out = tokens * num_heads * GROUP + heads
        tl.store(offsets + out, tl.sum(exact * low[None, :], 1), mask=valid)
        scaled = exact * step[None, :]
        cells = out[:, None] * DIM + channels[None, :]
        mask = valid[:, None] & (channels < DIM)[None, :]
        if factors.dtype.element_ty == tl.float32:
            tl.store(factors + cells, scaled, mask=mask)
        else:
            leading = _round_to_bfloat16(scaled)
            tl.store(factors + cells, leading.to(tl.bfloat16), mask=mask)
            rest = _round_to_bfloat16(scaled - leading)
            tl.store(rests + cells, rest.to(tl.bfloat16), mask=mask)


@triton.jit
def _load_factors(
    factors: tl.tensor, rests: tl.tensor, offsets: tl.tensor, rows: tl.tensor, valid: tl.tensor,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What `_apply_table` wrote for the rows of a tile."""
    leading = _load_vectors(factors, rows * DIM, valid, DIM, BLOCK_DIM)
    rest = leading
    if factors.dtype.element_ty != tl.float32:
        rest = _load_vectors(rests, rows * DIM, valid, DIM, BLOCK_DIM)
    return leading, rest, tl.load(offsets + rows, mask=valid, other=0.0)


@triton.jit
def _code_products(
    factors: tl.tensor, rests: tl.tensor, offsets: tl.tensor, codes: tl.tensor, WIDEN: tl.constexpr
) -> tl.tensor:
    """[BLOCK_ROWS, BLOCK_KEYS] float32, the products with the keys that the codes stand for."""
    products = _products(factors, codes, WIDEN)
    if factors.dtype != tl.float32:
        products += _products(rests, codes, WIDEN)
    return products + offsets[:, None]


@triton.jit(
    do_not_specialize=["num_new"],
    do_not_specialize_on_alignment=["prefix_slots", "resident_slots", "new_slots"],
)
def _row_sums(
    queries: tl.tensor, query_stride: tl.tensor, query_head_stride: tl.tensor,
    factors: tl.tensor, rests: tl.tensor, offsets: tl.tensor,
    prefix: tl.tensor, prefix_slots: tl.tensor, prefix_heads: tl.tensor,
    prefix_stride: tl.tensor, prefix_head_stride: tl.tensor,
    resident: tl.tensor, resident_slots: tl.tensor, resident_heads: tl.tensor,
    resident_stride: tl.tensor, resident_head_stride: tl.tensor,
    new: tl.tensor, new_slots: tl.tensor, new_heads: tl.tensor,
    new_stride: tl.tensor, new_head_stride: tl.tensor,
    requests: tl.tensor, items: tl.tensor, partial: tl.tensor, scale: tl.tensor, num_new: tl.tensor,
    DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PREFIX_SLOTS: tl.constexpr,
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
    if BITS:
        leading, rest, offset = _load_factors(
            factors, rests, offsets, rows * num_heads * GROUP + heads, valid, DIM, BLOCK_DIM
        )
    for block in range(tl.maximum(begin, prefix_begin), tl.minimum(end, new_begin)):
        columns = (block - prefix_begin) * BLOCK_KEYS + within
        keys = _load_prefix(
            prefix, prefix_slots, prefix_stride, request, columns, factors.dtype.element_ty,
            DIM, BITS, PREFIX_SLOTS, BLOCK_DIM,
        )
        if BITS:
            products = _code_products(leading, rest, offset, keys, WIDEN)
        else:
            products = _products(tile, keys, WIDEN)
        seen = (columns < prefix_count)[None, :]
        peak, total = _fold(peak, total, tl.where(seen, products * scale, float("-inf")))
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
def _weight_sums(
    queries: tl.tensor, query_stride: tl.tensor, query_head_stride: tl.tensor,
    factors: tl.tensor, rests: tl.tensor, offsets: tl.tensor,
    prefix: tl.tensor, prefix_slots: tl.tensor, prefix_heads: tl.tensor,
    prefix_stride: tl.tensor, prefix_head_stride: tl.tensor,
    requests: tl.tensor, items: tl.tensor, partial: tl.tensor, sums: tl.tensor, scale: tl.tensor,
    num_new: tl.tensor, num_prefix: tl.tensor,
    DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PREFIX_SLOTS: tl.constexpr,
    WIDEN: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
) -> None:
    """Weights of a block of prefix keys, summed over the new tokens -> sums [Hq, M]."""
    block_tokens: tl.constexpr = BLOCK_ROWS // GROUP_PAD
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    item = items + tl.program_id(0) * 8
    request = requests + tl.load(item) * 8
    columns = tl.load(item + 1) + tl.arange(0, BLOCK_KEYS)
    new_first, new_count = tl.load(request), tl.load(request + 1)
    parts = tl.load(request + 7)
    part_stride = num_heads.to(tl.int64) * num_new * GROUP_PAD
    partial += (head.to(tl.int64) * num_new + new_first) * GROUP_PAD
    prefix += tl.load(prefix_heads + head).to(tl.int64) * prefix_head_stride
    keys = _load_prefix(
        prefix, prefix_slots, prefix_stride, request, columns, factors.dtype.element_ty,
        DIM, BITS, PREFIX_SLOTS, BLOCK_DIM,
    )
    weights = tl.full([BLOCK_ROWS, BLOCK_KEYS], 0.0, tl.float32)
    for first in range(0, new_count, block_tokens):
        tokens, members, valid = _tile_rows(first, new_count, GROUP, GROUP_PAD, BLOCK_ROWS)
        rows = (new_first + tokens).to(tl.int64)
        heads = head * GROUP + members
        if BITS:
            leading, rest, offset = _load_factors(
                factors, rests, offsets, rows * num_heads * GROUP + heads, valid, DIM, BLOCK_DIM
            )
            products = _code_products(leading, rest, offset, keys, WIDEN)
        else:
            tile = _load_vectors(
                queries, rows * query_stride + heads * query_head_stride, valid, DIM, BLOCK_DIM
            )
            products = _products(tile, keys, WIDEN)
        log_sums = _combine(partial + first * GROUP_PAD, valid, parts, part_stride, BLOCK_ROWS)
        weights += tl.exp2(products * scale - log_sums[:, None])

    # Rows of one query head are summed only here: in the loop that would cost exchanges each time.
    columns_of_heads = tl.sum(tl.reshape(weights, (block_tokens, GROUP_PAD, BLOCK_KEYS)), 0)
    members = tl.arange(0, GROUP_PAD)
    heads = (head * GROUP + members).to(tl.int64)
    out = sums + heads[:, None] * num_prefix + tl.load(request + 4) + columns[None, :]
    mask = (members < GROUP)[:, None] & (columns < tl.load(request + 5))[None, :]
    tl.store(out, columns_of_heads, mask=mask)
