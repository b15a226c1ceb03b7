"""What a blended prefix consists of: runs stored behind other text, and computed tokens."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from impress_sglang.cost import Estimate, RequestLengths
from impress_sglang.loops.types import Uint8s
from impress_sglang.serving.why import Detail
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.content import Run
from impress_sglang.store.stored import StoredMatch, StoredSpan

# Layers in which deviations are looked for among all tokens; the first never deviates.
CHECKED_LAYERS = 2


class Kind(enum.IntEnum):
    """How a token of a blended prefix gets its KVs."""

    KEPT = 0
    """It is stored behind the same tokens."""
    COMPUTED = 1
    """It is computed in all layers."""
    REUSED = 2
    """It is stored behind other tokens; it is computed while its KVs are among the most deviant."""


@dataclasses.dataclass(slots=True)
class BlendNotes:
    """Why a request that accepts it does not blend, if some of its text is stored.

    `declined`: whether it goes on without, whatever is found.
    """

    why: Detail | None = None
    declined: bool = False

    def decline(self, why: Detail) -> None:
        """Let the request go on as if there were no blending."""
        self.declined = True
        self.why = self.why or why


@dataclasses.dataclass(frozen=True, slots=True)
class BlendPlan:
    """A prefix of which some runs are stored, each behind other tokens; always carried out.

    Attributes:
        match: what is stored as a prefix of the prompt.
        work: how many of its tokens are resident, are blended, and follow.
        tokens: the prompt, as far as a prefix may reach.
        estimate: how long blending it takes.
        runs: what is read, from the first token that is not resident.
        kinds: uint8 [work.stored], the `Kind` of each token behind the resident ones.
        share: how many of the `REUSED` tokens are computed, on average over the layers.
        read_tokens: at most so many tokens are read at once.
    """

    match: StoredMatch
    work: RequestLengths
    tokens: Tokens
    estimate: Estimate
    runs: tuple[Run, ...]
    kinds: Uint8s
    share: float
    read_tokens: int
    loads: ClassVar[bool] = True

    @property
    def start(self) -> int:
        """Where it begins: behind what was resident when it was planned."""
        return self.work.resident

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.work.resident + self.work.stored

    @property
    def spans(self) -> tuple[StoredSpan, ...]:
        """The stored tokens that are read, in the order of the prompt."""
        return tuple(run.span for run in self.runs)

    def begun_at(self, start: int) -> tuple[Uint8s, tuple[Run, ...]]:
        """Kinds and runs of the same prefix if `start` tokens are resident now."""
        before = self.work.resident
        if start >= before:
            runs = [run.part(start, run.stop) for run in self.runs if run.stop > start]
            return self.kinds[start - before :], tuple(runs)
        known = min(max(self.match.num_tokens, start), before)
        kept, computed = known - start, before - known
        kinds = np.repeat(np.array([Kind.KEPT, Kind.COMPUTED], np.uint8), [kept, computed])
        kept_runs = (run.part(start, known) for run in runs_of(self.match, start) if kept)
        return np.concatenate([kinds, self.kinds]), (*kept_runs, *self.runs)


def runs_of(match: StoredMatch, start: int) -> list[Run]:
    """The runs of a stored prefix from token `start` on."""
    runs = []
    for span in match.slice(start, match.num_tokens):
        runs.append(Run(start, span))
        start += len(span)
    return runs


def groups_of(runs: Sequence[Run], most: int) -> list[list[Run]]:
    """Split runs into groups that are read at once, each within so many tokens of a prompt.

    No page of a segment's codes is twice in the runs of a group, so one source can read the group.
    """
    groups: list[list[Run]] = []
    pages, end = set[tuple[str, int]](), -1
    for run in runs:
        segment, start = run.span.segment, run.start
        size = segment.info.layout().codes[0].page_tokens
        while start < run.stop:
            part = run.part(start, min(run.stop, end if start < end else start + most))
            places = range(part.span.start // size, (part.span.stop - 1) // size + 1)
            own = {(segment.segment_id, page) for page in places}
            if start >= end or not pages.isdisjoint(own):
                groups.append([])
                pages, end = set(), start + most
            groups[-1].append(part)
            pages |= own
            start = part.stop
    return groups


def share_of_layer(share: float, layer: int, num_layers: int) -> float:
    """The share of the reused tokens that is computed in a layer after the checked ones.

    CacheBlend 4.3 filters gradually: more than `share` at first, less in the end, `share` on
    average.
    """
    first, last = CHECKED_LAYERS, max(num_layers - 1, CHECKED_LAYERS + 1)
    spread = min(0.5, (1.0 - share) / share) if share else 0.0
    return share * (1.0 + spread * (1.0 - 2.0 * (layer - first) / (last - first)))
