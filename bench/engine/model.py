"""A model of a shape with random weights, and a pool with room for the KVs of one request.

What a layer costs depends on shapes, not on weights: weights are random, and a few layers may stand
for all. Rotary embedding is left out (elementwise, far below a hundredth of a layer).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from bench.engine.clock import ATTENTION, LOAD, MODEL, Served, StageClock, stage_clock
from bench.engine.workload import ModelShape, Planter, Question, Request, Workload
from impress_sglang.attention.rectangular import rectangular_attention
from impress_sglang.cost import pairs_of

# Fills the pool of a layer from its queries, keys and values; the length that attention sees.
Place = Callable[[int, Tensor, Tensor, Tensor], int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer, [out, in]; queries, keys and values in one, gate and up in one."""

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    ffn_norm: Tensor
    up: Tensor
    down: Tensor


class Model:
    """Random layers of a shape on one device."""

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        dtype: torch.dtype,
        *,
        distinct_layers: int,
        seed: int,
    ) -> None:
        """Layer i has the weights of layer i modulo `distinct_layers`."""
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        count = min(distinct_layers, shape.layers)
        self._layers = [self._make_layer() for _ in range(count)]
        self._embedding = self._random(shape.vocabulary, shape.hidden, spread=1.0)
        self._head = self._random(shape.vocabulary, shape.hidden)
        self._norm = torch.ones(shape.hidden, device=device, dtype=dtype)

    @property
    def distinct_layers(self) -> int:
        """Layers that have weights of their own."""
        return len(self._layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states [n, hidden] of int64 [n] tokens; any number is a token."""
        return functional.embedding(tokens % self.shape.vocabulary, self._embedding)

    def project(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [n, Hq, D], keys and values [n, G, D] of hidden states [n, hidden]."""
        shape, weights = self.shape, self._layers[layer % len(self._layers)]
        normed = self._normed(hidden, weights.attention_norm)
        flat = self._linear(normed, weights.qkv).view(len(hidden), -1, shape.head_dim)
        heads = [shape.query_heads, shape.kv_heads, shape.kv_heads]
        queries, keys, values = flat.split(heads, dim=1)
        return queries, keys, values

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Hidden states after a layer, from those before it and attention's output [n, Hq, D]."""
        weights = self._layers[layer % len(self._layers)]
        hidden = hidden + self._linear(attended.reshape(len(hidden), -1), weights.output)
        up = self._linear(self._normed(hidden, weights.ffn_norm), weights.up)
        if self.shape.gated:
            gate, up = up.chunk(2, dim=1)
            inner = functional.silu(gate) * up
        else:
            inner = functional.relu(up)
        return hidden + self._linear(inner, weights.down)

    def first_token(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The most likely token after hidden states [n, hidden], and the last logits [vocab]."""
        logits = functional.linear(self._normed(hidden[-1:], self._norm), self._head)[0]
        return logits.argmax(), logits

    def _make_layer(self) -> _Layer:
        shape = self.shape
        inner = shape.query_heads * shape.head_dim
        both = inner + 2 * shape.kv_heads * shape.head_dim
        ones = torch.ones(shape.hidden, device=self.device, dtype=self.dtype)
        return _Layer(
            attention_norm=ones,
            qkv=self._random(both, shape.hidden),
            output=self._random(shape.hidden, inner),
            ffn_norm=ones.clone(),
            up=self._random(shape.ffn * (2 if shape.gated else 1), shape.hidden),
            down=self._random(shape.hidden, shape.ffn),
        )

    def _random(self, rows: int, columns: int, spread: float | None = None) -> Tensor:
        """Normal weights that keep the size of what they are applied to, or of a given spread."""
        weights = torch.randn(
            rows, columns, generator=self._generator, device=self.device, dtype=self.dtype
        )
        return weights.mul_(columns**-0.5 if spread is None else spread)

    def _linear(self, rows: Tensor, weights: Tensor) -> Tensor:
        bias = None if self.shape.gated else weights.new_zeros(len(weights))
        return functional.linear(rows, weights, bias)

    def _normed(self, hidden: Tensor, weights: Tensor) -> Tensor:
        size = (self.shape.hidden,)
        if self.shape.gated:
            return functional.rms_norm(hidden, size, weights)
        return functional.layer_norm(hidden, size, weights, torch.zeros_like(weights))


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of n queries [n, Hq, D] over [kv, G, D] rows, the last n of them causal.

    On a CPU that is the one of the server. It hides keys by a mask, which would take an accelerator
    off its fast kernels.
    """
    if queries.device.type != "cpu":
        return aligned_attention(queries, keys, values)
    scaling = queries.shape[2] ** -0.5
    return rectangular_attention(queries, keys, values, scaling=scaling, causal=True)


def aligned_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The same by a bias that says which keys are seen."""
    from torch.nn.attention.bias import causal_lower_right

    output = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=causal_lower_right(len(queries), len(keys)),
        scale=queries.shape[2] ** -0.5,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return output[0].transpose(0, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A request with all that is known before its time begins: int32 [m + n] and its tensors."""

    prompt: npt.NDArray[np.int32]
    tokens: Tensor
    question: Question


class Engine:
    """A model with room for the KVs of one request, and the planted KVs."""

    def __init__(self, model: Model, planter: Planter, workload: Workload) -> None:
        self.model = model
        self.planter = planter
        self.workload = workload
        shape, rows = model.shape, max(workload.lengths) + workload.longest_new
        size = (rows, shape.kv_heads, shape.head_dim)

        def memory() -> Tensor:
            return torch.zeros(size, device=model.device, dtype=model.dtype)

        self.keys = [memory() for _ in range(shape.layers)]
        self.values = [memory() for _ in range(shape.layers)]
        self.passes: list[tuple[int, float, float]] = []
        """New tokens, attended pairs and seconds of each request that was computed."""
        self._spare = memory(), memory()

    def prepare(self, request: Request) -> Asked:
        """Plant the question of a request, and wait until the device is idle."""
        prompt = self.workload.prompt(request)
        tokens = torch.from_numpy(prompt.astype(np.int64)).to(self.model.device)
        question = self.planter.question(request.question, request.new_tokens)
        self.synchronize()
        return Asked(prompt, tokens, question)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def plant(self, prefix: int) -> None:
        """Put the KVs of a prefix into the pool."""
        length = self.workload.lengths[prefix]
        for layer, (keys, values) in enumerate(self.planter.prefix(prefix, length)):
            self.keys[layer][:length] = keys
            self.values[layer][:length] = values

    def serve_computed(self, request: Request) -> Served:
        """Compute prefix and question.

        What the prefix's projections give is written to memory that nobody reads: the pool has its
        planted KVs already.
        """
        self.plant(request.prefix)
        asked, length = self.prepare(request), self.workload.lengths[request.prefix]
        clock = stage_clock(self.model.device)

        def place(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> int:
            with clock.span(LOAD):
                for spare, computed in zip(self._spare, (keys, values), strict=True):
                    spare[:length] = computed[:length]
                queries[length:] = asked.question.queries[layer]
                return self.add_new(layer, length, asked.question, values[length:])

        logits = self.forward(asked.tokens, clock, place)
        stages = clock.finish()
        new = len(asked.tokens)
        self.passes.append((new, pairs_of(0, new), clock.duration_ms / 1e3))
        return Served(clock.duration_ms, stages, logits)

    def add_new(self, layer: int, before: int, question: Question, values: Tensor) -> int:
        """Write the new tokens' planted keys and computed values [n, G, D] after `before` rows."""
        stop = before + len(values)
        self.keys[layer][before:stop] = question.new_keys[layer]
        self.values[layer][before:stop] = values
        return stop

    def forward(self, tokens: Tensor, clock: StageClock, place: Place) -> Tensor:
        """Run the model over tokens [n]; logits of the token after them, computed when it returns.

        `place` may overwrite the queries that it is given.
        """
        model = self.model
        hidden = model.embed(tokens)
        for layer in range(model.shape.layers):
            with clock.span(MODEL):
                queries, keys, values = model.project(layer, hidden)
            count = place(layer, queries, keys, values)
            with clock.span(ATTENTION):
                attended = attention(queries, self.keys[layer][:count], self.values[layer][:count])
            with clock.span(MODEL):
                hidden = model.finish(layer, hidden, attended)
        with clock.span(MODEL):
            token, logits = model.first_token(hidden)
        int(token)
        self.synchronize()
        return logits
