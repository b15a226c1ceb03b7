"""A model of SGLang's kind in torch, and its pool: what is run again within a pass is compared."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import Tensor

from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.plugin.rectangular import rectangular_attention
from impress_sglang.storage.layout import KVShape

HIDDEN, WORDS, SCALING = 24, 50, 0.3
KVs = list[tuple[Tensor, Tensor]]


def write_config(folder: Path, kind: str = "Llama", **fields: Any) -> Path:
    """The folder of a model without weights, of a kind of the library's."""
    make, task = getattr(transformers, f"{kind}Config"), kind.removesuffix("Text")
    config = make(**{"architectures": [f"{task}ForCausalLM"]} | fields)
    config.save_pretrained(folder / kind)
    return folder / kind


def _table(rows: int) -> Tensor:
    angles = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    return torch.cat([angles.cos(), angles.sin()], -1)


ROTATION = KeyRotation(_table, halves=True)


def rotated(rows: Tensor, positions: Tensor) -> Tensor:
    return ROTATION.move(rows, ROTATION.factors(torch.zeros_like(positions), positions))


def draw(seed: int, length: int) -> list[int]:
    return [*map(int, tokens_of(seed, length))]


def tokens_of(seed: int, length: int) -> Tensor:
    return torch.randint(0, WORDS, (length,), generator=torch.Generator().manual_seed(seed))


def layer_of(shape: KVShape, index: int) -> Any:
    """What SGLang says of an attention layer."""
    return SimpleNamespace(
        layer_id=index,
        scaling=SCALING,
        tp_q_head_num=shape.num_query_heads,
        tp_k_head_num=shape.num_kv_heads,
        tp_v_head_num=shape.num_kv_heads,
        qk_head_dim=shape.key_dim,
        v_head_dim=shape.value_dim,
    )


class Pool:
    """Stands in for SGLang's: the KVs of all slots. A read may be held up, and must not be made
    while the pool is paused."""

    start_layer = 0

    def __init__(self, shape: KVShape, size: int) -> None:
        self.keys, self.values = (
            [*torch.full((shape.num_layers, size, shape.num_kv_heads, dim), math.nan)]
            for dim in (shape.key_dim, shape.value_dim)
        )
        self.paused, self.reads = False, 0
        self.reading, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.keys[layer]

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.values[layer]

    def _get_key_buffer(self, layer: int) -> Tensor:
        self.reads += 1
        self.reading.set()
        assert self.go_on.wait(30)
        assert not self.paused, "the pool is read while it is paused"
        return self.keys[layer]

    _get_value_buffer = get_value_buffer

    def register_layer_transfer_counter(self, counter: Any) -> None:
        """Nobody starts early here."""


class Model:
    """Embeds, and per layer projects, rotates, attends as the forward context says, and adds."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(4)
        heads = shape.num_query_heads, shape.num_kv_heads, shape.num_kv_heads
        dims = shape.key_dim, shape.key_dim, shape.value_dim
        sizes = [(HIDDEN, count * dim) for count, dim in zip(heads, dims, strict=True)]
        sizes.append((shape.num_query_heads * shape.value_dim, HIDDEN))

        def weights(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator) * 0.25

        self.embedding = weights(WORDS, HIDDEN)
        self.projections = [[weights(*size) for size in sizes] for _ in range(shape.num_layers)]
        self.layers = [layer_of(shape, index) for index in range(shape.num_layers)]
        # Of each run of a layer: its number, and how many tokens it had.
        self.computed: list[list[int]] = []

    def projected(self, hidden: Tensor, positions: Tensor, layer: int) -> tuple[Tensor, ...]:
        """Queries, keys and values [t, heads, D]."""
        q, k, v = (hidden @ weights for weights in self.projections[layer][:3])
        dim = self.shape.key_dim
        q, k = (rotated(heads.view(len(hidden), -1, dim), positions) for heads in (q, k))
        return q, k, v.view(len(hidden), -1, self.shape.value_dim)

    def layer(self, hidden: Tensor, positions: Tensor, layer: int) -> Tensor:
        self.computed.append([layer, len(hidden)])
        q, k, v = (heads.flatten(1) for heads in self.projected(hidden, positions, layer))
        output: Tensor = get_attn_backend().forward(q, k, v, self.layers[layer], None)
        return output @ self.projections[layer][3]

    def modules(self) -> tuple[()]:
        return ()

    def forward_split_prefill(
        self, ids: Tensor, positions: Tensor, batch: Any, interval: tuple[int, int]
    ) -> None:
        """One layer, as SGLang runs it."""
        first, last = interval
        assert last == first + 1 and len(ids) == len(positions) == sum(batch.extend_seq_lens_cpu)
        if first == 0:
            residual_batch.start(batch)
            batch.hidden_states = self.embedding[ids]
        stream = residual_batch.stream_of(batch)
        # What the layer before has computed is still to be added.
        output, residual = stream.input(batch.hidden_states)
        hidden = output if residual is None else output + residual
        assert len(hidden) == len(ids)
        stream.write(hidden)
        batch.hidden_states = stream.record(self.layer(hidden, positions, first), PLAIN_ADD)

    def kvs(self, tokens: Tensor) -> KVs:
        """Keys and values [t, G, D] of each layer, all tokens at once from position 0."""
        hidden, positions, found = self.embedding[tokens], torch.arange(len(tokens)), []
        for layer, weights in enumerate(self.projections):
            q, k, v = self.projected(hidden, positions, layer)
            found.append((k, v))
            output = rectangular_attention(q, k, v, scaling=SCALING, causal=True)
            hidden = hidden + output.flatten(1) @ weights[3]
        return found
