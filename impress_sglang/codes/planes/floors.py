"""How the heads of a layer are coded: measured with the last queries of a prompt.

Which bits of keys come first depends on the *energy* of their channels, the mean square of queries
(see `codec`). Some heads need more than the bits of the base: keys of some models have large biases
(norms of hundreds in the first and last layer of Qwen2.5-7B), which widen the ranges of all tokens
once they are rotated. So the writer of a layer measures: some tokens of the layer are rounded, and
the queries of the prompt's last tokens attend to them and, as a request would, to the last tokens
unrounded. The *floor* of a KV head is the number of planes that belong to its base. It is 0 if the
error of the output with the base alone is bearable; otherwise it is the least with which the error
is a third of that, as it is for most heads with the base alone.

Both depend more on the model than on the text: where no queries are known, what was measured last
is used, by this process or by an earlier one that left it in the store. So it is measured with the
first prompts, and then now and then. Where nothing was measured, all planes belong to the base, and
all channels count alike.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import zipfile
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from impress_sglang.codes.planes.codec import (
    GROUP_TOKENS,
    LEVELS,
    NUM_PLANES,
    code_keys,
    code_values,
    restore,
)

logger = logging.getLogger(__name__)

# So many prompts are measured, and then one of so many.
FIRST_PROMPTS = 8
ONE_OF_PROMPTS = 16
# How many queries, of the last tokens of a prompt, are noted for this.
MEASURED_QUERIES = 16
# The most tokens of a layer that are rounded for this: 2 to 4 ms of the writing thread for
# SmolLM2-135M, 8 to 23 ms for Llama-3-8B. It is no limit of time, so that a busy machine stores
# the same prompt with the same floors.
MEASURED_TOKENS = 8 * GROUP_TOKENS

# The error allowed to a head whose floor is raised, as a share of what is bearable.
RAISED_SHARE = 1 / 3

# Planes that belong to the base: uint8 [G] of a layer, [L, G] of a segment.
Floors = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class Coding:
    """How a layer is coded.

    `floors` uint8 [G]; `energy` float32 [G, Dk], see `codes.planes.codec.code_keys`; None: all
    channels count alike. With a basis there are no floors; `rows` uint8 [t, row_bytes] are the
    codes, and `fit` is `codes.rows.coder.fit_of` them.
    """

    floors: Floors = dataclasses.field(default_factory=lambda: np.zeros(0, np.uint8))
    energy: Tensor | None = None
    rows: Tensor | None = None
    fit: float = 0.0


# Returns how a layer is coded, given its number, keys [t, G, Dk] and values [t, G, Dv].
CodingRule = Callable[[int, Tensor, Tensor], Coding]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerQueries:
    """Queries of the last tokens of a prompt, [n, Hq, Dk] on the CPU, and the factor of logits."""

    rows: Tensor
    scaling: float


QuerySource = Callable[[int], LayerQueries | None]


def no_queries(layer: int) -> None:
    """A `QuerySource` that knows no queries."""


class CodingMeter:
    """Measures on the writing thread how layers are coded; others may `note` floors of headers."""

    def __init__(self, bearable: float) -> None:
        """`bearable`: relative error of the output of a KV head's queries; 0: no floors."""
        self._bearable = bearable
        self._floors: dict[int, Floors] = {}
        self._energies: dict[int, Tensor] = {}
        self._prompts = 0
        self.has_news = False
        """Whether something was measured since the last `dump`."""

    def wants(self) -> bool:
        """Whether another prompt that will be stored should be measured; each one is counted."""
        self._prompts += 1
        return self._prompts <= FIRST_PROMPTS or self._prompts % ONE_OF_PROMPTS == 0

    def dump(self) -> bytes:
        """What was measured, for `restore`; on the writing thread."""
        self.has_news = False
        arrays = {f"energy.{layer}": own.numpy() for layer, own in self._energies.items()}
        arrays |= {f"floors.{layer}": own for layer, own in self._floors.items()}
        content = io.BytesIO()
        np.savez(content, allow_pickle=False, **arrays)
        return content.getvalue()

    def restore(self, content: bytes) -> None:
        """Begin with what another process has measured; ignore what is damaged."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
            for name, own in found.items():
                kind, layer = name.split(".")
                if kind == "energy" and own.dtype == np.float32 and np.isfinite(own).all():
                    self._energies[int(layer)] = torch.from_numpy(own)
                elif kind == "floors" and own.dtype == np.uint8 and (own <= NUM_PLANES).all():
                    self._floors[int(layer)] = own
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            logger.warning("what is known of queries is damaged, and is measured anew: %s", error)
            return
        self._prompts = FIRST_PROMPTS

    @property
    def mean_planes(self) -> float:
        """Planes of a unit that belong to the base, on average over the known floors; else 0."""
        known = list(self._floors.values())
        return float(np.mean(known)) if known else 0.0

    def note(self, floors: Floors) -> None:
        """Note the floors [L, G] of a segment that was written earlier."""
        # All planes for all heads may also mean that nothing was measured.
        if (floors < NUM_PLANES).any():
            self._floors.update(enumerate(floors))

    def rule(self, queries: QuerySource, num_behind: int) -> CodingRule:
        """The rule for a segment that has `num_behind` tokens of its prompt behind it."""

        def coding(layer: int, keys: Tensor, values: Tensor) -> Coding:
            heads = keys.shape[1]
            given = queries(layer)
            if given is not None:
                self._energies[layer] = energy_of(given.rows, heads)
                self.has_news = True
            energy = self._energies.get(layer)
            if energy is not None and energy.shape != keys.shape[1:]:
                energy = None
            if not self._bearable:
                return Coding(np.zeros(heads, np.uint8), energy)
            own = 0 if given is None else max(0, len(given.rows) - num_behind)
            if given is not None and len(keys) - own >= GROUP_TOKENS:
                self._floors[layer] = self._measure(keys, values, given, own, energy)
            every = np.full(heads, NUM_PLANES, np.uint8)
            floors = self._floors.get(layer, every)
            return Coding(floors if floors.shape == every.shape else every, energy)

        return coding

    def _measure(
        self, keys: Tensor, values: Tensor, given: LayerQueries, own: int, energy: Tensor | None
    ) -> Floors:
        old = len(keys) - own
        rows = sampled_groups(old, MEASURED_TOKENS)
        rounded, exact = (keys[:old][rows], values[:old][rows]), (keys[old:], values[old:])
        return floors_of(rounded, exact, given, self._bearable, energy)


def energy_of(queries: Tensor, num_kv_heads: int) -> Tensor:
    """The mean square of queries [n, Hq, Dk] of each KV head in each channel, float32 [G, Dk]."""
    return queries.float().square().unflatten(1, (num_kv_heads, -1)).mean((0, 2))


def sampled_groups(num_tokens: int, most: int) -> Tensor:
    """Tokens of whole groups, evenly spread from the first to the last: int64 [at most `most`]."""
    count = -(-num_tokens // GROUP_TOKENS)
    chosen = torch.linspace(0, count - 1, min(count, most // GROUP_TOKENS)).round().long()
    tokens = (chosen[:, None] * GROUP_TOKENS + torch.arange(GROUP_TOKENS)).flatten()
    return tokens[tokens < num_tokens]


def floors_of(
    old: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    given: LayerQueries,
    bearable: float,
    energy: Tensor | None = None,
) -> Floors:
    """How many planes each KV head needs besides the base, see above.

    Args:
        old: keys [t, G, Dk] and values [t, G, Dv] that are rounded.
        own: keys and values of the tokens after them, from the token of the first query on.
        given: the queries.
        bearable: root of the squared error over the squared output, over all queries of a head.
            A head for which fewer bits do not suffice gets all bits without a measurement.
        energy: with which keys are coded, float32 [G, Dk].
    """
    codes = code_keys(old[0], energy), code_values(old[1])
    exact = _output(old, own, given)
    floors = np.zeros(old[0].shape[1], np.uint8)
    limit = bearable**2 * exact.square().sum((1, 2, 3))
    for bits in LEVELS[:-1]:
        rounded = restore(codes[0], bits), restore(codes[1], bits)
        error = (_output(rounded, own, given) - exact).square().sum((1, 2, 3))
        # A head for which fewer bits were enough keeps them. What is no number is not bearable.
        raised = ~(error <= limit).numpy() & (floors == LEVELS.index(bits))
        if not raised.any():
            break
        floors += raised
        limit = limit * RAISED_SHARE**2 if bits == LEVELS[0] else limit
    return floors


def _output(old: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], given: LayerQueries) -> Tensor:
    """Attention of queries to old tokens and, causally, to their own: [G, Hq / G, n, Dv]."""
    keys, values = (torch.cat([a.float(), b.float()]) for a, b in zip(old, own, strict=True))
    queries = given.rows.float().transpose(0, 1)
    seen = torch.ones(len(given.rows), len(keys), dtype=torch.bool).tril(len(old[0]))
    output = functional.scaled_dot_product_attention(
        queries[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=seen,
        scale=given.scaling,
        enable_gqa=True,
    )[0]
    return output.unflatten(0, (keys.shape[1], -1))
