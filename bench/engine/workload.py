"""What `bench engine` serves: model shapes, prefixes with planted importance, and questions.

Random KVs have flat attention, and the important tokens of two questions would have nothing in
common. So importance is planted. Per layer, KV head and token there is a weight

    a = sqrt(s) x (shared by the heads of the layer) + sqrt(1 - s) x (the head's own),

normal, and in part alike for neighbouring tokens and layers. A key is `a` times the head's
direction plus noise in all other directions. A query is the head's direction, plus a direction of
its question, plus in grouped models one of its query head, plus noise of its own: its logits are
normal, so its attention weights are log-normal, which has a heavy tail. Token 0 is a sink. A
test measures what comes out; real models were found to have (IMPRESS
4.2, and SmolLM2) a Jaccard index between the top 25% of 0.66 to
0.79 for two questions on a head, of about 0.38 for two heads, and 36 to 51% of the mass on token 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.policies.trace import MIN_SIGMA, draw_prefixes
from impress_sglang.storage.layout import KVShape

PROBE_HEADS = 3
# Kinds of what is drawn at random, so that no two draws have the same seed.
_DIRECTIONS, _PREFIX, _COMMON, _QUESTION = range(4)
_SEED_BITS = 2**62


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only model; `gated`: RMSNorm and SwiGLU, else LayerNorm, ReLU, biases."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    gated: bool
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

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of one token."""
        size: int = 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize
        return size

    def kv_shape(self, dtype: torch.dtype, probe_kv_heads: tuple[int, ...]) -> KVShape:
        """How a store sees the model."""
        return KVShape(
            self.layers,
            self.query_heads,
            self.kv_heads,
            self.head_dim,
            self.head_dim,
            dtype,
            probe_kv_heads,
            coded=not probe_kv_heads,
        )


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("opt-6.7b", 32, 32, 32, 16384, 50272, gated=False),
        ModelShape("opt-13b", 40, 40, 40, 20480, 50272, gated=False),
        ModelShape("opt-30b", 48, 56, 56, 28672, 50272, gated=False),
        ModelShape("llama-2-7b", 32, 32, 32, 11008, 32000, gated=True),
        ModelShape("llama-2-13b", 40, 40, 40, 13824, 32000, gated=True),
        ModelShape("llama-3-8b", 32, 32, 8, 14336, 128256, gated=True),
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Planting:
    """Strengths of the planted parts, as standard deviations of logits, and shares of variances.

    `shared`: of a token's weight that the heads of a layer have in common, between these from layer
    to layer. `across_layers`: of that part that all layers have in common. `smooth`: of all weights
    that `window` neighbouring tokens have in common. `sink_mass`: of the attention mass on token 0.
    """

    head: float = 1.9
    question: float = 0.42
    query_head: float = 0.8
    token: float = 0.7
    shared: tuple[float, float] = (0.5, 0.9)
    across_layers: float = 0.2
    smooth: float = 0.7
    window: int = 20
    sink_mass: tuple[float, float] = (0.36, 0.51)


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """Of each layer, queries [n, Hq, D] and keys [n, G, D] of the new tokens."""

    queries: list[Tensor]
    new_keys: list[Tensor]


class Planter:
    """Makes KVs of prefixes and queries of questions; equal seeds give equal ones on a device."""

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        dtype: torch.dtype,
        *,
        seed: int,
        planting: Planting | None = None,
    ) -> None:
        self.planting = planting or Planting()
        self.shape = shape
        self._device = device
        self._dtype = dtype
        self._seed = seed
        self._group = shape.query_heads // shape.kv_heads
        self._heads = [self._directions(layer) for layer in range(shape.layers)]

    def prefix(self, number: int, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [m, G, D] of a prefix, layer after layer."""
        common = self._field(self._generator(_COMMON, number, 0), num_tokens, 1)
        for layer in range(self.shape.layers):
            yield self._layer(number, layer, common)

    def question(self, number: int, num_tokens: int) -> Question:
        """The queries and keys of a question with so many tokens."""
        layers = [self._ask(number, layer, num_tokens) for layer in range(self.shape.layers)]
        return Question([queries for queries, _ in layers], [keys for _, keys in layers])

    def _layer(self, number: int, layer: int, common: Tensor) -> tuple[Tensor, Tensor]:
        planting, shape = self.planting, self.shape
        generator, num_tokens = self._generator(_PREFIX, number, layer), len(common)
        direction = self._heads[layer][0]
        low, high = planting.shared
        share = low + (high - low) * _fraction(layer, self._seed)
        by_layer = _mix(common, self._field(generator, num_tokens, 1), planting.across_layers)
        weights = _mix(by_layer, self._field(generator, num_tokens, shape.kv_heads), share)
        keys = self._normal(generator, num_tokens, shape.kv_heads, shape.head_dim)
        # Nothing but the weight in the head's direction, and nothing else in the sink.
        keys -= (keys * direction).sum(-1, keepdim=True) * direction
        keys[0] = 0.0
        weights[0] = self._sink_weights(generator, num_tokens)
        keys += weights[..., None] * direction
        values = self._normal(generator, num_tokens, shape.kv_heads, shape.head_dim)
        return keys.to(self._dtype), values.to(self._dtype)

    def _ask(self, number: int, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        planting, shape = self.planting, self.shape
        generator = self._generator(_QUESTION, number, layer)
        direction, by_query_head = self._heads[layer]
        asked = _unit(_without(self._normal(generator, shape.kv_heads, shape.head_dim), direction))
        direction, asked = (part.repeat_interleave(self._group, 0) for part in (direction, asked))
        noise = self._normal(generator, num_tokens, shape.query_heads, shape.head_dim)
        queries = planting.token * _without(noise, direction)
        mean = planting.head * direction + planting.question * asked
        if self._group > 1:
            mean = mean + planting.query_head * by_query_head
        queries += shape.head_dim**0.5 * mean
        keys = self._normal(generator, num_tokens, shape.kv_heads, shape.head_dim)
        return queries.to(self._dtype), keys.to(self._dtype)

    def _directions(self, layer: int) -> tuple[Tensor, Tensor]:
        """Unit vectors: of each KV head [G, D], and of each query head [Hq, D], at right angles."""
        shape, generator = self.shape, self._generator(_DIRECTIONS, 0, layer)
        heads = _unit(self._normal(generator, shape.kv_heads, shape.head_dim))
        apart = self._normal(generator, shape.query_heads, shape.head_dim)
        return heads, _unit(_without(apart, heads.repeat_interleave(self._group, 0)))

    def _sink_weights(self, generator: torch.Generator, num_tokens: int) -> Tensor:
        """Weights [G] with which token 0 gets its mass."""
        planting = self.planting
        low, high = planting.sink_mass
        uniform = torch.rand(self.shape.kv_heads, generator=generator, device=self._device)
        mass = low + (high - low) * uniform
        variance = planting.head**2 + planting.question**2 + planting.token**2
        variance += planting.query_head**2 if self._group > 1 else 0.0
        others = math.log(max(num_tokens - 1, 1)) + variance / 2
        return (torch.log(mass / (1 - mass)) + others) / planting.head

    def _field(self, generator: torch.Generator, num_tokens: int, heads: int) -> Tensor:
        """Normal weights [t, heads], in part alike for neighbouring tokens."""
        window = self.planting.window
        sums = self._normal(generator, num_tokens + window, heads).double().cumsum(0)
        smooth = ((sums[window:] - sums[:-window]) / window**0.5).float()
        return _mix(smooth, self._normal(generator, num_tokens, heads), self.planting.smooth)

    def _normal(self, generator: torch.Generator, *size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=self._device)

    def _generator(self, kind: int, number: int, layer: int) -> torch.Generator:
        entropy = np.random.SeedSequence([self._seed, kind, number, layer]).generate_state(
            1, np.uint64
        )
        return torch.Generator(self._device).manual_seed(int(entropy[0]) % _SEED_BITS)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A prefix and a question by their numbers, and how many tokens are new."""

    prefix: int
    question: int
    new_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of the prefixes, and the requests in their order; the same for every system."""

    lengths: list[int]
    warmup: list[Request]
    settle: list[Request]
    measured: list[Request]

    def tokens(self, prefix: int) -> npt.NDArray[np.int32]:
        """Token ids of a prefix; no two prefixes begin alike."""
        return (1_000_000 * (prefix + 1) + np.arange(self.lengths[prefix])).astype(np.int32)

    def prompt(self, request: Request) -> npt.NDArray[np.int32]:
        """Token ids of a request: its prefix and its question."""
        question = np.arange(request.new_tokens, dtype=np.int32)
        return np.concatenate([self.tokens(request.prefix), question])

    @property
    def longest_new(self) -> int:
        """New tokens of the longest question."""
        return max(request.new_tokens for request in (*self.warmup, *self.settle, *self.measured))


def make_workload(
    prefixes: int,
    prefix_tokens: tuple[int, int],
    new_tokens: tuple[int, int],
    parts: tuple[int, int, int],
    seed: int,
) -> Workload:
    """Prefixes of lengths evenly between the bounds, and who asks what; equal options, equal ones.

    Popularity is normal over the prefixes, as in the paper (6.1). No prefix is asked twice in a
    row: a server's device pool still has the last one. `parts` are the numbers of requests of the
    warm-up, the one after it and the measured part.
    """
    assert prefixes >= 2
    rng = np.random.default_rng(seed)
    lengths = np.linspace(*prefix_tokens, prefixes).round().astype(int)
    total = sum(parts)
    drawn = draw_prefixes(total, prefixes, max(MIN_SIGMA, prefixes / 4), rng)
    least, most = new_tokens
    new = rng.integers(least, most + 1, total).tolist()
    requests = [Request(*drawing) for drawing in zip(drawn, range(total), new, strict=True)]
    first, second = parts[0], parts[0] + parts[1]
    return Workload(
        rng.permutation(lengths).tolist(),
        requests[:first],
        requests[first:second],
        requests[second:],
    )


def _fraction(layer: int, seed: int) -> float:
    """A number in [0, 1) that goes with a layer."""
    return float(np.random.default_rng([seed, layer]).random())


def _mix(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Of two normal tensors one that is as normal, `share` of its variance the first one's."""
    return share**0.5 * one + (1.0 - share) ** 0.5 * other


def _unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _without(vectors: Tensor, direction: Tensor) -> Tensor:
    """What of vectors [..., D] is at right angles to unit vectors."""
    return vectors - (vectors * direction).sum(-1, keepdim=True) * direction
