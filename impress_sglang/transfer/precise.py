"""Runs one layer of one request through restore -> score -> allocate -> raise.

All tokens of a prefix get a slot and the bits of the base; planes go to the units where an error
would weigh most for the new tokens (`precision.allocation`). Rows are ordinary: attention does not
need to know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from impress_sglang.loops import areas
from impress_sglang.precision.allocation import allocate_planes, planes_of
from impress_sglang.precision.codec import NUM_PLANES
from impress_sglang.storage.layout import KVShape
from impress_sglang.timeline import COPY, NO_TIMELINE, PROBE_COMPUTE, SELECT, Timeline
from impress_sglang.transfer.coded import Base
from impress_sglang.transfer.coded_slots import CodeWriter, code_writer_for
from impress_sglang.transfer.loader import LayerInputs, LoadStats
from impress_sglang.transfer.resident import PartLoad, PartUse, ResidentPart, UsedUnits
from impress_sglang.transfer.scoring import Scorer, scorer_for
from impress_sglang.transfer.slots import LayerSlots

# The last new tokens show where the prefix matters. With all of a long question, answers come only
# a little closer to those of exact KVs (`bench precision`), and scoring takes as long as attention.
SCORED_QUERIES = 16


class Allocation(Protocol):
    """Decides which units get planes; tests/unit/test_precise.py runs on every implementation."""

    weighs: bool
    """Whether it uses weights."""

    def planes(self, layer: int, weights: Tensor, num_planes: int, floors: Tensor | None) -> Tensor:
        """Allocate planes to units.

        Args:
            layer: from 0.
            weights: float32 [G, units] of squared attention, on the CPU; zeros unless `weighs`.
            num_planes: how many to allocate above the floors; floor and planes of a unit are at
                most `NUM_PLANES`.
            floors: int64 [G, units] on the CPU, planes that belong to the base; None for none.

        Returns:
            int64 [G, units] on the CPU, floors included.
        """
        ...


class ByQuery:
    """Gives planes to the units where an error weighs most for the new tokens."""

    weighs = True

    def planes(self, layer: int, weights: Tensor, num_planes: int, floors: Tensor | None) -> Tensor:
        """See `Allocation`."""
        return allocate_planes(weights, num_planes, floors)


class Evenly:
    """Gives the same planes to all units, and one more to every so many of them."""

    weighs = False

    def planes(self, layer: int, weights: Tensor, num_planes: int, floors: Tensor | None) -> Tensor:
        """See `Allocation`."""
        own = torch.zeros(weights.shape, dtype=torch.int64) if floors is None else floors
        # In proportion to the room that each unit has above its floor.
        below = torch.nn.functional.pad((NUM_PLANES - own).flatten().cumsum(0), (1, 0))
        number = below * num_planes // max(1, int(below[-1]))
        return number.diff().view_as(own) + own


class AtRandom:
    """Gives planes at random, the same for a layer and length: the negative control."""

    weighs = False

    def planes(self, layer: int, weights: Tensor, num_planes: int, floors: Tensor | None) -> Tensor:
        """See `Allocation`."""
        generator = torch.Generator().manual_seed(layer * 1_000_003 + weights.numel())
        dice = 10 ** (4 * torch.rand(weights.shape, generator=generator))
        return allocate_planes(dice, num_planes, floors)


ALLOCATIONS: dict[str, Allocation] = {"query": ByQuery(), "even": Evenly(), "random": AtRandom()}


class PreciseLoader:
    """Loads all tokens of a prefix in codes, in as many bits as a request wants."""

    def __init__(
        self,
        shape: KVShape,
        allocation: Allocation,
        scorer: Scorer | None = None,
        writer: CodeWriter | None = None,
    ) -> None:
        """`scorer`, `writer`: None for those that fit the device of the queries."""
        self._shape = shape
        self._allocation = allocation
        self._scorer = scorer
        self._writer = writer

    def load(
        self,
        layer: int,
        units: UsedUnits,
        inputs: LayerInputs | None,
        slots: LayerSlots,
        bits: float,
        stats: LoadStats,
        timeline: Timeline = NO_TIMELINE,
        planes: int | None = None,
    ) -> None:
        """Load a layer of the parts that a request uses, unless it is loaded, and raise its units.

        Args:
            layer: from 0; ascending for each source.
            units: the units of the parts, all of which have a load.
            inputs: what the layer knows of the request; None if the `Allocation` weighs nothing.
            slots: the request's slots, one for each token of the parts.
            bits: per element, on average, not counting planes that belong to the base: these come
                on top.
            stats: is changed.
            timeline: the request's timeline.
            planes: how many all units get, besides `bits`; None for those that the sources read
                with the base, which others may have opened.

        Raises:
            PrefixUnreadable: a block could not be read; what is in the slots of this layer is
                undefined where it was not loaded before.
        """
        stats.layers_whole += 1
        self.restore(layer, units, slots, stats, timeline)
        self.add_planes(layer, units, inputs, slots, bits, stats, timeline, planes=planes)

    def restore(
        self,
        layer: int,
        units: UsedUnits,
        slots: LayerSlots,
        stats: LoadStats,
        timeline: Timeline = NO_TIMELINE,
        *,
        early: bool = False,
    ) -> None:
        """Put the base into the slots of the parts that have not loaded the layer; see `load`.

        Also for parts of other requests in the same loads, because the bytes read do not last.
        `early`: the layer before is not done yet; what would have to be waited for is left.
        """
        keys, values = slots.keys.pool, slots.values.pool
        writer = self._writer_for(slots)
        with stats.timed("load_ms"):
            for use in units.uses:
                if use.part.layers_loaded != layer:
                    continue
                load, _ = _load_of(use.part)
                if early and not (use.part.lasting and load.source.has_read(layer)):
                    continue
                found = load.source.read_base(layer, early=early)
                for number, (part, base) in enumerate(zip(load.parts, found, strict=True)):
                    if part.layers_loaded == layer and load.loads(part):
                        assert base is not None
                        stats.base_bytes += base.groups.numel()
                        with timeline.span(COPY, layer):
                            _restore(part, layer, base, writer, keys, values)
                        part.levels[layer] = load.source.floors(layer, number)[:, None]

    def add_planes(
        self,
        layer: int,
        units: UsedUnits,
        inputs: LayerInputs | None,
        slots: LayerSlots,
        bits: float,
        stats: LoadStats,
        timeline: Timeline = NO_TIMELINE,
        chosen: Tensor | None = None,
        planes: int | None = None,
    ) -> None:
        """Raise the units of a restored layer; see `load`.

        `chosen` bool [G, m] says which tokens each head uses, None for all: units without a chosen
        token are not raised, and the weight of a unit is that of its chosen tokens.
        """
        keys, values = slots.keys.pool, slots.values.pool
        writer = self._writer_for(slots)
        with stats.timed("probe_ms"):
            given = self._allocate(layer, units, inputs, slots, bits, chosen, timeline, planes)
            wanted = [
                _Wanted.of(layer, use, given[:, place])
                for use, place in zip(units.uses, units.places, strict=True)
            ]
        following = None if inputs is None else inputs.following
        if following is not None and _ask(layer, wanted):
            # While the drive brings the planes.
            self.restore(layer + 1, units, following, stats, timeline, early=True)
        with stats.timed("load_ms"):
            for own in wanted:
                self._raise(layer, own, writer, keys, values, timeline)
                stats.note_planes(own.levels)

    def _writer_for(self, slots: LayerSlots) -> CodeWriter:
        self._writer = self._writer or code_writer_for(slots.keys.pool.device)
        return self._writer

    def _allocate(
        self,
        layer: int,
        units: UsedUnits,
        inputs: LayerInputs | None,
        slots: LayerSlots,
        bits: float,
        chosen: Tensor | None,
        timeline: Timeline,
        certain: int | None = None,
    ) -> npt.NDArray[np.uint8]:
        """Decide how many planes, uint8 [G, units], the request wants."""
        size = self._shape.num_kv_heads, len(units)
        weights: Tensor | None = None
        floors = _floors(layer, units, certain)
        room = NUM_PLANES * size[0] * size[1] - (0 if floors is None else int(floors.sum()))
        count = min(planes_of(bits, size[0] * len(units)), room)
        # If no weights are computed, the host allocates without waiting for the device.
        if self._allocation.weighs and 0 < count < room:
            assert inputs is not None, "nobody knows what the request looks at"
            with timeline.span(PROBE_COMPUTE, layer):
                by_token = self._weights(inputs, slots)
                weights = units.weights(by_token if chosen is None else by_token * chosen)
        with timeline.span(SELECT, layer):
            # The only point of a layer where the host waits for the device.
            on_host = torch.zeros(size) if weights is None else weights.cpu()
            planes = self._allocation.planes(layer, on_host, count, floors)
            if chosen is not None:
                planes = planes * (units.weights(chosen.float()) > 0).cpu()
            return planes.numpy().astype(np.uint8)

    def _raise(
        self,
        layer: int,
        wanted: _Wanted,
        writer: CodeWriter,
        keys: Tensor,
        values: Tensor,
        timeline: Timeline,
    ) -> None:
        """Add the planes that a part lacks, to all of its tokens."""
        part, raised = wanted.part, wanted.missing
        if not len(raised):
            return
        load, number = _load_of(part)
        content = load.source.read_units(layer, number, raised)
        with timeline.span(COPY, layer):
            writer.raise_units(part.tokens(layer), raised, content, keys, values)
        np.maximum(wanted.levels, wanted.planes, out=wanted.levels)

    def _weights(self, inputs: LayerInputs, slots: LayerSlots) -> Tensor:
        """Squared attention weights of tokens [G, m], from the keys in the slots."""
        scorer = self._scorer = self._scorer or scorer_for(inputs.queries.device)
        heads = tuple(range(self._shape.num_kv_heads))
        sums = scorer.column_sums(
            inputs.queries[-SCORED_QUERIES:],
            slots.keys.pool,
            inputs.resident_keys,
            inputs.new_keys,
            heads,
            inputs.scaling,
            squares=True,
            prefix_rows=slots.keys.rows,
            resident_rows=inputs.resident_rows,
        )
        return sums.reshape(len(heads), -1, sums.shape[1]).sum(1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """What a request wants of a part in a layer.

    `levels` and `planes` uint8 [G, units]: the planes that units have, a view, and those that the
    request wants; `missing` int64 [n, 3]: plane, head and unit.
    """

    part: ResidentPart
    levels: npt.NDArray[np.uint8]
    planes: npt.NDArray[np.uint8]
    missing: Tensor

    @classmethod
    def of(cls, layer: int, use: PartUse, planes: npt.NDArray[np.uint8]) -> _Wanted:
        levels = use.part.levels[layer, :, use.units]
        first = use.part.units[0] + use.units.start
        missing = torch.from_numpy(areas.missing_units(levels, planes, first))
        return cls(use.part, levels, planes, missing)


def _ask(layer: int, wanted: Sequence[_Wanted]) -> bool:
    """Begin to read missing planes, if the base of the next layer is there; whether it is."""
    loads = dict.fromkeys(_load_of(own.part) for own in wanted if len(own.missing))
    if not any(load.source.has_read(layer + 1) for load, _ in loads):
        return False
    for own in wanted:
        if len(own.missing):
            load, number = _load_of(own.part)
            load.source.ask_units(layer, number, own.missing)
    return True


def _floors(layer: int, units: UsedUnits, planes: int | None) -> Tensor | None:
    """Planes that each unit gets in any case, int64 [G, units]: those of its base, all of parts
    that are raised whole. None if there is none.
    """
    floors = []
    for use in units.uses:
        load, number = _load_of(use.part)
        own = load.source.floors(layer, number, planes)
        floors.append(np.full_like(own, NUM_PLANES) if use.part.whole else own)
    if not any(own.any() for own in floors):
        return None
    counts = [place.stop - place.start for place in units.places]
    by_unit = np.repeat(np.stack(floors, 1), counts, 1)
    return torch.from_numpy(by_unit).long()


def _restore(
    part: ResidentPart, layer: int, base: Base, writer: CodeWriter, keys: Tensor, values: Tensor
) -> None:
    """Put the base of the next layer of a part into its slots, with the planes of its floors."""
    writer.restore_base(part.begin_layer(layer, base.groups), keys, values)
    if base.raised is not None and base.planes is not None:
        writer.raise_units(part.tokens(layer), base.raised, base.planes, keys, values)


def _load_of(part: ResidentPart) -> tuple[PartLoad, int]:
    """The load that a part is read from, and the number of its span there.

    Raises:
        SegmentUnreadable: the part is broken.
    """
    part.check()
    assert part.load is not None
    return part.load
