"""What a blended prefix consists of: runs that are stored behind other text, and computed tokens.

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
from impress_sglang.precision.codec import GROUP_TOKENS
from impress_sglang.serving.paper.admission import AdmissionPlan
from impress_sglang.serving.why import Detail, Reason
from impress_sglang.storage.quality import Quality
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.coded import CodedSource

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


@dataclasses.dataclass(frozen=True, slots=True)
class BlendBlock:
    """Tokens [start, stop) of a prompt that are blended at once.

    No page of a segment's codes is twice in the runs of a group, so one source can read the group.
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
    """The runs of its prompt that the last search found."""
    answer: BlendPlan | Detail | None = None
    """The last answer: how it would blend, or why it would not."""
    asked: tuple[int, int] | None = None
    """What that answers: tokens then in SGLang's tree, and where the usual plan ended."""
    answered: float = 0.0
    """When it was answered, by `time.monotonic`."""
    why: Detail | None = None
    """Why it does not blend, although it accepts blending and some of its text is stored."""
    declined: bool = False
    """Whether its blend could not be opened, so that it goes on without one."""
    measures: bool = False
    """Whether it blends to measure how fast blending is now."""

    def decline(self) -> None:
        """Let the request go on as if there were no blending."""
        self.declined = True
        self.why = self.why or (Reason.NOT_OPENED, "")


@dataclasses.dataclass(frozen=True, slots=True)
class BlendPlan(AdmissionPlan):
    """A prefix of which some runs are stored, each behind other tokens.

    `match` has only what is stored as a prefix of the prompt; `kinds` uint8 [stored] gives the
    `Kind` of each token. Of the tokens that are stored elsewhere the share `again` is computed, on
    average over the layers; of those that are `REUSED`, the share `share`.
    """

    runs: tuple[Run, ...] = ()
    kinds: Uint8s = dataclasses.field(default_factory=lambda: np.empty(0, np.uint8), compare=False)
    again: float = 0.0
    share: float = 0.0
    block_tokens: int = 1
    notes: BlendNotes = dataclasses.field(default_factory=BlendNotes, compare=False)

    @property
    def spans(self) -> tuple[StoredSpan, ...]:
        """The stored tokens that are read, in the order of the prompt."""
        return tuple(run.span for run in self.runs)

    @property
    def quality(self) -> Quality:
        """The quality of what is blended, and of what is computed after it."""
        return self.match.quality.after(1.0, self.estimate.bits, self.again)

    @property
    def blended(self) -> int:
        """Tokens of the prefix from the first that is not stored behind the same text."""
        return len(self.kinds) - int(np.argmax(self.kinds != Kind.KEPT))

    @property
    def reused(self) -> int:
        """How many tokens are `REUSED`."""
        return int(np.count_nonzero(self.kinds == Kind.REUSED))

    @property
    def sources(self) -> dict[str, int]:
        """Numbers of its tokens by where they come from; see `report.SOURCES`."""
        kept = int(np.count_nonzero(self.kinds == Kind.KEPT))
        return {"resident": self.resident_len, "loaded": kept, "blended": self.reused}

    def same_tokens(self, other: AdmissionPlan) -> bool:
        """Whether another plan blends the same runs into a prompt of the same lengths."""
        return isinstance(other, BlendPlan) and (self.work, self.runs) == (other.work, other.runs)

    @property
    def blocks(self) -> Iterator[BlendBlock]:
        """The blocks of tokens that are blended at once, in order."""
        starts, stops = [own.start for own in self.runs], [own.stop for own in self.runs]
        for start in range(self.resident_len, self.stop, self.block_tokens):
            stop = min(start + self.block_tokens, self.stop)
            first, last = bisect.bisect_right(stops, start), bisect.bisect_left(starts, stop)
            runs = [own.part(start, stop) for own in self.runs[first:last]]
            yield BlendBlock(start, stop, tuple(map(tuple, apart(runs))))

    def unread(self, source: AnySource) -> float:
        """See `AdmissionPlan.unread`; a source has only one group of all that is stored."""
        return 1.0 - (1.0 - source.unread) * source.num_tokens / sum(map(len, self.runs))

    def open_source(self, store: PrefixStore, timeline: Timeline) -> AnySource:
        """Open a source for the first group, which is what is read while the request waits."""
        groups = (group for block in self.blocks for group in block.groups)
        return open_group(store, next(groups), timeline, self.planes)


def share_of_layer(share: float, layer: int, num_layers: int) -> float:
    """The share of the reused tokens that is computed in a layer after the checked ones.

    CacheBlend 4.3 filters gradually: more than `share` at first, less in the end, `share` on
    average.
    """
    first, last = CHECKED_LAYERS, max(num_layers - 1, CHECKED_LAYERS + 1)
    spread = min(0.5, (1.0 - share) / share) if share else 0.0
    return share * (1.0 + spread * (1.0 - 2.0 * (layer - first) / (last - first)))


def apart(runs: Sequence[Run]) -> list[list[Run]]:
    """Split runs into few groups, none of which has a page of a segment's codes twice."""
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
    """Open a source for so many planes of the tokens of some runs, run after run.

    Raises:
        PrefixUnreadable: a segment is gone or cannot be opened.
    """
    source = store.open_whole([run.span for run in runs], planes, timeline)
    assert isinstance(source, CodedSource)
    return source
