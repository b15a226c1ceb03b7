"""Blend jobs: load jobs that also bring stored text that is no prefix, and compute some of it.

The loader's thread reads all runs, group by group, into the slots of the job, and turns their keys
to their new positions. Then the scheduler's thread computes the rest, block by block, between the
model's passes (`blend.plugin.steps`). If a segment cannot be read, the job fails, and its request
is planned again without that.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from impress_sglang.blend.plan import BlendPlan, Kind, groups_of
from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.errors import PrefixUnreadable
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
        kinds: uint8 [stop - start], those of the plan.
        runs: what is read, in the order of the prompt.
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
    why: Detail | None = None
    row: Tensor | None = None
    position: int = 0
    token_layers: int = 0
    spent: float = 0.0

    computes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begin_at(self.plan.start)
        self._fills_done, self._groups = 0, list[list[Run]]()
        # Touched, so that segments that are opened later are still there then.
        for segment in dict.fromkeys(run.span.segment for run in self.runs):
            self.store.tree.touch(StoredMatch((StoredSpan(segment, 0, 1),)))
        self.rotation.prepare(max(max(own.stop, own.stop - own.shift) for own in self.runs))

    @property
    def parts(self) -> tuple[int, int, int]:
        """See `LoadJob.parts`; none is kept behind the first one that is not."""
        kept = int(np.argmax(np.append(self.kinds, Kind.COMPUTED) != Kind.KEPT))
        reused, computed = (
            np.count_nonzero(self.kinds == own) for own in (Kind.REUSED, Kind.COMPUTED)
        )
        return kept, int(reused), int(computed)

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
        left = max(len(self._groups), 1) * num_layers - self._fills_done
        return left * (now - self.began_at) / self._fills_done + computing

    def unread(self, num_layers: int) -> float:
        """See `LoadJob.unread`."""
        fills = max(len(self._groups), 1) * num_layers
        return 0.0 if self.done.is_set() else 1.0 - self._fills_done / fills

    def begin_at(self, start: int) -> None:
        """See `LoadJob.begin_at`."""
        super().begin_at(start)
        self.kinds, self.runs = self.plan.begun_at(start)
        self.position = start

    def open(self) -> WholeSource:
        """See `LoadJob.open`."""
        self._groups = groups_of(self.runs, self.plan.read_tokens)
        if not self._groups:
            raise PrefixUnreadable("-", "nothing of it is left to read")
        return self._open(0)

    def bring(self, source: WholeSource, fill: FillLayer) -> None:
        """See `LoadJob.bring`: all groups, one after the other."""
        ahead, opened = self.store.ahead, [source]
        try:
            for number, group in enumerate(self._groups):
                if number + 1 < len(self._groups):
                    opened.append(self._open(number + 1))
                    ahead.wait(opened[-1])
                slots, turn = self._placed(group)
                ahead.join(opened[0])
                for layer in range(opened[0].num_layers):
                    fill(layer, opened[0], slots, turn)
                self._close(opened.pop(0))
        finally:
            for own in opened:
                self._close(own)

    def note_layer(self) -> None:
        """See `LoadJob.note_layer`; no pass may use it yet."""
        self._fills_done += 1

    def begin_computing(self, resident: Tensor) -> None:
        """Begin to compute, on the scheduler's thread; `resident`: int64 [start], their slots."""
        assert self.slots is not None
        self.row, self.position = torch.cat([resident, self.slots]), self.start

    def _open(self, number: int) -> WholeSource:
        return self.store.open_whole([run.span for run in self._groups[number]], exact=False)

    def _close(self, source: WholeSource) -> None:
        self.store.close_source(source)
        self.reads.add(source.stats)

    def _placed(self, runs: list[Run]) -> tuple[Tensor, AfterFill | None]:
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
