"""Which channels of keys queries look at: by this the codec gives bits, see `codec`.

The *energy* of a channel is the mean square of the queries in it, of the last tokens of a prompt.
It depends more on the model than on the text: where no queries are known, what was measured last
is used, by this process or by an earlier one that left it in the store. So it is measured with the
first prompts, and then now and then. Where nothing was measured, all channels count alike.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# So many prompts are measured, and then one of so many.
FIRST_PROMPTS = 8
ONE_OF_PROMPTS = 16
# How many queries, of the last tokens of a prompt, are noted for this.
MEASURED_QUERIES = 16


# Returns the last queries of a prompt in a layer, [n, Hq, Dk] on the CPU; None: they are not known.
QuerySource = Callable[[int], Tensor | None]


def no_queries(layer: int) -> None:
    """A `QuerySource` that knows no queries."""


class QueryMeter:
    """Measures on the writing thread what queries look at."""

    def __init__(self) -> None:
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
        arrays = {f"energy.{layer}": energy.numpy() for layer, energy in self._energies.items()}
        content = io.BytesIO()
        np.savez(content, allow_pickle=False, **arrays)
        return content.getvalue()

    def restore(self, content: bytes) -> None:
        """Begin with what another process has measured; ignore what is damaged."""
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
        """The energy by which a layer is coded, float32 of this shape [G, Dk]; None: not known."""
        if (given := queries(layer)) is not None:
            self._energies[layer] = energy_of(given, shape[0])
            self.has_news = True
        energy = self._energies.get(layer)
        return None if energy is None or energy.shape != shape else energy


def energy_of(queries: Tensor, num_kv_heads: int) -> Tensor:
    """The mean square of queries [n, Hq, Dk] of each KV head in each channel, float32 [G, Dk]."""
    return queries.float().square().unflatten(1, (num_kv_heads, -1)).mean((0, 2))
