"""Compiles the kernels of a server that loads within a pass, before the first request needs them.

Heads whose dimension is not a multiple of 16 may be an exception: where their vectors begin, and
how far apart they are, differs between requests and models. Such variants are compiled on demand.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer import warm_up as loading

# Tiles are enumerated up to these lengths.
LONGEST_PREFIX = 1 << 20
MOST_NEW_TOKENS = 1 << 12


def warm_up(shape: KVShape, chunk_tokens: int, device: torch.device, *, selects: bool) -> None:
    """Compile all kernels with which requests load their prefixes; on a CPU there are none.

    `selects`: requests may use parts of prefixes.

    Raises:
        UnsupportedError: a kernel of this shape does not fit into the device.
    """
    if device.type != "cuda":
        return
    loading.warm_up(replace(shape, probe_kv_heads=()), chunk_tokens, device)
    if selects and shape.probe_kv_heads:
        score_and_choose(shape, device)
        torch.cuda.synchronize(device)


def score_and_choose(shape: KVShape, device: torch.device) -> None:
    """Launch the kernels for probe heads in all variants, also in Triton's interpreter."""
    instead = "--impress-policy as, which loads whole prefixes"
    with loading.fitting(shape, "scoring keys", instead):
        _score(shape, device)
    with loading.fitting(shape, "choosing tokens", instead):
        _choose(device)


def _score(shape: KVShape, device: torch.device) -> None:
    """Score keys of the probe heads, with and without resident keys."""
    heads = shape.probe_kv_heads

    from impress_sglang.triton import scores

    def zeros(tokens: int, num_heads: int) -> Tensor:
        return torch.zeros(tokens, num_heads, shape.key_dim, dtype=shape.dtype, device=device)

    for new, tokens in _lengths_of_tiles(shape, len(heads), device):
        prefix = zeros(tokens, len(heads))
        queries = zeros(new, len(heads) * shape.group_size)
        new_keys = zeros(new, shape.num_kv_heads)
        resident_keys = zeros(1, shape.num_kv_heads)
        for resident in (0, 1):
            scores.column_sums(
                queries,
                prefix,
                resident_keys,
                new_keys,
                1.0,
                heads=heads,
                resident_rows=torch.zeros(resident, dtype=torch.int64, device=device),
            )


def _lengths_of_tiles(
    shape: KVShape, num_heads: int, device: torch.device
) -> list[tuple[int, int]]:
    """Numbers of new and of prefix tokens, one pair for each tile shape that occurs."""
    from impress_sglang.triton import scores

    processors = scores.INTERPRETED_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    found: dict[scores.Tile, tuple[int, int]] = {}
    # Short lengths first: long ones take memory.
    for tokens in _powers_of_two(LONGEST_PREFIX):
        for new in _powers_of_two(MOST_NEW_TOKENS):
            tile = scores.tile_shape(
                new, tokens, num_heads, shape.group_size, shape.key_dim, shape.dtype, processors
            )
            found.setdefault(tile, (new, tokens))
    return list(found.values())


def _powers_of_two(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length())]


def _choose(device: torch.device) -> None:
    """Choose tokens of a short and of a long prefix."""
    from impress_sglang.triton.selection import SMALL_BLOCK, top_tokens

    for tokens in (2, SMALL_BLOCK + 1):
        top_tokens(torch.zeros(1, tokens, dtype=torch.float32, device=device), 1)
