"""What a blended prefix consists of: runs that are stored behind other text, and what is computed.

Stage: admit.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Iterator, Sequence

import numpy as np

from impress_sglang.loops.types import Uint8s
from impress_sglang.management.content import FoundRuns, Run
from impress_sglang.management.open_segments import AnySource
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import StoredSegment, StoredSpan
from impress_sglang.precision.allocation import whole_planes
from impress_sglang.precision.codec import GROUP_TOKENS
from impress_sglang.serving.admission import AdmissionPlan
from impress_sglang.serving.why import Detail, Reason
from impress_sglang.storage.quality import Quality
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.coded import CodedSource

# Layers in which deviations are looked for among all tokens; the first never deviates.
CHECKED_LAYERS = 2


class Kind(enum.IntEnum):
    """What becomes of a token of a blended prefix."""

    KEPT = 0
    """It is stored behind the same tokens."""
    COMPUTED = 1
    """It is computed in all layers."""
    REUSED = 2
    """It is stored behind other tokens; it is computed as long as its KVs deviate most."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlendBlock:
    """Tokens [start, stop) of a prompt that are blended at once.

    No page of a segment's codes is twice in the runs of a group, so that one source can read it.
    """

    start: int
    stop: int
    groups: tuple[tuple[Run, ...], ...]

    def __len__(self) -> int:
        return self.stop - self.start

    def without(self, segment: StoredSegment) -> BlendBlock:
        """The block without the runs of a segment."""
        groups = (tuple(r for r in own if r.span.segment is not segment) for own in self.groups)
        return dataclasses.replace(self, groups=tuple(own for own in groups if own))


@dataclasses.dataclass(slots=True)
class BlendNotes:
    """What is known of a request that may blend, until it is over."""

    found: FoundRuns | None = None
    """What was found of its prompt when it was looked for last."""
    answer: BlendPlan | Detail | None = None
    """How it would blend, or why not, as far as that was asked for lately."""
    asked: tuple[int, int] | None = None
    """What of it was in SGLang's tree then, and where its usual plan ended."""
    answered: float = 0.0
    """When, by `time.monotonic`."""
    why: Detail | None = None
    """Why it does not blend, although it would take it and some of it is stored."""
    declined: bool = False
    """Whether its blend could not be opened, so that it does without."""
    measures: bool = False
    """Whether it blends to see how fast that is now."""

    def decline(self) -> None:
        """The request goes on as if nobody blended."""
        self.declined = True
        self.why = self.why or (Reason.NOT_OPENED, "")


@dataclasses.dataclass(frozen=True, slots=True)
class BlendPlan(AdmissionPlan):
    """A prefix of which some runs are stored, each behind other tokens.

    `match` has only what is stored as a prefix of it; `kinds` uint8 [stored] are what `Kind`s the
    tokens are. Of what is stored elsewhere the share `again` is computed, on average over the
    layers; of those that are `REUSED` it is `share`.
    """

    runs: tuple[Run, ...] = ()
    kinds: Uint8s = dataclasses.field(default_factory=lambda: np.empty(0, np.uint8), compare=False)
    again: float = 0.0
    share: float = 0.0
    block_tokens: int = 1
    notes: BlendNotes = dataclasses.field(default_factory=BlendNotes, compare=False)

    @property
    def spans(self) -> tuple[StoredSpan, ...]:
        """What is read, in the order of the prompt."""
        return tuple(run.span for run in self.runs)

    @property
    def quality(self) -> Quality:
        """Of what is computed after it, and of what is blended."""
        return self.match.quality.after(1.0, self.estimate.bits, self.again)

    @property
    def blended(self) -> int:
        """See `AdmissionPlan.blended`."""
        return len(self.kinds) - int(np.argmax(self.kinds != Kind.KEPT))

    @property
    def planes(self) -> int:
        """Planes that are read with the base: those that all units get, for nobody looks."""
        return whole_planes(self.estimate.bits)

    @property
    def reused(self) -> int:
        """Tokens that are stored behind others."""
        return int(np.count_nonzero(self.kinds == Kind.REUSED))

    @property
    def sources(self) -> dict[str, int]:
        """See `AdmissionPlan.sources`."""
        kept = int(np.count_nonzero(self.kinds == Kind.KEPT))
        return {"resident": self.resident_len, "loaded": kept, "blended": self.reused}

    def same_tokens(self, other: AdmissionPlan) -> bool:
        """Whether another plan blends the same."""
        return isinstance(other, BlendPlan) and (self.work, self.runs) == (other.work, other.runs)

    @property
    def blocks(self) -> Iterator[BlendBlock]:
        """What is blended at once, in order."""
        starts, stops = [own.start for own in self.runs], [own.stop for own in self.runs]
        for start in range(self.resident_len, self.stop, self.block_tokens):
            stop = min(start + self.block_tokens, self.stop)
            first, last = bisect.bisect_right(stops, start), bisect.bisect_left(starts, stop)
            runs = [own.part(start, stop) for own in self.runs[first:last]]
            yield BlendBlock(start, stop, tuple(map(tuple, apart(runs))))

    def unread(self, source: AnySource) -> float:
        """See `AdmissionPlan.unread`: of all that is stored a source has a group."""
        return 1.0 - (1.0 - source.unread) * source.num_tokens / sum(map(len, self.runs))

    def open_source(self, store: PrefixStore, timeline: Timeline) -> AnySource:
        """What a request that waits reads ahead: the first group."""
        groups = (group for block in self.blocks for group in block.groups)
        return open_group(store, next(groups), timeline, self.planes)


def share_of_layer(share: float, layer: int, num_layers: int) -> float:
    """Of the reused tokens those that are computed in a layer behind the checked ones.

    CacheBlend 4.3 filters gradually: more than `share` at first, less in the end, `share` on
    average.
    """
    first, last = CHECKED_LAYERS, max(num_layers - 1, CHECKED_LAYERS + 1)
    spread = min(0.5, (1.0 - share) / share) if share else 0.0
    return share * (1.0 + spread * (1.0 - 2.0 * (layer - first) / (last - first)))


def apart(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs in as few groups as it takes that no group has a page of a segment's codes twice."""
    groups: list[tuple[list[Run], set[tuple[str, int]]]] = []
    for run in runs:
        span, layout = run.span, run.span.segment.info.layout().codes
        assert layout is not None, "the store has no codes"
        size = layout.page_groups * GROUP_TOKENS
        last = (span.stop - 1) // size
        pages = {(span.segment.segment_id, page) for page in range(span.start // size, last + 1)}
        free = next((group for group in groups if group[1].isdisjoint(pages)), None)
        if free is None:
            groups.append(free := ([], set()))
        free[0].append(run)
        free[1].update(pages)
    return [own for own, _ in groups]


def open_group(
    store: PrefixStore, runs: Sequence[Run], timeline: Timeline, planes: int
) -> CodedSource:
    """A source for the tokens of some runs, one run after the other; see `BlendPlan.planes`.

    Raises:
        PrefixUnreadable: a segment is gone or cannot be opened.
    """
    return store.open_coded([run.span for run in runs], [False] * len(runs), timeline, planes)
