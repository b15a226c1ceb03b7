"""Blend jobs: load jobs that also load stored text that is no prefix, and recompute some of it.

The loader thread reads all runs into the job's slots, group by group, and rotates their keys to
their new positions. Then the scheduler thread computes the rest (`blend.plugin.steps`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Generator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.loops.types import Flags, Float32s, Uint8s
from impress_sglang.serving.load_jobs import AfterFill, LoadJob, Read
from impress_sglang.serving.why import Detail
from impress_sglang.store.content import Run
from impress_sglang.store.stored import StoredMatch, StoredSpan
from impress_sglang.transfer.sources import WholeSource

# Layers that compute all tokens to find deviations; the first layer never deviates.
CHECKED_LAYERS = 2


class TokenKind(enum.IntEnum):
    """Source of the KVs of a token of a blended prefix."""

    KEPT = 0
    """Stored after the same tokens."""
    COMPUTED = 1
    """Computed in all layers."""
    REUSED = 2
    """Stored after other tokens; computed as long as its KVs are among the most deviant."""


@dataclasses.dataclass(eq=False, kw_only=True)
class BlendJob(LoadJob):
    """A load job for a prefix with stored runs, each of which may be stored after other tokens."""

    rotation: KeyRotation
    """Rotation of the model's keys."""
    runs: tuple[Run, ...]
    """Runs to read, in prompt order, from the first token that is not resident."""
    kinds: Uint8s
    """uint8 [stop - start], the `TokenKind` of each of its tokens."""
    recompute_ratio: float
    """Share of the `REUSED` tokens to compute, on average over the layers."""
    num_new: int
    """Number of prompt tokens that follow."""
    read_tokens: int
    """Most tokens to read in one step."""
    why: Detail | None = None
    """Why it could not be blended; None if there was nothing to read."""
    row: Tensor | None = None
    """int64 [stop], slots of all tokens, while it is computed."""
    position: int = 0
    """First token that is yet to be computed."""
    token_layers: int = 0
    """Computed tokens, summed over all layers."""
    spent: float = 0.0
    """Seconds of computing."""

    groups: list[list[Run]] = dataclasses.field(default_factory=list)
    """The runs, grouped by read step; set when reading starts."""

    computes_after_reads: ClassVar[bool] = True

    @property
    def spans(self) -> tuple[StoredSpan, ...]:
        return tuple(run.span for run in self.runs)

    def tokens_by_origin(self, stop: int) -> tuple[int, int, int]:
        """See `LoadJob.tokens_by_origin`; the kept tokens come first."""
        kinds = self.kinds[: stop - self.start]
        kept = int(np.argmax(np.append(kinds, TokenKind.COMPUTED) != TokenKind.KEPT))
        reused, computed = (
            np.count_nonzero(kinds == kind) for kind in (TokenKind.REUSED, TokenKind.COMPUTED)
        )
        return kept, int(reused), int(computed)

    @property
    def seconds(self) -> float:
        """Seconds of restoring and computing, without waiting for the drive or for other jobs."""
        return max(self.fill_seconds - self.read_stats.wait_ms / 1e3, 0.0) + self.spent

    def seconds_left(self, num_layers: int, now: float) -> float | None:
        """See `LoadJob.seconds_left`; computing takes as long as estimated."""
        computing = self.estimate.compute
        if self.done.is_set():
            done = (self.position - self.start) / max(len(self), 1)
            return max(computing * (1.0 - done), 0.0)
        left = super().seconds_left(max(len(self.groups), 1) * num_layers, now)
        return None if left is None else left + computing

    def unread_fraction(self, num_layers: int) -> float:
        return super().unread_fraction(max(len(self.groups), 1) * num_layers)

    def set_start(self, start: int) -> None:
        """See `LoadJob.set_start`: resident tokens are not read, evicted ones are."""
        before = self.start
        super().set_start(start)
        self.position = start
        if start >= before:
            runs = [run.part(start, run.stop) for run in self.runs if run.stop > start]
            self.kinds, self.runs = self.kinds[start - before :], tuple(runs)
        else:
            end = min(max(self.match.num_tokens, start), before)
            gone = [TokenKind.KEPT] * (end - start) + [TokenKind.COMPUTED] * (before - end)
            kept = [run.part(start, end) for run in runs_of(self.match, start) if run.start < end]
            self.kinds = np.concatenate([np.array(gone, np.uint8), self.kinds])
            self.runs = (*kept, *self.runs)
        positions = (max(run.stop, run.stop - run.shift) for run in self.runs)
        self.rotation.prepare(max(positions, default=0))

    def open(self) -> WholeSource:
        self.groups = groups_of(self.runs, self.read_tokens)
        if not self.groups:
            raise PrefixUnreadable("-", "nothing of it is left to read")
        return self._open(0)

    def sources(self, opened: WholeSource, rows_from: int | None) -> Generator[Read, None, None]:
        """See `LoadJob.sources`: yields all groups, and reads one ahead."""
        opened_sources = [opened]
        try:
            for number, group in enumerate(self.groups):
                if number + 1 < len(self.groups):
                    opened_sources.append(self._open(number + 1))
                    self.store.ahead.add_waiting(opened_sources[-1])
                slots, turn = self._placed(group)
                yield opened_sources.pop(0), slots, turn
        finally:
            for source in opened_sources:
                self.store.close_source(source)

    def _open(self, number: int) -> WholeSource:
        return self.store.readers.open([run.span for run in self.groups[number]], exact=False)

    def _placed(self, runs: list[Run]) -> tuple[Tensor, AfterFill | None]:
        """Return the slots of a group, and a function that rotates its keys if necessary."""
        assert self.target_slots is not None
        new = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        slots = self.target_slots[(new - self.start).to(self.target_slots.device)]
        if not any(run.shift for run in runs):
            return slots, None
        shift = torch.cat([torch.full((len(run),), run.shift) for run in runs])
        moving = shift.nonzero().flatten()
        turns = self.rotation.factors((new - shift)[moving], new[moving])
        moved = slots[moving.to(slots.device)]

        def turn(keys: Tensor) -> None:
            keys[moved] = self.rotation.move(keys[moved], turns)

        return slots, turn


def runs_of(match: StoredMatch, start: int) -> list[Run]:
    """Return the runs of a stored prefix from token `start` on."""
    runs = []
    for span in match.slice(start, match.num_tokens):
        runs.append(Run(start, span))
        start += len(span)
    return runs


def groups_of(runs: Sequence[Run], max_tokens: int) -> list[list[Run]]:
    """Split runs into groups, each read in one step and spanning at most `max_tokens` of a prompt.

    No page of a segment's codes occurs twice in a group, so one source can read it.
    """
    groups: list[list[Run]] = []
    pages, end = set[tuple[str, int]](), -1
    for run in runs:
        segment, start = run.span.segment, run.start
        size = segment.info.geometry.codes[0].page_tokens
        while start < run.stop:
            part = run.part(start, min(run.stop, end if start < end else start + max_tokens))
            places = range(part.span.start // size, (part.span.stop - 1) // size + 1)
            new_pages = {(segment.segment_id, page) for page in places}
            if start >= end or not pages.isdisjoint(new_pages):
                groups.append([])
                pages, end = set(), start + max_tokens
            groups[-1].append(part)
            pages |= new_pages
            start = part.stop
    return groups


def ratio_of_layer(ratio: float, layer: int, num_layers: int) -> float:
    """Return the share of the reused tokens to compute in a layer after the checked ones.

    CacheBlend 4.3 filters gradually: more than `ratio` at first, less at the end, `ratio` on
    average.
    """
    first, last = CHECKED_LAYERS, max(num_layers - 1, CHECKED_LAYERS + 1)
    spread = min(0.5, (1.0 - ratio) / ratio) if ratio else 0.0
    return ratio * (1.0 + spread * (1.0 - 2.0 * (layer - first) / (last - first)))


def computed_again(reused: Flags, deviations: Float32s, count: int) -> Flags:
    """Select the tokens of a layer that the next layer computes as well, bool [n].

    These are all that are not `reused`, and the `count` reused ones that deviate most.
    """
    going_on, first = ~reused, max(len(reused) - count, int(np.count_nonzero(~reused)))
    # Tokens that are not reused sort first, the most deviant last.
    going_on[np.argsort(np.where(reused, deviations, -1.0))[first:]] = True
    return going_on
