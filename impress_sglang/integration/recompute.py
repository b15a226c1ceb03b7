"""Computes a prefix again, inside a forward pass, when its stored chunks cannot be read.

The request was admitted with a prefix of m tokens, and other requests of the batch are under way,
so it can neither be turned away nor sent back. The model is run over the prefix in blocks;
attention keeps the keys and values of those tokens in memory instead of the pool, and they become
the request's source. The answer is what an intact store would have given.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from torch import Tensor

from impress_sglang.attention.rectangular import rectangular_attention
from impress_sglang.integration.request import PrefixRequest
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.source import MemorySource

# Bounds the activations of a recompute; its KVs are kept for all m tokens.
BLOCK_TOKENS = 2048


class PrefixCapture:
    """Attention over [resident, captured so far, this block], which keeps the new KVs."""

    def __init__(self, pool: Any, resident_slots: Tensor, shape: KVShape) -> None:
        self._pool = pool
        self._resident_slots = resident_slots
        self._shape = shape
        self._keys: list[list[Tensor]] = [[] for _ in range(shape.num_layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(shape.num_layers)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        """Attention of one block in one layer, [n, Hq * Dv]."""
        index = layer.layer_id
        self._keys[index].append(k.view(-1, layer.tp_k_head_num, layer.qk_head_dim).clone())
        self._values[index].append(v.view(-1, layer.tp_v_head_num, layer.v_head_dim).clone())
        keys = [self._pool.get_key_buffer(index)[self._resident_slots], *self._keys[index]]
        values = [self._pool.get_value_buffer(index)[self._resident_slots], *self._values[index]]
        output = rectangular_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            torch.cat(keys),
            torch.cat(values),
            scaling=layer.scaling,
            causal=True,
        )
        return output.reshape(q.shape[0], -1)

    def source(self) -> MemorySource:
        """The captured KVs, in the dtype of the store."""
        dtype = self._shape.dtype
        keys = [torch.cat(blocks).to("cpu", dtype) for blocks in self._keys]
        values = [torch.cat(blocks).to("cpu", dtype) for blocks in self._values]
        return MemorySource(self._shape, keys, values)


def recompute_prefix(
    model_runner: Any, capture: PrefixCapture, request: PrefixRequest, forward_batch: Any
) -> None:
    """Run the model over the stored part of a request's prefix, under `capture`."""
    stop = request.prefix_len
    for start in range(request.resident_len, stop, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, stop)
        block = _block_batch(forward_batch, request.token_ids[start:end], start)
        model_runner.model.forward(block.input_ids, block.positions, block)


def _block_batch(forward_batch: Any, token_ids: Tensor, start: int) -> Any:
    """A batch of one request that extends by `token_ids` at position `start`."""
    device = forward_batch.input_ids.device
    length = len(token_ids)
    block = copy.copy(forward_batch)
    block.forward_mode = ForwardMode.EXTEND
    block.batch_size = 1
    block.input_ids = token_ids.to(device)
    block.positions = torch.arange(start, start + length, device=device)
    block.seq_lens = torch.tensor([start + length], device=device)
    block.seq_lens_cpu = torch.tensor([start + length])
    block.seq_lens_sum = start + length
    # Nothing is written to the pool, but some models write keys and values before they attend: to
    # slot 0, which belongs to nobody.
    block.out_cache_loc = torch.zeros(length, dtype=torch.int64, device=device)
    block.extend_num_tokens = length
    block.extend_seq_lens = torch.tensor([length], dtype=torch.int32, device=device)
    block.extend_seq_lens_cpu = [length]
    block.extend_prefix_lens = torch.tensor([start], dtype=torch.int32, device=device)
    block.extend_prefix_lens_cpu = [start]
    block.extend_start_loc = torch.zeros(1, dtype=torch.int32, device=device)
    block.global_num_token_non_padded_cpu = length
    block.return_logprob = False
    block.capture_hidden_mode = CaptureHiddenMode.NULL
    return block
