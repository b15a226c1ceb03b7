"""Importance of prefix tokens on a GPU: column sums of the attention weights (H2O's metric).

In: queries of the new tokens of a request, and keys. Out: one score per query head
and prefix token. `impress_sglang.paper.scores.column_sums` is the reference and defines the
numbers.

This module lays out and launches the work; the kernels are in `score_kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from impress_sglang.errors import UnsupportedError
from impress_sglang.triton.score_kernels import row_sums, weight_sums
from impress_sglang.triton.sizes import power_of_two

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Programs of the first launch per multiprocessor: enough to hide the latency of each other's loads.
WAVES = 2
# What stands for the number of multiprocessors in Triton's interpreter.
INTERPRETED_PROCESSORS = 4


def column_sums(
    queries: Tensor,
    prefix_keys: Tensor,
    resident_keys: Tensor,
    new_keys: Tensor,
    scaling: float,
    *,
    heads: tuple[int, ...],
    resident_rows: Tensor | None = None,
) -> Tensor:
    """Sum, over the new tokens, the attention weights that they give to each prefix token.

    The same numbers as `impress_sglang.paper.scores.column_sums`: the softmax runs over
    [resident, prefix, causal new tokens], and query head `h` uses the probed KV head
    `h // (Hq // Hk)`. Products are summed in float32; float32 inputs are not rounded to TF32.

    Nothing waits for the device. All tensors are on the current CUDA device, or on the CPU in
    Triton's interpreter; their last stride is 1, the others are free. A new combination of dtypes,
    D, group and tile (see `tile_shape`) is compiled when it first occurs.

    Args:
        queries: [n, Hq, D] of the new tokens, after rotation; float16, bfloat16 or float32.
        prefix_keys: [m, Hk, D] of the stored tokens, of the dtype of the queries like all keys.
        resident_keys: [c, G, D] of the tokens before them that are in the device pool, of all KV
            heads.
        new_keys: [n, G, D] of the new tokens, of all KV heads.
        scaling: factor of the attention logits.
        heads: the Hk of the G heads that are probed, in the order of `prefix_keys`.
        resident_rows: int64 [c], contiguous: rows of `resident_keys` that are these tokens; None:
            all rows. Keys are read in place.

    Returns:
        [Hq, m] float32 on the device of `queries`.

    Raises:
        UnsupportedError: the dtype of queries or keys has no kernel.
    """
    _check(queries, prefix_keys, resident_keys, new_keys, heads, resident_rows)
    num_queries, num_query_heads, dim = queries.shape
    num_prefix = len(prefix_keys)
    num_resident = len(resident_keys if resident_rows is None else resident_rows)
    num_heads, device = len(heads), queries.device
    sums = torch.empty(num_query_heads, num_prefix, dtype=torch.float32, device=device)
    if not num_prefix:
        return sums

    group, processors = num_query_heads // num_heads, _processors(device)
    tile = tile_shape(num_queries, num_prefix, num_heads, group, dim, queries.dtype, processors)
    tokens = (num_resident, num_prefix, len(new_keys))
    split = split_rows(num_queries, tokens, tile, num_heads, processors)
    partial = torch.empty(
        split.parts, num_heads, num_queries, tile.group, dtype=torch.float32, device=device
    )
    constants = {
        "GROUP_PAD": tile.group,
        "BLOCK_ROWS": tile.rows,
        "BLOCK_KEYS": tile.keys,
        "BLOCK_DIM": tile.dim,
        "DIM": dim,
        "GROUP": group,
        # The interpreter takes the bits of bfloat16 numbers for integers when it multiplies.
        "WIDEN": not isinstance(row_sums, triton.JITFunction),
    }
    # Without resident tokens nothing is read there; any keys can stand in for them.
    before = resident_keys if len(resident_keys) else new_keys
    scale = scaling * math.log2(math.e)
    common = (*_strided(queries), *_strided(prefix_keys))
    others = (*_strided(before), resident_rows, *_strided(new_keys))
    key_heads = _head_map(heads, device, _stream(device))
    counts = (num_queries, num_prefix, split.parts)
    _launch(
        row_sums,
        (split.tiles * split.parts, num_heads),
        (*common, *others, key_heads, partial, scale, *counts, num_resident, split.blocks),
        tile,
        constants,
    )
    _launch(
        weight_sums,
        (-(-num_prefix // tile.keys), num_heads),
        (*common, partial, sums, scale, *counts),
        tile,
        constants,
    )
    return sums


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What one program multiplies at once: `rows` queries and `keys` keys of `dim` channels.

    The `group` query heads of a token, padded to a power of two, are neighbouring rows.
    """

    group: int
    rows: int
    keys: int
    dim: int
    warps: int
    stages: int

    @property
    def tokens(self) -> int:
        """How many tokens have their queries in one tile."""
        return self.rows // self.group


# All layers of a request have the same tile and split.
@functools.lru_cache(maxsize=256)
def tile_shape(
    num_queries: int,
    num_prefix: int,
    num_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    processors: int,
) -> Tile:
    """The tile for a request; there are few different ones, because each must be compiled.

    Rows: 16, 64 or 128, as few as hold all; at most 64 if vectors have more than 128 channels, so
    that two tiles of keys fit into shared memory beside them. Keys: 64, or 128 where the prefix is
    so long that each multiprocessor gets several such blocks. Float32 is multiplied outside the
    tensor cores, from registers, so its tiles are small.
    """
    padded_group, padded_dim = power_of_two(group), max(16, power_of_two(dim))
    long = padded_dim > 128
    if dtype == torch.float32:
        rows = max(16, padded_group)
        return Tile(padded_group, rows, 16 if long else 32, padded_dim, warps=8, stages=2)
    wanted = num_queries * padded_group
    sizes = (16, 64) if long else (16, 64, 128)
    rows = max(padded_group, next((size for size in sizes if size >= wanted), sizes[-1]))
    blocks = -(-num_prefix // 128) * num_heads
    keys = 64 if long or blocks < 4 * processors else 128
    return Tile(padded_group, rows, keys, padded_dim, warps=8 if rows >= 128 else 4, stages=2)


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Programs of the first launch: `parts` for each of the `tiles` of queries.

    A part is `blocks` blocks of keys; blocks are numbered through the resident, then the prefix,
    then the new tokens.
    """

    tiles: int
    parts: int
    blocks: int


@functools.lru_cache(maxsize=256)
def split_rows(
    num_queries: int,
    tokens: tuple[int, int, int],
    tile: Tile,
    num_heads: int,
    processors: int,
) -> Split:
    """Split the first launch into as many programs as keep the multiprocessors busy, and no more.

    `tokens` are the numbers of resident, prefix and new tokens.
    """
    tiles = -(-num_queries // tile.tokens)
    blocks = sum(-(-count // tile.keys) for count in tokens)
    per_part = max(1, -(-num_heads * tiles * blocks // (WAVES * processors)))
    return Split(tiles, -(-blocks // per_part), per_part)


# The stream is part of the key because the upload is ordered before kernels of that stream only.
@functools.lru_cache(maxsize=64)
def _head_map(heads: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    host = torch.tensor(heads, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    arguments: tuple[object, ...],
    tile: Tile,
    constants: dict[str, int],
) -> None:
    if all(grid):
        kernel[grid](*arguments, **constants, num_warps=tile.warps, num_stages=tile.stages)


def _strided(vectors: Tensor) -> tuple[Tensor, int, int]:
    """Vectors and their strides, as the kernels take them."""
    return vectors, vectors.stride(0), vectors.stride(1)


def _check(
    queries: Tensor,
    prefix: Tensor,
    resident: Tensor,
    new: Tensor,
    heads: tuple[int, ...],
    rows: Tensor | None,
) -> None:
    dtype, dim, every = queries.dtype, queries.shape[2], (queries, prefix, resident, new)
    if dtype not in DTYPES or any(own.dtype != dtype for own in every):
        dtypes = {own.dtype for own in every}
        raise UnsupportedError(
            f"no scoring kernel for queries and keys of {', '.join(map(str, dtypes))}; both must "
            "have the same of float16, bfloat16 and float32"
        )
    assert len(new) == len(queries)
    assert rows is None or (rows.dtype == torch.int64 and rows.is_contiguous())
    assert rows is None or rows.device == queries.device
    assert prefix.shape[1] == len(heads) and queries.shape[1] % len(heads) == 0
    assert max(heads) < new.shape[1] == resident.shape[1]
    for vectors in every:
        assert vectors.shape[2] == dim and vectors.stride(2) == 1
