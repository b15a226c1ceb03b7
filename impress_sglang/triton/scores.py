"""Importance of prefix tokens on a GPU: column sums of the attention weights (H2O's metric).

Stage: probe. In: queries of the new tokens of a batch, and keys where they stand: in slots of a
pool or in a staging buffer. Out: one score per query head and prefix token.
`impress_sglang.importance.scores.column_sums` is the reference, and defines the numbers.

Here the work of a batch is laid out and launched; `score_kernels` computes it.
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
from torch import Tensor

from impress_sglang.errors import UnsupportedError
from impress_sglang.triton.score_kernels import row_sums, weight_sums

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


def column_sums(
    queries: Tensor,
    prefix: KeyRows,
    resident: KeyRows | None,
    new_keys: KeyRows | Tensor,
    scaling: float,
    *,
    new_lengths: Sequence[int],
    prefix_lengths: Sequence[int],
    resident_lengths: Sequence[int],
    squares: bool = False,
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
        squares: of the weights are summed.

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
    processors, stream = _processors(device), _stream(device)
    tile = tile_shape(lengths, num_heads, group, dim, queries.dtype, processors)
    plan = _plan(lengths, tile, num_heads, processors, device, stream)
    partial = torch.empty(
        plan.splits, num_heads, num_new, tile.group, dtype=torch.float32, device=device
    )
    constants = {
        "GROUP_PAD": tile.group,
        "BLOCK_ROWS": tile.rows,
        "BLOCK_KEYS": tile.keys,
        "BLOCK_DIM": tile.dim,
        "DIM": dim,
        "GROUP": group,
        "PREFIX_SLOTS": prefix.slots is not None,
        "RESIDENT_SLOTS": before.slots is not None,
        "NEW_SLOTS": new.slots is not None,
        "SQUARES": squares,
        # The interpreter takes the bits of bfloat16 numbers for integers when it multiplies.
        "WIDEN": not isinstance(row_sums, triton.JITFunction),
    }
    launch: Callable[..., None] = functools.partial(
        _launch, tile=tile, num_heads=num_heads, **constants
    )
    scale = scaling * math.log2(math.e)
    strided = (queries, queries.stride(0), queries.stride(1))
    common = (*strided, *_arguments(prefix, plan, stream))
    others = (*_arguments(before, plan, stream), *_arguments(new, plan, stream))
    row_work = (plan.requests, plan.row_items, partial)
    launch(row_sums, plan.row_items, *common, *others, *row_work, scale, num_new)
    key_work = (plan.requests, plan.key_items, partial, sums)
    launch(weight_sums, plan.key_items, *common, *key_work, scale, num_new, num_prefix)
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
    processors: int,
) -> Tile:
    """The tile for a batch: few different ones, because each is compiled by itself.

    Rows: 16, 64 or 128, as few as hold the longest request's; at most 64 if vectors have more than
    128 channels, so that two tiles of keys fit into shared memory beside them. Keys: 64, or 128
    where the prefixes are so long that each multiprocessor gets several such blocks. Float32 is
    multiplied outside the tensor cores, from registers, so its tiles are small.
    """
    padded_group, padded_dim = _power_of_two(group), max(16, _power_of_two(dim))
    long = padded_dim > 128
    if dtype == torch.float32:
        rows = max(16, padded_group)
        return Tile(padded_group, rows, 16 if long else 32, padded_dim, warps=8, stages=2)
    wanted = max(lengths.new, default=1) * padded_group
    sizes = (16, 64) if long else (16, 64, 128)
    rows = max(padded_group, next((size for size in sizes if size >= wanted), sizes[-1]))
    blocks = sum(-(-tokens // 128) for tokens in lengths.prefix) * num_heads
    keys = 64 if long or blocks < 4 * processors else 128
    return Tile(padded_group, rows, keys, padded_dim, warps=8 if rows >= 128 else 4, stages=2)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """Who computes what; int32 on the device, `FIELDS` numbers each.

    requests: first and number of new, resident and prefix tokens; parts per row.
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
        + [parts],
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


def _arguments(source: KeyRows, plan: _Plan, stream: int) -> tuple[object, ...]:
    """Rows, slots, heads and strides as the kernels take them."""
    rows, heads = source.vectors, source.heads
    # Slots that are not there are never read; any integers stand for them.
    slots = plan.requests if source.slots is None else source.slots
    heads = tuple(range(source.num_heads)) if heads is None else heads
    return rows, slots, _head_map(heads, rows.device, stream), rows.stride(0), rows.stride(1)


def _check(
    queries: Tensor,
    prefix: KeyRows,
    resident: KeyRows | None,
    new: KeyRows,
    lengths: Lengths,
) -> None:
    sources = [rows for rows in (prefix, resident, new) if rows is not None]
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


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
