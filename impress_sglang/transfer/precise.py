"""Runs one layer of one request through restore -> score -> allocate -> raise.

All tokens of a prefix get a slot and the bits of the base; planes go to the units where an error
would weigh most for the new tokens (`precision.allocation`). Rows are those of any request: there
is nothing that attention must know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from impress_sglang.precision.allocation import allocate_planes, planes_of
from impress_sglang.precision.codec import NUM_PLANES
from impress_sglang.precision.slots import CodedTokens
from impress_sglang.storage.layout import KVShape
from impress_sglang.timeline import COPY, PROBE_COMPUTE, SELECT
from impress_sglang.transfer.coded import CodedSource, PrefixUnits
from impress_sglang.transfer.coded_slots import CodeWriter, code_writer_for
from impress_sglang.transfer.loader import LayerInputs, LoadStats
from impress_sglang.transfer.scoring import Scorer, scorer_for
from impress_sglang.transfer.slots import LayerSlots


class Allocation(Protocol):
    """Which units get the planes; tests/unit/test_precise.py runs it on every implementation."""

    weighs: bool
    """Whether it asks for weights."""

    def planes(self, layer: int, weights: Tensor, num_planes: int) -> Tensor:
        """Planes of each unit.

        Args:
            layer: from 0.
            weights: float32 [G, units] of squared attention; zeros if the rule does not ask.
            num_planes: how many in all, at most `NUM_PLANES` for each unit.

        Returns:
            int64 [G, units] on the device of the weights.
        """
        ...


class ByQuery:
    """To the units where an error weighs most for the new tokens."""

    weighs = True

    def planes(self, layer: int, weights: Tensor, num_planes: int) -> Tensor:
        """See `Allocation`."""
        return allocate_planes(weights, num_planes)


class Evenly:
    """Alike to all units, and every so many of them gets one more."""

    weighs = False

    def planes(self, layer: int, weights: Tensor, num_planes: int) -> Tensor:
        """See `Allocation`."""
        count = weights.numel()
        number = torch.arange(count + 1, device=weights.device) * num_planes // count
        return number.diff().view_as(weights)


class AtRandom:
    """The negative control: the same for the same layer and length."""

    weighs = False

    def planes(self, layer: int, weights: Tensor, num_planes: int) -> Tensor:
        """See `Allocation`."""
        generator = torch.Generator().manual_seed(layer * 1_000_003 + weights.numel())
        dice = 10 ** (4 * torch.rand(weights.shape, generator=generator))
        return allocate_planes(dice.to(weights.device), num_planes)


ALLOCATIONS: dict[str, Allocation] = {"query": ByQuery(), "even": Evenly(), "random": AtRandom()}


class PreciseLoader:
    """Loads all tokens of a prefix, in as many bits as a request wants."""

    def __init__(
        self,
        shape: KVShape,
        allocation: Allocation,
        scorer: Scorer | None = None,
        writer: CodeWriter | None = None,
    ) -> None:
        """`scorer`, `writer`: None for what fits the device of the queries."""
        self._shape = shape
        self._allocation = allocation
        self._scorer = scorer
        self._writer = writer

    def load(
        self,
        layer: int,
        source: CodedSource,
        inputs: LayerInputs,
        slots: LayerSlots,
        bits: float,
        stats: LoadStats,
    ) -> Tensor:
        """Fill the slots of all tokens.

        Returns:
            int64 [G, units] on the CPU, the planes that each unit has now.

        Raises:
            PrefixUnreadable: the source could not give a block; what is in the slots is undefined.
        """
        keys, values, units = slots.keys.pool, slots.values.pool, source.units
        writer = self._writer = self._writer or code_writer_for(keys.device)
        stats.layers_whole += 1
        with stats.timed("load_ms"):
            groups = source.read_base(layer)
            stats.base_bytes += sum(own.numel() for own in groups)
            parts = self._parts(source, groups, slots)
            with source.timeline.span(COPY, layer):
                for part in parts:
                    writer.restore_base(part, keys, values)
        with stats.timed("probe_ms"):
            planes = self._allocate(layer, source, inputs, slots, units, bits)
        with stats.timed("load_ms"):
            raised = units.raised(torch.zeros_like(planes), planes)
            stats.note_planes(planes)
            if any(map(len, raised)):
                contents = source.read_units(layer, raised)
                with source.timeline.span(COPY, layer):
                    for part, own, content in zip(parts, raised, contents, strict=True):
                        writer.raise_units(part, own, content, keys, values)
        return planes

    def _parts(
        self, source: CodedSource, groups: Sequence[Tensor], slots: LayerSlots
    ) -> list[CodedTokens]:
        rows, first, parts = slots.keys.rows, 0, []
        assert rows is not None and len(rows) == source.num_tokens
        for span, own in zip(source.spans, groups, strict=True):
            place = rows[first : first + len(span)]
            parts.append(CodedTokens(span.layout, own, span.start, place))
            first += len(span)
        return parts

    def _allocate(
        self,
        layer: int,
        source: CodedSource,
        inputs: LayerInputs,
        slots: LayerSlots,
        units: PrefixUnits,
        bits: float,
    ) -> Tensor:
        timeline = source.timeline
        # Where none are computed the host allocates, and does not wait for the device.
        weights = torch.zeros(self._shape.num_kv_heads, len(units))
        count = planes_of(bits, weights.numel())
        if self._allocation.weighs and 0 < count < NUM_PLANES * weights.numel():
            with timeline.span(PROBE_COMPUTE, layer):
                weights = units.weights(self._weights(inputs, slots))
        with timeline.span(SELECT, layer):
            return self._allocation.planes(layer, weights, count).cpu()

    def _weights(self, inputs: LayerInputs, slots: LayerSlots) -> Tensor:
        """Squared attention weights of tokens [G, m], from the keys in the slots."""
        scorer = self._scorer = self._scorer or scorer_for(inputs.queries.device)
        heads, rows = tuple(range(self._shape.num_kv_heads)), slots.keys.rows
        assert rows is not None
        sums = scorer.column_sums(
            inputs.queries,
            slots.keys.pool.index_select(0, rows),
            inputs.resident_keys,
            inputs.new_keys,
            heads,
            inputs.scaling,
            squares=True,
        )
        return sums.unflatten(0, (len(heads), -1)).sum(1)
