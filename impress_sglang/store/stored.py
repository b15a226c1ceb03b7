"""Stored segments, spans of their tokens, and matches of a prompt."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import time
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.storage.segment import Priority, SegmentInfo, Tokens


class SegmentState(enum.Enum):
    """State of a segment of the tree."""

    PENDING = "pending"
    """Its file is being written."""
    READY = "ready"
    """It can be read."""
    SUSPECT = "suspect"
    """It could not be read; a second look decides."""
    LOST = "lost"
    """It has no file; in the tree it is a tombstone, on which other segments build."""


Children: TypeAlias = "dict[int, dict[int, list[StoredSegment]]]"
"""Segments by their prefix length and first token, best quality first, and one per quality."""


@dataclasses.dataclass(eq=False, slots=True)
class StoredSegment:
    """A segment in the tree.

    Attributes:
        file_bytes: size of its file; 0 if only another server or the bucket has it.
        last_access: logical time of the last use, see `EvictionOrder.now`.
        written: time of `time.time` at which its file was written.
        parent_hint: hint of an earlier process: id of the segment to which it was attached.
        foreign_dir: folder of the other server that has its file, or the bucket's URL; None for a
            file of this server.
        dependents: number of children by their `level`.
        children: segments that build on it.
        states: prefix lengths of the children that are recurrent states, ascending.
        history: statistics of its tokens that `paper/` collects.
        expires_at: time at which it expires.
        level: priority for eviction: segments of a lower level are evicted earlier.
    """

    info: SegmentInfo
    file_bytes: int
    state: SegmentState = SegmentState.READY
    last_access: int = 0
    hits: int = 0
    written: float = dataclasses.field(default_factory=time.time)
    parent_hint: str = ""
    foreign_dir: Path | None = None
    dependents: list[int] = dataclasses.field(init=False)
    parent: StoredSegment | None = dataclasses.field(init=False, default=None)
    children: Children = dataclasses.field(init=False, repr=False, default_factory=dict)
    states: list[int] = dataclasses.field(init=False, repr=False, default_factory=list)
    history: Any = dataclasses.field(init=False, default=None)
    expires_at: float = dataclasses.field(init=False, default=math.inf)
    level: Priority = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.dependents = [0] * len(Priority)
        self.level = self.effective_level

    def detached_copy(self, **changes: Any) -> StoredSegment:
        return dataclasses.replace(self, **{"parent_hint": self.journal_usage[3], **changes})

    def prompt(self) -> Tokens:
        """Return all tokens from the start of a prompt to the end of the segment, int32 [n]."""
        parts, ancestor = [self.info.tokens], self
        while ancestor.parent is not None:
            length = ancestor.info.prefix_len - ancestor.parent.info.prefix_len
            ancestor = ancestor.parent
            parts.append(ancestor.info.tokens[:length])
        return np.concatenate(parts[::-1])

    def may_be_read(self, now: float) -> bool:
        """Whether it is ready and has not expired; expired segments are removed step by step."""
        return self.ready and now < self.expires_at

    @property
    def effective_level(self) -> Priority:
        """Maximum of its priority (a tombstone has none) and its dependents' levels."""
        priority = Priority.LOW if self.lost else self.info.priority
        return max(priority, *(level for level in Priority if self.dependents[level]), Priority.LOW)

    @property
    def num_dependents(self) -> int:
        return sum(self.dependents)

    @property
    def segment_id(self) -> str:
        return self.info.segment_id

    @property
    def journal_usage(self) -> tuple[str, int, int, str]:
        """Entry of the journal: id, last access, hits, and id of the parent."""
        parent = self.parent
        parent_id = self.parent_hint if parent is None else parent.segment_id
        return self.segment_id, self.last_access, self.hits, parent_id

    @property
    def stop(self) -> int:
        """Number of tokens from the start of a prompt to its end."""
        return self.info.prefix_len + self.info.num_tokens

    @property
    def lost(self) -> bool:
        return self.state is SegmentState.LOST

    @property
    def ready(self) -> bool:
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
        return sum(map(len, self.spans))

    @property
    def quality(self) -> Quality:
        return functools.reduce(Quality.worst, (s.segment.info.quality for s in self.spans), EXACT)

    def with_windows(self, window: int, page: int) -> int:
        """Return the length of the longest prefix in whole pages whose last `window` tokens have
        all their KVs."""
        longest = stop = first = 0
        for span in self.spans:
            missing = min(span.segment.info.windows_from - span.start, len(span))
            # From here on all KVs are stored without a gap.
            first = stop + missing if missing > 0 else first
            stop += len(span)
            end = stop // page * page
            if not first or end - first >= window:
                longest = end
        return longest

    def slice(self, start: int, stop: int) -> tuple[StoredSpan, ...]:
        parts, first = [], 0
        for span in self.spans:
            low, high = max(start - first, 0), min(stop - first, len(span))
            if low < high:
                parts.append(StoredSpan(span.segment, span.start + low, span.start + high))
            first += len(span)
        return tuple(parts)
