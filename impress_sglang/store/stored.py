"""What is stored of a token sequence: segments, and spans of their tokens."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import time
from pathlib import Path
from typing import Any, TypeAlias

from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Priority, SegmentInfo

SegmentUse: TypeAlias = tuple[str, int, int, str]
"""Name, last access and hits of a segment, and the name of what it builds on."""


class SegmentState(enum.Enum):
    """What can be done with a segment of the tree."""

    PENDING = "pending"
    """Its file is being written."""
    READY = "ready"
    """It can be read."""
    SUSPECT = "suspect"
    """It could not be read; a second look decides."""
    LOST = "lost"
    """It has no file; if it is still in the tree, others build on it."""


@dataclasses.dataclass(eq=False, slots=True)
class StoredSegment:
    """A segment in the tree.

    `home` is the folder of the other server that has its file, None: it is ours; `file_bytes` are
    those of ours.

    `dependents` counts segments attached below it, by their `level`; `last_access` is a logical
    time; `history` is what `paper/` learns of its tokens; `written` is when its file was, as of
    `time.time`, and `due` when it expires; `above` is a hint of an earlier process, what it was
    attached to.

    Segments of a lower `level` leave the SSD before it.
    """

    info: SegmentInfo
    file_bytes: int
    state: SegmentState = SegmentState.READY
    dependents: list[int] = dataclasses.field(default_factory=lambda: [0] * len(Priority))
    last_access: int = 0
    hits: int = 0
    parent: StoredSegment | None = None
    history: Any = None
    written: float = dataclasses.field(default_factory=time.time)
    due: float = math.inf
    above: str = ""
    home: Path | None = None
    level: Priority = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.level = Priority.LOW if self.state is SegmentState.LOST else self.info.priority

    def may_be_read(self, now: float) -> bool:
        """Whether it is ready, and has not expired: of many that have, some are still there."""
        return self.ready and now < self.due

    @property
    def own_level(self) -> Priority:
        """The highest of its priority (a hole has none) and its dependents' levels."""
        own = Priority.LOW if self.state is SegmentState.LOST else self.info.priority
        _, normal, high = self.dependents
        if high:
            return Priority.HIGH
        return max(own, Priority.NORMAL if normal else Priority.LOW)

    @property
    def num_dependents(self) -> int:
        """Segments attached below it."""
        return sum(self.dependents)

    @property
    def row(self) -> tuple[SegmentInfo, int, SegmentUse, float]:
        """Its row of the index."""
        return self.info, self.file_bytes, self.use, self.written

    @property
    def segment_id(self) -> str:
        """Name of the segment."""
        return self.info.segment_id

    @property
    def use(self) -> SegmentUse:
        """What the index should record of its use."""
        parent = self.above if self.parent is None else self.parent.segment_id
        return self.segment_id, self.last_access, self.hits, parent

    @property
    def ready(self) -> bool:
        """Whether it can be read."""
        return self.state is SegmentState.READY

    @property
    def on_disk(self) -> bool:
        """Whether it has a file, which may be damaged."""
        return self.state in (SegmentState.READY, SegmentState.SUSPECT)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredSpan:
    """Tokens [start, stop) of a segment."""

    segment: StoredSegment
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class StoredMatch:
    """The longest stored prefix of a token sequence: spans in order, from token 0."""

    spans: tuple[StoredSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Length of the match."""
        return sum(map(len, self.spans))

    @property
    def quality(self) -> Quality:
        """The quality of the whole, that of its worst part."""
        return functools.reduce(Quality.worst, (s.segment.info.quality for s in self.spans), EXACT)

    def with_windows(self, window: int, page: int) -> int:
        """The longest prefix in whole pages whose last `window` tokens have all their KVs."""
        longest = stop = first = 0
        for span in self.spans:
            missing = min(span.segment.info.windows_from - span.start, len(span))
            # From here on there are all KVs without a gap.
            first = stop + missing if missing > 0 else first
            stop += len(span)
            end = stop // page * page
            if not first or end - first >= window:
                longest = end
        return longest

    def slice(self, start: int, stop: int) -> tuple[StoredSpan, ...]:
        """The spans of the tokens [start, stop)."""
        parts, first = [], 0
        for span in self.spans:
            low, high = max(start - first, 0), min(stop - first, len(span))
            if low < high:
                parts.append(StoredSpan(span.segment, span.start + low, span.start + high))
            first += len(span)
        return tuple(parts)
