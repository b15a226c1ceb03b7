"""Loads the runs of a blended prefix into its slots, their keys turned to their new positions.

Stage: load.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from impress_sglang.attention.rotation import KeyRotation, Turns
from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable
from impress_sglang.management.content import Run
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import StoredMatch, StoredSpan
from impress_sglang.serving.paper.blend_plan import BlendPlan, Kind, open_group
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.coded_slots import CodeWriter, put_codes
from impress_sglang.transfer.loader import LayerInputs, LoadStats
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.slots import LayerSlots


class BlendedLoading:
    """Loads the runs of a blended prefix into their slots and turns their keys; see `Loading`."""

    def __init__(
        self,
        writer: CodeWriter,
        store: PrefixStore,
        plan: BlendPlan,
        rotation: KeyRotation,
        timeline: Timeline,
        first: CodedSource | None = None,
    ) -> None:
        """Open the sources of the first block.

        Args:
            writer: fits the device of the slots.
            store: has the runs.
            plan: how the request blends.
            rotation: turns the model's keys.
            timeline: the request's timeline.
            first: the source of the very first group, if it is open already.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened.
        """
        self.plan = plan
        self.blended = False
        """Whether all layers of the prefix are in its slots."""
        self.computed = 0.0
        """Tokens that were computed, mean over the layers."""
        self.blocks = list(plan.blocks)
        self.kinds = plan.kinds.copy()
        """The kinds of the plan, except that tokens that cannot be read are `COMPUTED`."""
        self.num_layers = plan.spans[0].segment.info.shape.num_layers
        self._writer = writer
        self._store = store
        self._rotation = rotation
        self._timeline = timeline
        self._first = first
        self._sources: dict[int, list[CodedSource]] = {}
        self._stats: list[ReadStats] = []
        # By group of that block: which of its tokens move, and their turns.
        self._turns: dict[int, tuple[Tensor, Turns]] = {}
        # Touched, so that segments that are opened later are still there then.
        for segment in dict.fromkeys(span.segment for span in plan.spans):
            store.tree.touch(StoredMatch((StoredSpan(segment, 0, 1),)))
        try:
            self._open(0)
        except BaseException:
            self.close()
            raise

    @property
    def reused(self) -> int:
        """How many tokens are `REUSED`: stored behind others, and not computed in all layers."""
        return int(np.count_nonzero(self.kinds == Kind.REUSED))

    def begin_block(self, number: int) -> None:
        """Begin to restore the layers of a block, and open the next block for reading ahead.

        Raises:
            PrefixUnreadable: a segment of the block is gone or cannot be opened.
        """
        self._open(number)
        if number + 1 < len(self.blocks) and self._store.ahead.enabled:
            try:
                self._open(number + 1)
            except PrefixUnreadable:
                # This block does not need it; beginning the next block raises it again.
                self._close(number + 1)

    def restore(
        self, number: int, layer: int, pools: LayerSlots, slots: Tensor, stats: LoadStats
    ) -> None:
        """Load what is stored of a layer of a block into its slots.

        Args:
            number: number of the block.
            layer: ascending for each block; it may begin after the first layer.
            pools: the pools of the layer.
            slots: int64 [len(block)], the slots of the block.
            stats: is changed.

        Raises:
            PrefixUnreadable: a chunk is missing, short or corrupt.
        """
        block = self.blocks[number]
        for group, runs in enumerate(block.groups):
            source = self._sources[number][group]
            rows = torch.cat([slots[own.start - block.start :][: len(own)] for own in runs])
            own = LayerSlots.of(pools.keys.pool, pools.values.pool, rows)
            stats.layers_whole += 1
            with stats.timed("load_ms"):
                found = source.read(layer)
                put_codes(self._writer, source, found, pools.keys.pool, pools.values.pool, rows)
                self._turn(group, runs, own)
            for span in source.spans:
                stats.note_planes(span.levels(layer, source.planes), len(span.units))
            source.end_layer(layer)
            self._store.ahead.top_up()

    def end_block(self, number: int) -> None:
        """Note that a block is in its slots, and close its sources."""
        self._close(number)

    def compute_instead(self, number: int, error: SegmentUnreadable) -> bool:
        """Take an unreadable segment out of this block, which then begins again, and later blocks.

        Returns whether this block used the segment and any block still has something to read.
        """
        own = [run for run in self._runs(number) if run.span.segment.segment_id == error.segment_id]
        if not own:
            return False
        self._store.report(error)
        for later in range(number, len(self.blocks)):
            self._close(later)
            for run in self._runs(later):
                if run.span.segment is own[0].span.segment:
                    first = run.start - self.plan.resident_len
                    self.kinds[first : first + len(run)] = Kind.COMPUTED
            self.blocks[later] = self.blocks[later].without(own[0].span.segment)
        return any(block.groups for block in self.blocks)

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """See `Loading.load`; there is nothing left to load."""
        assert self.blended, "a prefix is blended before its first layer"

    def end_layer(self, layer: int) -> None:
        """See `Loading.end_layer`."""

    def close(self) -> Sequence[ReadStats]:
        """See `Loading.close`."""
        for number in list(self._sources):
            self._close(number)
        if self._first is not None:
            self._store.close_source(self._first)
            self._first = None
        stats, self._stats = self._stats, []
        return stats

    def _runs(self, number: int) -> list[Run]:
        return [run for group in self.blocks[number].groups for run in group]

    def _open(self, number: int) -> None:
        """Open the sources of a block, unless they are open."""
        if number in self._sources:
            return
        sources = self._sources[number] = []
        for runs in self.blocks[number].groups:
            source, self._first = self._first, None
            sources.append(
                source or open_group(self._store, runs, self._timeline, self.plan.planes)
            )
            self._store.ahead.join(sources[-1])

    def _turn(self, group: int, runs: Sequence[Run], slots: LayerSlots) -> None:
        """Move the keys of the runs of a group to their positions."""
        pool, rows = slots.keys.pool, slots.keys.rows
        assert rows is not None
        if not any(run.shift for run in runs):
            return
        if group not in self._turns:
            new = torch.cat([torch.arange(run.start, run.stop) for run in runs])
            shift = torch.cat([torch.full((len(run),), run.shift) for run in runs])
            moving = shift.nonzero().flatten()
            turns = self._rotation.turns((new - shift)[moving], new[moving])
            self._turns[group] = moving.to(rows.device), turns
        moving, turns = self._turns[group]
        pool[rows[moving]] = self._rotation.move(pool[rows[moving]], turns)

    def _close(self, number: int) -> None:
        self._turns.clear()
        for source in self._sources.pop(number, ()):
            self._store.close_source(source)
            self._stats.append(source.stats)
