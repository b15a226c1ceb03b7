"""Runs the model over the computed tokens of a blended prefix, inside a forward pass.

Before the first layer of its own pass a request's prefix is blended block by block
(`serving.paper.blending`): SGLang's model is run layer by layer over fewer and fewer tokens of a
block, as in its split prefill, and rows are dropped between layers by SGLang's own handoff of the
residual. Keys and values are written into the request's slots, beside those restored there.

This occupies the scheduler's thread as long as computing so many tokens does, and takes the device
memory of a block's activations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding
from sglang.srt.model_executor.forward_context import forward_context, get_forward_context
from torch import Tensor

from impress_sglang.attention.rotation import KeyRotation
from impress_sglang.attention.tiled import tiled_attention, tiles_of
from impress_sglang.errors import SegmentUnreadable, UnsupportedError
from impress_sglang.integration.judged_models import BLENDED
from impress_sglang.integration.paper.recompute import BlockComputed, block_batch
from impress_sglang.loops.types import Indices, Uint8s
from impress_sglang.serving.paper.blend_plan import CHECKED_LAYERS, BlendBlock, Kind, share_of_layer
from impress_sglang.serving.paper.blended_loading import BlendedLoading
from impress_sglang.serving.paper.request import StoredRequest
from impress_sglang.transfer.slots import LayerSlots

logger = logging.getLogger(__name__)

# Rotations whose factors depend on the position alone, as rows of `cos_sin_cache`.
_KNOWN_ROTATIONS = (
    RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)


def rotation_of(model: Any) -> KeyRotation:
    """Make the rotation that moves a model's keys to other positions.

    Raises:
        UnsupportedError: its rotation is not known, or running it layer by layer was not judged.
    """
    name = type(model).__name__
    if name not in BLENDED:
        raise UnsupportedError(
            f"IMPRESS does not know how to blend with {name}, only with "
            f"{', '.join(sorted(BLENDED))}: drop --impress-blend"
        )
    found = [own for own in model.modules() if hasattr(own, "cos_sin_cache")]
    # One object serves all layers.
    if len(found) != 1 or type(found[0]) not in _KNOWN_ROTATIONS:
        kinds = ", ".join(sorted({type(own).__name__ for own in found})) or "no rotary embedding"
        raise UnsupportedError(
            f"IMPRESS cannot blend with {name}, whose keys it cannot move to other positions "
            f"({kinds}): drop --impress-blend"
        )
    (rotary,) = found

    def table(rows: int) -> Tensor:
        rotary._ensure_cos_sin_cache_length(rows - 1)
        cache: Tensor = rotary.cos_sin_cache
        return cache

    return KeyRotation(table, halves=rotary.is_neox_style)


class PrefixBlend:
    """Attention of the computed tokens of a block, each over all tokens up to itself."""

    def __init__(self, pool: Any, request: StoredRequest, loading: BlendedLoading) -> None:
        """`pool`: SGLang's KV pool, which has the slots of the request."""
        self._pool = pool
        self._request = request
        self._loading = loading
        self._row = torch.cat([request.resident_slots, request.slots])
        self._num_layers = loading.num_layers
        self.token_layers = 0
        """Computed tokens, summed over all layers."""
        self._number = -1
        self._block: BlendBlock
        self._kinds: Uint8s
        self._slots: Tensor
        self.rows: Indices
        """int64, ascending: the tokens of the block that the layer computes."""
        self.next_rows: Indices
        """Those of `rows` that the next layer computes."""

    def begin(self, number: int) -> None:
        """Begin to blend a block, perhaps the same one again.

        Raises:
            PrefixUnreadable: what is stored of it cannot be opened.
        """
        plan, resident = self._loading.plan, self._request.resident_len
        self._loading.begin_block(number)
        self._number, self._block = number, self._loading.blocks[number]
        block = self._block
        own = slice(block.start - resident, block.stop - resident)
        self._kinds = kinds = self._loading.kinds[own]
        self._slots = self._row[block.start : block.stop]
        computed = kinds != Kind.KEPT if plan.share else kinds == Kind.COMPUTED
        self.rows = self.next_rows = np.flatnonzero(computed)

    def restore(self, layer: int) -> None:
        """Load what is stored of a layer of the block into its slots."""
        pools = LayerSlots.of(*self._pools(layer))
        self._loading.restore(self._number, layer, pools, self._slots, self._request.stats)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        """Attend in one layer for the computed tokens, [n, Hq * Dv]; zero for dropped tokens.

        Raises:
            PrefixUnreadable: what is stored cannot be read.
            BlockComputed: this was the last layer, whose output is not needed.
        """
        index = layer.layer_id
        self.token_layers += len(self.rows)
        keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        values = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        key_pool, value_pool = self._pools(index)
        self.restore(index)
        slots = self._slots[torch.from_numpy(self.rows).to(keys.device)]
        self.next_rows = self.rows
        if self._loading.plan.share and index >= CHECKED_LAYERS - 1:
            self._drop(index, keys, values, key_pool[slots], value_pool[slots])
        key_pool[slots] = keys.to(key_pool.dtype)
        value_pool[slots] = values.to(value_pool.dtype)
        if index == self._num_layers - 1:
            raise BlockComputed
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        going_on = torch.from_numpy(np.isin(self.rows, self.next_rows)).to(q.device)
        output = queries.new_zeros(len(queries), layer.tp_q_head_num, layer.v_head_dim)
        if len(self.next_rows):
            output[going_on] = tiled_attention(
                queries[going_on],
                self._tiles(key_pool, value_pool),
                positions=self._block.start + self.next_rows,
                scaling=layer.scaling,
            )
        return output.reshape(len(queries), -1)

    def _drop(
        self, index: int, keys: Tensor, values: Tensor, old_keys: Tensor, old_values: Tensor
    ) -> None:
        """Keep, for the next layer, the reused tokens that deviate most and all other tokens."""
        reused = self._kinds[self.rows] == Kind.REUSED
        total = np.count_nonzero(self._kinds == Kind.REUSED)
        share = share_of_layer(self._loading.plan.share, index + 1, self._num_layers)
        count = min(round(share * total), int(reused.sum()))
        deviation = (_squares(keys - old_keys) + _squares(values - old_values)).cpu().numpy()
        kept = ~reused
        # Tokens that are not reused have -1 and sort first; the most deviant sort last.
        kept[np.argsort(np.where(reused, deviation, -1.0))[len(kept) - count :]] = True
        self.next_rows = self.rows[kept]

    def _pools(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.get_key_buffer(layer), self._pool.get_value_buffer(layer)

    def _tiles(self, key_pool: Tensor, value_pool: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for tile in tiles_of(self._block.stop):
            slots = self._row[tile]
            yield key_pool[slots], value_pool[slots]


def blend_prefix(
    model: Any, request: StoredRequest, blend: PrefixBlend, loading: BlendedLoading, deadline: float
) -> bool:
    """Blend a prefix into its slots, in all layers.

    Meanwhile the attention backend must pass its calls on to `blend`. Returns whether all was done
    by `deadline`, a time of `time.monotonic`.

    Raises:
        PrefixUnreadable: what is stored cannot be read.
    """
    number = 0
    while number < len(loading.blocks):
        try:
            blend.begin(number)
            block = loading.blocks[number]
            if not _blend_block(model, request, blend, block, loading.num_layers, deadline):
                return False
        except SegmentUnreadable as error:
            if not loading.compute_instead(number, error):
                raise
            logger.warning("request %s computes what it cannot blend: %s", request.rid, error)
            continue
        loading.end_block(number)
        number += 1
    loading.blended = True
    loading.computed = blend.token_layers / loading.num_layers
    request.report.update(blended_tokens=loading.reused)
    return True


def _blend_block(
    model: Any,
    request: StoredRequest,
    blend: PrefixBlend,
    block: BlendBlock,
    num_layers: int,
    deadline: float,
) -> bool:
    device = request.slots.device
    tokens = request.token_ids[block.start : block.stop]
    batch: Any = None
    for layer in range(num_layers):
        if time.monotonic() >= deadline:
            return False
        if not len(blend.rows):
            blend.restore(layer)
            continue
        if batch is None:
            batch = block_batch(tokens[torch.from_numpy(blend.rows)].to(device), block.start)
            batch.positions = torch.from_numpy(block.start + blend.rows).to(device)
        try:
            with forward_context(get_forward_context(), forward_batch=batch):
                model.forward_split_prefill(
                    batch.input_ids, batch.positions, batch, (layer, layer + 1)
                )
        except BlockComputed:
            return True
        if len(blend.next_rows) < len(blend.rows):
            kept = np.isin(blend.rows, blend.next_rows)
            batch = _with_rows(batch, torch.from_numpy(kept).to(device), block.start)
        blend.rows = blend.next_rows
    return True


def _with_rows(batch: Any, kept: Tensor, start: int) -> Any:
    """Reduce a batch between two layers to the tokens that are `kept`, bool [n]."""
    handoff = residual_batch.export_replay_handoff(batch.hidden_states, batch)
    handoff = handoff._replace(
        value=handoff.value[kept],
        residual=None if handoff.residual is None else handoff.residual[kept],
    )
    fewer = block_batch(batch.input_ids[kept], start)
    fewer.positions = batch.positions[kept]
    fewer.hidden_states = residual_batch.import_replay_handoff(handoff, fewer)
    return fewer


def _squares(difference: Tensor) -> Tensor:
    return difference.float().square().sum((1, 2))
