"""Runs the model over the computed tokens of a blended prefix, one block between two passes.

SGLang's model runs layer by layer over fewer and fewer tokens of a block, as in its split prefill.
Rows are dropped between layers through SGLang's own handoff of the residual.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from impress_sglang.blend.job import (
    CHECKED_LAYERS,
    BlendJob,
    TokenKind,
    computed_again,
    ratio_of_layer,
)
from impress_sglang.errors import UnsupportedError
from impress_sglang.loops.types import Indices
from impress_sglang.plugin.rotation import rotation_of

# Bounds of the tokens of a block; the lower one holds however long it takes.
STEP_TOKENS = 2048
MIN_TOKENS = 32
# Most elements of an attention mask, to bound its memory.
MASK_ELEMENTS = 1 << 24
# Size of the first block, before any measurement, as a share of the maximum.
FIRST_SHARE = 0.25

# Models that can run layer by layer with decreasing rows.
BLENDED = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)

Layers = Callable[[int], tuple[Tensor, Tensor]]
"""Pools of keys and values of a layer, counted from the first."""


def check_blended(model: Any) -> None:
    """Check that blending supports a model.

    Raises:
        UnsupportedError: its rotation is unknown, or running it layer by layer was not reviewed.
    """
    name = type(model).__name__
    if name not in BLENDED:
        raise UnsupportedError(
            f"IMPRESS does not know how to blend with {name}, only with "
            f"{', '.join(sorted(BLENDED))}: drop --impress-blend"
        )
    rotation_of(model, "--impress-blend")


class StepComputed(Exception):
    """The KVs of a block are complete: skips the rest of the last layer."""


class BlendSteps(AttentionBackend):
    """Computes blend jobs, block by block. Thread: scheduler.

    Meanwhile it is the attention backend of SGLang's forward context: each token attends to all
    tokens up to its own, and keys and values go into the slots of the job. A block takes device
    memory for its activations.
    """

    def __init__(
        self,
        model: Any,
        pool: Any,
        layers: Layers,
        num_layers: int,
        forward_stream: Any,
        max_tokens: int,
        max_seconds: Callable[[int], float | None],
    ) -> None:
        """`layers` are the pools of SGLang's `model`, without waiting for layer transfers; `pool`
        is SGLang's, for callers that read it from the backend.

        `forward_stream`: stream of passes; None without an accelerator. A block has at most
        `max_tokens`; `max_seconds` returns how long it may take after a number of tokens, or None
        if unknown.
        """
        self.token_to_kv_pool = pool
        self._model, self._layers, self._num_layers = model, layers, num_layers
        self._stream, self._max_seconds = forward_stream, max_seconds
        self._max_step = max_block = min(max_tokens, STEP_TOKENS)
        self.step_tokens = max(int(FIRST_SHARE * max_block), min(MIN_TOKENS, max_block))
        """Tokens of a block, such that it takes no longer than a chunk of prefill."""

    def step(self, job: BlendJob) -> bool:
        """Compute the next block of a job in all layers; return whether it was the last."""
        rows = self._next_rows(job)
        if len(rows):
            began = time.perf_counter()
            waiting = self._compute(job, rows)
            seconds = time.perf_counter() - began - waiting
            job.spent += seconds
            job.position = int(rows[-1]) + 1
            self.observe_step(len(rows), seconds, self._max_seconds(job.position))
            rows = self._next_rows(job)
        return not len(rows)

    def observe_step(self, tokens: int, seconds: float, max_seconds: float | None) -> None:
        """Adapt the block size to a block that took `seconds`; `max_seconds`: its limit, if
        known."""
        if max_seconds is not None and seconds > max_seconds:
            fewer = int(min(tokens, self.step_tokens) * max_seconds / seconds)
            self.step_tokens = max(fewer, min(MIN_TOKENS, self._max_step))
        elif tokens >= self.step_tokens and (max_seconds is None or 2 * seconds <= max_seconds):
            self.step_tokens = min(2 * self.step_tokens, self._max_step)

    def _next_rows(self, job: BlendJob) -> Indices:
        """Return the positions of the next block's tokens."""
        kinds = job.kinds[job.position - job.start :]
        computed = kinds != TokenKind.KEPT if job.recompute_ratio else kinds == TokenKind.COMPUTED
        return job.position + np.flatnonzero(computed)[: self.step_tokens]

    def _compute(self, job: BlendJob, rows: Indices) -> float:
        """Compute a block; return the seconds that the device was busy with other work before."""
        if self._stream is None or job.row is None or not job.row.is_cuda:
            self._run(job, rows)
            return 0.0
        # After the pass in flight, and before the next one.
        self._stream.wait_stream(torch.cuda.current_stream())
        before = time.perf_counter()
        with torch.cuda.stream(self._stream):
            torch.cuda.current_stream().synchronize()
            waiting = time.perf_counter() - before
            self._run(job, rows)
            torch.cuda.current_stream().synchronize()
        return waiting

    def _run(self, job: BlendJob, rows: Indices) -> None:
        """Run the model over rows int64 [n], ascending, of a job's prompt."""
        device, start = self._layers(0)[0].device, int(rows[0])
        self._job, self._rows, self._stop = job, rows, int(rows[-1]) + 1
        kinds = job.kinds[start - job.start : self._stop - job.start]
        self._reused = int(np.count_nonzero(kinds == TokenKind.REUSED))
        batch = block_batch(torch.from_numpy(job.tokens[rows]).to(device, torch.int64), start)
        batch.positions = torch.from_numpy(rows).to(device)
        for layer in range(self._num_layers):
            try:
                with torch.no_grad(), forward_context(ForwardContext(attn_backend=self)):
                    self._model.forward_split_prefill(
                        batch.input_ids, batch.positions, batch, (layer, layer + 1)
                    )
            except StepComputed:
                return
            if not self._continues.any():
                return
            if not self._continues.all():
                batch = _with_rows(batch, torch.from_numpy(self._continues).to(device), start)
                self._rows = self._rows[self._continues]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> Tensor:
        """Attend in one layer for the computed tokens, [n, Hq * Dv]; zero for dropped tokens.

        Raises:
            StepComputed: this was the last layer, whose output is not needed.
        """
        if k is None or v is None:
            raise UnsupportedError("this model keeps no new keys outside of the pool")
        index, job, rows = layer.layer_id, self._job, self._rows
        assert job.row is not None
        job.token_layers += len(rows)
        keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        values = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        key_pool, value_pool = self._layers(index)
        slots = job.row[torch.from_numpy(rows).to(job.row.device)]
        going_on = np.ones(len(rows), np.bool_)
        if job.recompute_ratio and index >= CHECKED_LAYERS - 1:
            deviation = _squares(keys - key_pool[slots]) + _squares(values - value_pool[slots])
            reused = job.kinds[rows - job.start] == TokenKind.REUSED
            ratio = ratio_of_layer(job.recompute_ratio, index + 1, self._num_layers)
            count = round(ratio * self._reused)
            going_on = computed_again(reused, deviation.cpu().numpy(), count)
        self._continues = going_on
        key_pool[slots] = keys.to(key_pool.dtype)
        value_pool[slots] = values.to(value_pool.dtype)
        if index == self._num_layers - 1:
            raise StepComputed
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = queries.new_zeros(len(queries), layer.tp_q_head_num, layer.v_head_dim)
        if going_on.any():
            seen, places = job.row[: self._stop], torch.from_numpy(rows[going_on]).to(q.device)
            mask = torch.from_numpy(going_on).to(q.device)
            output[mask] = attention_at(
                places, queries[mask], key_pool[seen], value_pool[seen], layer.scaling
            )
        return output.reshape(len(queries), -1)


def attention_at(
    positions: Tensor, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> Tensor:
    """Attention of the tokens at positions [n] over all tokens up to their own.

    `queries` [n, Hq, D]; `keys` [t, Hk, D] and `values` [t, Hk, Dv] of the positions from 0 on.
    Returns [n, Hq, Dv].
    """
    heads = keys.shape[1]
    columns = torch.arange(len(keys), device=keys.device)
    tile = max(MASK_ELEMENTS * heads // (queries.shape[1] * len(keys)), 1)
    own_keys, own_values = (kv.to(queries.dtype).transpose(0, 1)[None] for kv in (keys, values))
    outputs = []
    for part, places in zip(queries.split(tile), positions.split(tile), strict=True):
        # Query heads of a key head are adjacent: here they become further rows of it.
        rows = part.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        mask = (columns <= places[:, None]).repeat(part.shape[1] // heads, 1)
        output = scaled_dot_product_attention(rows[None], own_keys, own_values, mask, scale=scaling)
        outputs.append(output[0].unflatten(1, (-1, len(part))).permute(2, 0, 1, 3).flatten(1, 2))
    return torch.cat(outputs)


def block_batch(token_ids: Tensor, start: int) -> ForwardBatch:
    """Make a batch of one request that extends by `token_ids`, int64 [n], at position `start`.

    It shares nothing with the running batch, whose tokens are others.
    """
    device, length = token_ids.device, len(token_ids)
    end = start + length
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=token_ids,
        positions=torch.arange(start, end, device=device),
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
        seq_lens=torch.tensor([end], device=device),
        seq_lens_cpu=torch.tensor([end]),
        seq_lens_sum=end,
        # We write to the pool ourselves. Models that write keys and values before attention write
        # them to slot 0, which belongs to no request.
        out_cache_loc=torch.zeros(length, dtype=torch.int64, device=device),
        out_cache_loc_is_physical=True,
        extend_num_tokens=length,
        extend_seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
        extend_seq_lens_cpu=[length],
        extend_prefix_lens=torch.tensor([start], dtype=torch.int32, device=device),
        extend_prefix_lens_cpu=[start],
        extend_start_loc=torch.zeros(1, dtype=torch.int32, device=device),
        global_num_token_non_padded_cpu=length,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def _with_rows(batch: Any, kept: Tensor, start: int) -> Any:
    """Reduce a batch between two layers to the tokens that are `kept`, bool [n]."""
    handoff = residual_batch.to_pp(batch.hidden_states, batch).tensors
    value, residual = handoff["hidden_states"], handoff.get("residual")
    fewer = block_batch(batch.input_ids[kept], start)
    fewer.positions = batch.positions[kept]
    # All supported models use plain addition.
    fewer.hidden_states, fewer.residual_stream = ResidualStream.from_handoff(
        value[kept], None if residual is None else residual[kept], PLAIN_ADD
    )
    return fewer


def _squares(difference: Tensor) -> Tensor:
    return difference.float().square().sum((1, 2))
