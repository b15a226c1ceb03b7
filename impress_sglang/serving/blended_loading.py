"""Brings the runs of a blended prefix into its slots, their keys turned to their new positions.

Stage: load.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impress_sglang.attention.rotation import KeyRotation, Turns
from impress_sglang.management.content import Run
from impress_sglang.management.store import PrefixStore
from impress_sglang.serving.blend_plan import BlendPlan, open_group
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.slots import LayerSlots
from impress_sglang.transfer.source import SegmentSource


class BlendedLoading:
    """The runs of a blended prefix into their slots, keys turned; see `Loading`."""

    def __init__(
        self,
        loader: PrefixLoader,
        store: PrefixStore,
        plan: BlendPlan,
        rotation: KeyRotation,
        timeline: Timeline,
        first: SegmentSource | None = None,
    ) -> None:
        """Open what is read.

        Args:
            loader: of whole prefixes.
            store: of the runs.
            plan: of the request.
            rotation: of the model.
            timeline: of the request.
            first: the source of the first group, if it is open already.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened.
        """
        self.plan = plan
        self.blended = False
        """Whether all layers of the prefix are in its slots."""
        self.blocks = tuple(plan.blocks)
        self.num_layers = plan.spans[0].segment.info.shape.num_layers
        self._loader = loader
        self._store = store
        self._rotation = rotation
        self._sources: dict[tuple[int, int], SegmentSource] = {}
        self._stats: list[ReadStats] = []
        self._turns: dict[Run, Turns] = {}
        try:
            for number, block in enumerate(self.blocks):
                for group, runs in enumerate(block.groups):
                    source, first = first or open_group(store, runs, timeline), None
                    self._sources[number, group] = source
                    store.ahead.join(source)
        except BaseException:
            self.close()
            raise

    def restore(
        self, number: int, layer: int, pools: LayerSlots, slots: Tensor, stats: LoadStats
    ) -> None:
        """Bring what is stored of a layer of a block into its slots.

        Args:
            number: of the block.
            layer: ascending for each block; it may begin behind the first one.
            pools: of the layer.
            slots: int64 [len(block)] of the block.
            stats: are changed.

        Raises:
            PrefixUnreadable: a chunk is missing, short or corrupt.
        """
        block = self.blocks[number]
        for group, runs in enumerate(block.groups):
            source = self._sources[number, group]
            rows = torch.cat([slots[own.start - block.start :][: len(own)] for own in runs])
            own = LayerSlots.of(pools.keys.pool, pools.values.pool, rows)
            with stats.timed("load_ms"):
                stats.layers_whole += 1
                self._loader.load_whole(layer, source, own)
                self._turn(runs, own)
            source.end_layer(layer)
            self._store.ahead.top_up()

    def end_block(self, number: int) -> None:
        """A block is in its slots: nothing of it is read any more."""
        for key in [own for own in self._sources if own[0] == number]:
            self._close(key)
        self._turns.clear()

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """See `Loading.load`; there is nothing left to load."""
        assert self.blended, "a prefix is blended before its first layer"

    def end_layer(self, layer: int) -> None:
        """See `Loading.end_layer`."""

    def close(self) -> Sequence[ReadStats]:
        """See `Loading.close`."""
        for key in list(self._sources):
            self._close(key)
        stats, self._stats = self._stats, []
        return stats

    def _turn(self, runs: Sequence[Run], slots: LayerSlots) -> None:
        """Move the keys of runs to their positions, run by run."""
        start = 0
        assert slots.keys.rows is not None
        for run in runs:
            rows, start = slots.keys.rows[start : start + len(run)], start + len(run)
            if not run.shift:
                continue
            if run not in self._turns:
                new = torch.arange(run.start, run.stop)
                self._turns[run] = self._rotation.turns(new - run.shift, new)
            pool = slots.keys.pool
            pool[rows] = self._rotation.move(pool[rows], self._turns[run])

    def _close(self, key: tuple[int, int]) -> None:
        source = self._sources.pop(key)
        self._store.close_source(source)
        self._stats.append(source.stats)
