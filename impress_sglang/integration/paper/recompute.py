"""Computes a prefix again, inside a forward pass, when its stored chunks cannot be read.

The request was admitted with a prefix of m tokens, and other requests of the batch are running, so
it cannot be sent back. The model is run over the prefix in blocks, which attend to the blocks
before them; their keys and values become the request's source. The answer is what an intact store
would have given.

Memory. On the device: a block's activations, and a tile of keys and values with its scores, of the
same size for every prefix. On the host: the KVs of all layers of m tokens, allocated before
anything is computed, and freed layer by layer as they are loaded. `--impress-recompute-gb` bounds
them for all requests together.

Time. Everything runs on the scheduler's thread, so nothing else does meanwhile. It takes as long as
computing m tokens, with attention in float32, and the KVs of earlier blocks cross to the device
once for each later block: m² / (2 · block) tokens, which are 32 GB for 32k tokens of an 8B model.
So a pass gives up after a minute, or after half of what SGLang's watchdog allows.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_context import forward_context, get_forward_context
from sglang.srt.runtime_context import get_device, get_schedule
from torch import Tensor

from impress_sglang.attention.tiled import tiled_attention, tiles_of
from impress_sglang.integration.block_batch import block_batch
from impress_sglang.serving.paper.loading import RecomputedLoading
from impress_sglang.serving.paper.request import StoredRequest
from impress_sglang.storage.layout import KVShape
from impress_sglang.tiers.host_memory import available_bytes
from impress_sglang.transfer.memory import MemorySource

# Most tokens of a block.
BLOCK_TOKENS = 2048
# Most seconds that a pass spends here, for all of its requests together.
PASS_SECONDS = 60.0

# How torch says that memory ran out, where that has no class of its own.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


class PrefixCapture:
    """Attention over [resident, earlier blocks, this block]; keeps the new KVs on the host."""

    def __init__(self, pool: Any, resident_slots: Tensor, shape: KVShape, num_tokens: int) -> None:
        """Allocate host memory for a prefix of `num_tokens` after the resident ones."""
        self._pool = pool
        self._resident_slots = resident_slots
        self._shape = shape
        self._done = 0

        def host_memory(dim: int) -> list[Tensor | None]:
            size = (num_tokens, shape.num_kv_heads, dim)
            layers = range(shape.num_layers)
            return [torch.empty(size, dtype=shape.dtype, device="cpu") for _ in layers]

        self._keys, self._values = host_memory(shape.key_dim), host_memory(shape.value_dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        """Attend for one block in one layer, [n, Hq * Dv], and keep its keys and values.

        Raises:
            BlockComputed: this was the last layer, whose output is not needed.
        """
        index, shape = layer.layer_id, self._shape
        keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim).to(shape.dtype)
        values = v.view(-1, layer.tp_v_head_num, layer.v_head_dim).to(shape.dtype)
        block = slice(self._done, self._done + len(keys))
        kept_keys, kept_values = self._layer(index)
        kept_keys[block].copy_(keys)
        kept_values[block].copy_(values)
        if index == shape.num_layers - 1:
            self._done = block.stop
            raise BlockComputed
        output = tiled_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self._tiles(index, keys, values),
            positions=len(self._resident_slots) + np.arange(block.start, block.stop),
            scaling=layer.scaling,
        )
        return output.reshape(len(keys), -1)

    def source(self, first_layer: int) -> MemorySource:
        """The captured KVs of the layers from `first_layer` on."""
        assert all(self._done == len(own) for own in self._keys if own is not None)
        for earlier in range(first_layer):
            self._keys[earlier] = self._values[earlier] = None
        return MemorySource(self._shape, self._keys, self._values)

    def _layer(self, index: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[index], self._values[index]
        assert keys is not None and values is not None
        return keys, values

    def _tiles(self, index: int, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of all tokens up to the end of the block, whose own are given."""
        key_pool = self._pool.get_key_buffer(index)
        value_pool = self._pool.get_value_buffer(index)
        for tile in tiles_of(len(self._resident_slots)):
            slots = self._resident_slots[tile]
            yield key_pool[slots], value_pool[slots]
        kept_keys, kept_values = self._layer(index)
        for tile in tiles_of(self._done):
            yield kept_keys[tile].to(keys.device), kept_values[tile].to(keys.device)
        for tile in tiles_of(len(keys)):
            yield keys[tile], values[tile]


class BlockComputed(Exception):
    """The KVs of a block are captured: leaves the model before it computes what is not needed.

    That is the rest of the last layer, and logits.
    """


def held_by(requests: Iterable[StoredRequest]) -> int:
    """Bytes on the host of KVs that were computed again and are not in requests' slots yet."""
    loadings = (request.loading for request in requests)
    return sum(own.held_bytes for own in loadings if isinstance(own, RecomputedLoading))


def host_shortage(
    shape: KVShape, num_tokens: int, limit_bytes: int, held_bytes: int = 0
) -> str | None:
    """Why the host's memory does not suffice to compute a prefix again; None if it does.

    `held_bytes` of the limit are in use by other requests.
    """
    heads = shape.num_kv_heads * (shape.key_dim + shape.value_dim)
    needed = shape.num_layers * num_tokens * heads * shape.dtype.itemsize
    if needed + held_bytes > limit_bytes:
        others = f", of which others have {held_bytes / 1e9:.3g}" if held_bytes else ""
        return (
            f"computing it again takes {needed / 1e9:.3g} GB of host memory, "
            f"more than --impress-recompute-gb {limit_bytes / 1e9:g}{others}"
        )
    try:
        available = available_bytes()
    except OSError as error:
        return f"how much memory the host has left is not known: {error}"
    if needed > available:
        return (
            f"computing it again takes {needed / 1e9:.3g} GB of host memory, "
            f"and {available / 1e9:.3g} GB are left"
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the device or the host had no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in _OUT_OF_MEMORY)


def block_tokens() -> int:
    """Tokens that are computed at once: at most as many as SGLang computes of a prompt at once."""
    chunk = get_schedule().chunked_prefill_size
    return min(BLOCK_TOKENS, chunk) if chunk is not None and chunk > 0 else BLOCK_TOKENS


def pass_seconds() -> float:
    """Seconds that a pass may spend here; SGLang's watchdog ends servers that seem to hang."""
    return min(PASS_SECONDS, get_device().watchdog_timeout / 2)


def recompute_prefix(
    model: Any, request: StoredRequest, device: torch.device, size: int, deadline: float
) -> bool:
    """Run SGLang's model over the stored part of a prefix, in blocks of `size` tokens.

    Meanwhile the attention backend must pass its calls on to a `PrefixCapture`. Returns whether all
    was done by `deadline`, a time of `time.monotonic`.
    """
    stop = request.prefix_len
    for start in range(request.resident_len, stop, size):
        if time.monotonic() >= deadline:
            return False
        tokens = request.token_ids[start : min(start + size, stop)]
        block = block_batch(tokens.to(device), start)
        try:
            with forward_context(get_forward_context(), forward_batch=block):
                model.forward(block.input_ids, block.positions, block)
        except BlockComputed:
            continue
        raise AssertionError("the model ended without attention of its last layer")
    return True
