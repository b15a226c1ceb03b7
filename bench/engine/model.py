"""Models of a shape with random weights.

What a layer costs depends on shapes, not on weights: weights are random, and a few layers may stand
for all. Rotary embedding is left out (elementwise, far below a hundredth of a layer).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from impress_sglang.config import USUAL_BITS
from impress_sglang.storage.layout import KVShape

DISTINCT_LAYERS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model with RMSNorm and SwiGLU."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    head_dim: int = 128

    @property
    def hidden(self) -> int:
        """Elements of a hidden state."""
        return self.query_heads * self.head_dim

    def scaled(self, scale: float, layers: int | None) -> ModelShape:
        """With so many times the heads, and as much less of what goes with them.

        The head dimension and the query heads per KV head stay. `layers` replaces their number.
        """
        kv_heads = max(1, round(self.kv_heads * scale))
        return dataclasses.replace(
            self,
            layers=layers or self.layers,
            query_heads=kv_heads * (self.query_heads // self.kv_heads),
            kv_heads=kv_heads,
            ffn=max(8, round(self.ffn * scale)),
            vocabulary=max(8, round(self.vocabulary * scale)),
        )

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """How a store sees the model."""
        heads = self.query_heads, self.kv_heads
        return KVShape(self.layers, *heads, self.head_dim, self.head_dim, dtype, (), USUAL_BITS)


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 32, 32, 11008, 32000),
        ModelShape("llama-2-13b", 40, 40, 40, 13824, 32000),
        ModelShape("llama-3-8b", 32, 32, 8, 14336, 128256),
        ModelShape("llama-3-70b", 80, 64, 8, 28672, 128256),
    )
}


class Model:
    """Random layers of a shape on one device, and a pool with room for one request."""

    def __init__(
        self, shape: ModelShape, device: torch.device, dtype: torch.dtype, rows: int, seed: int
    ) -> None:
        """A pool with so many rows; layer i has the weights of layer i modulo 4."""
        self.shape, self.device, self.dtype = shape, device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)
        inner, size = shape.query_heads * shape.head_dim, (rows, shape.kv_heads, shape.head_dim)
        both = inner + 2 * shape.kv_heads * shape.head_dim
        # Queries, keys and values in one; what attention gives; gate and up in one; down.
        sizes = (both, shape.hidden), (shape.hidden, inner)
        sizes += (2 * shape.ffn, shape.hidden), (shape.hidden, shape.ffn)
        count = min(DISTINCT_LAYERS, shape.layers)
        self._layers = [
            [self.random(*size) * size[1] ** -0.5 for size in sizes] for _ in range(count)
        ]
        self._embedding = self.random(shape.vocabulary, shape.hidden)
        self._head = self.random(shape.vocabulary, shape.hidden) * shape.hidden**-0.5
        self._norm = torch.ones(shape.hidden, device=device, dtype=dtype)
        self.pools = [(self.random(*size), self.random(*size)) for _ in range(shape.layers)]
        """Keys and values of each layer, [rows, G, D]."""

    def random(self, *size: int) -> Tensor:
        """Normal numbers, equal for equal seeds."""
        how = {"generator": self._generator, "device": self.device, "dtype": self.dtype}
        return torch.randn(*size, **how)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forward(self, tokens: Tensor, before: int) -> Tensor:
        """Run over int64 [n] tokens behind so many rows of the pool, which get theirs behind that.

        Returns:
            The logits of the token after them, [vocabulary], computed when it returns.
        """
        shape, stop = self.shape, before + len(tokens)
        hidden = functional.embedding(tokens % shape.vocabulary, self._embedding)
        heads = [shape.query_heads, shape.kv_heads, shape.kv_heads]
        for layer, (keys, values) in enumerate(self.pools):
            qkv, output, up, down = self._layers[layer % len(self._layers)]
            flat = functional.linear(self._normed(hidden), qkv)
            queries, *new = flat.view(len(tokens), -1, shape.head_dim).split(heads, dim=1)
            keys[before:stop], values[before:stop] = new
            attended = attention(queries, keys[:stop], values[:stop])
            hidden = hidden + functional.linear(attended.reshape(len(tokens), -1), output)
            gate, inner = functional.linear(self._normed(hidden), up).chunk(2, dim=1)
            hidden = hidden + functional.linear(functional.silu(gate) * inner, down)
        logits = functional.linear(self._normed(hidden[-1:]), self._head)[0]
        self.synchronize()
        return logits

    def _normed(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (self.shape.hidden,), self._norm)


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of n queries [n, Hq, D] over [kv, G, D] rows, the last n of them causal.

    A mask would take an accelerator off its fast kernels, so a bias says which keys are seen.
    """
    from torch.nn.attention.bias import causal_lower_right

    output = functional.scaled_dot_product_attention(
        *(rows.transpose(0, 1)[None] for rows in (queries, keys, values)),
        attn_mask=causal_lower_right(len(queries), len(keys)),
        scale=queries.shape[2] ** -0.5,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return output[0].transpose(0, 1)
