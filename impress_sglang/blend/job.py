"""Blend jobs: load jobs that also bring stored text that is no prefix, and compute some of it.

The loader's thread reads all runs, group by group, into the slots of the job, and turns their keys
to their new positions. Then the scheduler's thread computes the rest, block by block, between the
model's passes (`blend.plugin.steps`). What cannot be read is computed as well.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from impress_sglang.blend.plan import BlendPlan, Kind, groups_of
from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.errors import PrefixUnreadable, SegmentUnreadable
from impress_sglang.loops.types import Uint8s
from impress_sglang.serving.load_jobs import AfterFill, FillLayer, LoadJob
from impress_sglang.serving.why import Detail
from impress_sglang.store.content import Run
from impress_sglang.store.stored import StoredMatch, StoredSpan
from impress_sglang.transfer.sources import WholeSource


@dataclasses.dataclass(eq=False)
class BlendJob(LoadJob):
    """A load job for a blended prefix.

    Attributes:
        plan: how it blends.
        rotation: turns the model's keys.
        kinds: uint8 [stop - start], those of the plan, except that tokens that could not be read
            are `COMPUTED`; of the loader's thread until the job is read.
        runs: what is read, in the order of the prompt.
        unreadable: why segments were left out.
        why: why it could not be blended, unless there was nothing to read.
        row: int64 [stop], the slots of all tokens, while it is computed.
        position: where the rest begins that is to be computed.
        token_layers: computed tokens, summed over all layers.
        spent: seconds of computing.
    """

    plan: BlendPlan = dataclasses.field(kw_only=True)
    rotation: KeyRotation = dataclasses.field(kw_only=True)
    kinds: Uint8s = dataclasses.field(init=False)
    runs: tuple[Run, ...] = dataclasses.field(init=False)
    unreadable: list[SegmentUnreadable] = dataclasses.field(default_factory=list)
    why: Detail | None = None
    row: Tensor | None = None
    position: int = 0
    token_layers: int = 0
    spent: float = 0.0

    computes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begin_at(self.plan.start)
        self._fills_done, self._fills = 0, 1
        # Touched, so that segments that are opened later are still there then.
        for segment in dict.fromkeys(run.span.segment for run in self.runs):
            self.store.tree.touch(StoredMatch((StoredSpan(segment, 0, 1),)))
        self.rotation.prepare(max(max(own.stop, own.stop - own.shift) for own in self.runs))

    # What is told of it, and learnt.

    @property
    def parts(self) -> tuple[int, int, int]:
        """See `LoadJob.parts`; none is kept behind the first one that is not."""
        kept = int(np.argmax(np.append(self.kinds, Kind.COMPUTED) != Kind.KEPT))
        return kept, self.reused, int(np.count_nonzero(self.kinds == Kind.COMPUTED))

    @property
    def reused(self) -> int:
        """How many tokens are stored behind others, and not computed in all layers."""
        return int(np.count_nonzero(self.kinds == Kind.REUSED))

    @property
    def seconds(self) -> float:
        """What it took: restoring and computing, without waiting for the drive or for others."""
        return max(self.fills.seconds - self.reads.wait_ms / 1e3, 0.0) + self.spent

    def seconds_left(self, num_layers: int, now: float) -> float | None:
        """See `LoadJob.seconds_left`; what is to be computed takes as long as estimated."""
        computing = self.plan.estimate.compute
        if self.done.is_set():
            done = (self.position - self.start) / max(len(self), 1)
            return max(computing * (1.0 - done), 0.0)
        if not self._fills_done or not self.began_at:
            return None
        left = self._fills * num_layers - self._fills_done
        return left * (now - self.began_at) / self._fills_done + computing

    def unread(self, num_layers: int) -> float:
        """See `LoadJob.unread`."""
        return 0.0 if self.done.is_set() else 1.0 - self._fills_done / (self._fills * num_layers)

    # Reading it.

    def begin_at(self, start: int) -> None:
        """See `LoadJob.begin_at`."""
        super().begin_at(start)
        self.kinds, self.runs = self.plan.begun_at(start)
        self.position = start

    def open(self) -> WholeSource:
        """See `LoadJob.open`."""
        self._groups = groups_of(self.runs, self.plan.read_tokens)
        self._fills = max(len(self._groups), 1)
        while self._groups:
            try:
                return self._open(0)
            except SegmentUnreadable as error:
                self._leave_out(error)
        raise PrefixUnreadable("-", "nothing of it is left to read")

    def bring(self, source: WholeSource, fill: FillLayer) -> None:
        """See `LoadJob.bring`: all groups, one after the other."""
        opened, number = {0: source}, 0
        try:
            while number < len(self._groups):
                try:
                    self._bring_group(number, opened, fill)
                except SegmentUnreadable as error:
                    # What could be read of the group is read again.
                    self._close_all(opened)
                    self._leave_out(error, number)
                else:
                    number += 1
        finally:
            self._close_all(opened)

    def note_layer(self) -> None:
        """See `LoadJob.note_layer`; no pass may use it yet."""
        self._fills_done += 1

    def begin_computing(self, resident: Tensor) -> None:
        """Begin to compute, on the scheduler's thread; `resident`: int64 [start], their slots."""
        assert self.slots is not None
        self.row, self.position = torch.cat([resident, self.slots]), self.start

    def _bring_group(self, number: int, opened: dict[int, WholeSource], fill: FillLayer) -> None:
        if number not in opened:
            opened[number] = self._open(number)
        source, ahead, following = opened[number], self.store.ahead, number + 1
        if following < len(self._groups) and ahead.enabled and following not in opened:
            try:
                opened[following] = self._open(following)
            except PrefixUnreadable:
                # This group does not need it; beginning the next one raises it again.
                pass
            else:
                ahead.wait(opened[following])
        slots, turn = self._placed(self._groups[number])
        ahead.join(source)
        for layer in range(source.num_layers):
            fill(layer, source, slots, turn)
        self._close(opened, number)

    def _open(self, number: int) -> WholeSource:
        spans = [run.span for run in self._groups[number]]
        return self.store.open_whole(spans, exact=False)

    def _close(self, opened: dict[int, WholeSource], number: int) -> None:
        source = opened.pop(number)
        self.store.close_source(source)
        self.reads.add(source.stats)

    def _close_all(self, opened: dict[int, WholeSource]) -> None:
        for number in list(opened):
            self._close(opened, number)

    def _leave_out(self, error: SegmentUnreadable, number: int = 0) -> None:
        """Compute the tokens of an unreadable segment in the groups from this one on.

        Raises:
            SegmentUnreadable: none of them is in that segment, or nothing is left to read.
        """
        self.unreadable.append(error)
        left: list[tuple[Run, ...]] = []
        for group in self._groups[number:]:
            gone = [run for run in group if run.span.segment.segment_id == error.segment_id]
            for run in gone:
                self.kinds[run.start - self.start : run.stop - self.start] = Kind.COMPUTED
            left.append(tuple(run for run in group if run not in gone))
        if left == self._groups[number:] or (not any(left) and not number):
            raise error
        self._groups[number:] = filter(None, left)

    def _placed(self, runs: tuple[Run, ...]) -> tuple[Tensor, AfterFill | None]:
        """The slots of a group, and what moves its keys to their positions if need be."""
        assert self.target is not None
        new = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        slots = self.target[(new - self.start).to(self.target.device)]
        if not any(run.shift for run in runs):
            return slots, None
        shift = torch.cat([torch.full((len(run),), run.shift) for run in runs])
        moving = shift.nonzero().flatten()
        turns = self.rotation.turns((new - shift)[moving], new[moving])
        moved = slots[moving.to(slots.device)]

        def turn(keys: Tensor) -> None:
            keys[moved] = self.rotation.move(keys[moved], turns)

        return slots, turn
