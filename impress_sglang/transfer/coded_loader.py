"""Puts one layer of a prefix in codes into slots: its base, and as many planes as are wanted.

Stage: load. All tokens of a prefix get a slot and the same bits. Rows are ordinary: attention does
not need to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from impress_sglang.timeline import COPY, NO_TIMELINE, Timeline
from impress_sglang.transfer.coded import LayerCodes
from impress_sglang.transfer.coded_slots import CodeWriter, code_writer_for
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.resident import PartLoad, PartUse, ResidentPart
from impress_sglang.transfer.slots import LayerSlots


class CodedLoader:
    """Loads all tokens of a prefix in codes, for all requests that share them."""

    def __init__(self, writer: CodeWriter | None = None) -> None:
        """`writer`: None for the one that fits the device of the slots."""
        self._writer = writer

    def load(
        self,
        layer: int,
        uses: Sequence[PartUse],
        planes: int,
        slots: LayerSlots,
        stats: LoadStats,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        """Load what the parts that a request uses lack in a layer.

        Also for parts of other requests in the same loads, because the bytes read do not last.

        Args:
            layer: from 0; ascending for each source.
            uses: tokens of parts; those that lack something have a load.
            planes: how many the request wants, besides the floors of heads.
            slots: of the layer; only their pools are used.
            stats: is changed.
            timeline: the request's timeline.

        Raises:
            PrefixUnreadable: a block could not be read; what is in the slots of this layer is
                undefined where something was lacking.
        """
        keys, values = slots.keys.pool, slots.values.pool
        with stats.timed("load_ms"):
            for use in uses:
                part = use.part
                part.check()
                if part.layers_loaded == layer or part.planes[layer] < planes:
                    assert part.load is not None
                    self._load(layer, part.load[0], keys, values, stats, timeline)
                    assert part.layers_loaded > layer and part.planes[layer] >= planes
                stats.note_planes(part.levels(layer), len(use.units))

    def _load(
        self,
        layer: int,
        load: PartLoad,
        keys: Tensor,
        values: Tensor,
        stats: LoadStats,
        timeline: Timeline,
    ) -> None:
        """Load a layer of all parts of a load."""
        writer = self._writer = self._writer or code_writer_for(keys.device)
        found = load.source.read(layer)
        with timeline.span(COPY, layer):
            for part, codes in zip(load.parts, found, strict=True):
                if load.loads(part):
                    stats.base_bytes += 0 if codes.groups is None else codes.groups.numel()
                    try:
                        _put(part, layer, codes, writer, keys, values)
                    except BaseException:
                        # Its slots do not hold what its levels say, whoever uses it.
                        part.broken = True
                        raise
                    part.planes[layer] = max(part.planes[layer], load.source.planes)


def _put(
    part: ResidentPart,
    layer: int,
    codes: LayerCodes,
    writer: CodeWriter,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Put what a part lacks into its slots."""
    if codes.groups is not None:
        tokens = part.begin_layer(layer, codes.groups, codes.floors)
        writer.restore_base(tokens, keys, values)
    if codes.planes is not None:
        writer.raise_units(part.tokens(layer), codes.raised, codes.planes, keys, values)
