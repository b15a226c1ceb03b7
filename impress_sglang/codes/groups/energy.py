"""Measures the energy of queries in each channel of keys, by which `codec` distributes bits.

The *energy* of a channel is the mean square of the queries of the last tokens of a prompt in it. It
depends more on the model than on the text. So it is measured with the first prompts and then
periodically, and other prompts use the latest measurement, of this process or of an earlier one
that left it in the store. Before any measurement, all channels count equally.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Measure the first `FIRST_PROMPTS` prompts, then one in `ONE_OF_PROMPTS`.
FIRST_PROMPTS = 8
ONE_OF_PROMPTS = 16
# Number of queries sampled, those of the last tokens of a prompt.
MEASURED_QUERIES = 16

# Returns the last queries of a prompt in a layer, [n, Hq, Dk] on the CPU, or None if not sampled.
QuerySource = Callable[[int], Tensor | None]


def no_queries(layer: int) -> None:
    """A `QuerySource` of prompts whose queries were not sampled."""


class QueryMeter:
    """Keeps the latest energy of each layer.

    Thread: writer, except `sample_next_prompt` and `has_news`.
    """

    def __init__(self) -> None:
        self._energies: dict[int, Tensor] = {}
        self._prompts = 0
        self.has_news = False
        """Whether any energy was measured since the last `dump`."""

    def sample_next_prompt(self) -> bool:
        """Count a prompt that will be stored, and return whether to measure it."""
        self._prompts += 1
        return self._prompts <= FIRST_PROMPTS or self._prompts % ONE_OF_PROMPTS == 0

    def dump(self) -> bytes:
        """Serialise all energies, for `restore`."""
        self.has_news = False
        energies = self._energies.items()
        arrays: dict[str, Any] = {f"energy.{layer}": energy.numpy() for layer, energy in energies}
        content = io.BytesIO()
        np.savez(content, **arrays)
        return content.getvalue()

    def restore(self, content: bytes) -> None:
        """Start with the energies of another process; damaged content is ignored."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                restored = {name: arrays[name] for name in arrays.files}
            for name, array in restored.items():
                kind, layer = name.split(".")
                if kind == "energy" and array.dtype == np.float32 and np.isfinite(array).all():
                    self._energies[int(layer)] = torch.from_numpy(array)
        except Exception as error:  # zipfile has many ways to say that bits are wrong
            logger.warning("what is known of queries is damaged, and is measured anew: %s", error)
            return
        self._prompts = FIRST_PROMPTS

    def energy(
        self, layer: int, shape: torch.Size, queries: QuerySource = no_queries
    ) -> Tensor | None:
        """Return the energy for coding a layer, float32 of `shape` [G, Dk], or None if unknown."""
        if (sampled := queries(layer)) is not None:
            self._energies[layer] = energy_of(sampled, shape[0])
            self.has_news = True
        energy = self._energies.get(layer)
        return None if energy is None or energy.shape != shape else energy


def energy_of(queries: Tensor, num_kv_heads: int) -> Tensor:
    """Return the mean square of queries [n, Hq, Dk] by KV head and channel, float32 [G, Dk]."""
    return queries.float().square().unflatten(1, (num_kv_heads, -1)).mean((0, 2))
