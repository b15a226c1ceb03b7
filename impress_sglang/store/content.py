"""Finds stored tokens anywhere in a prompt: an index of the windows of all exact segments.

A segment's tokens are cut into windows of 64 tokens, from its start. All windows of a prompt are
looked up in a dictionary, and each match is extended in both directions to the run of equal tokens.
So stored text of at least 127 tokens is found wherever it is in a prompt. A match is decided by
comparing tokens, not by hashes.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from impress_sglang.loops.types import Flags, Indices
from impress_sglang.storage.quality import EXACT
from impress_sglang.storage.segment import Tokens, common_prefix_len
from impress_sglang.store.prefix_hashes import Hashes, PrefixHashes
from impress_sglang.store.stored import StoredSegment, StoredSpan

WINDOW_TOKENS = 64
# Number of equal windows, of any segments, that are compared with a prompt, oldest first; text that
# occurs everywhere need not be found everywhere.
MAX_EQUAL_WINDOWS = 4
# A value is the `id` of a segment and, in these lower bits, the index of a window.
_WINDOW_BITS = 32
_WINDOW_MASK = (1 << _WINDOW_BITS) - 1
# Minimum size of a table of counts, in total and per window, so that few lookups are in vain; and
# its maximum size, as a multiple of that.
_MIN_PLACES = 1 << 12
_PLACES_PER_WINDOW = 16
_MAX_SIZE_RATIO = 8
# Number of tokens in the first comparison.
_FIRST_COMPARISON = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, stop) of a prompt that equal the tokens of a span."""

    start: int
    span: StoredSpan

    def __len__(self) -> int:
        return len(self.span)

    @property
    def stop(self) -> int:
        return self.start + len(self.span)

    @property
    def shift(self) -> int:
        """Position of the tokens in the prompt, less their position when they were computed."""
        return self.start - self.span.segment.info.prefix_len - self.span.start

    def part(self, start: int, stop: int) -> Run:
        """Return the part of the run in [start, stop) of the prompt, at least one token."""
        start, stop = max(start, self.start), min(stop, self.stop)
        assert start < stop
        first = self.span.start - self.start
        return Run(start, StoredSpan(self.span.segment, start + first, stop + first))


def meets(runs: Sequence[Run], starts: Indices, length: int) -> Flags:
    """Return which windows of `length` tokens, with the given `starts`, have a token of a run.

    `runs` are in order, without overlap; `starts` int64 [w]; returns bool [w].
    """
    if not runs:
        return np.zeros(len(starts), np.bool_)
    begins, stops = np.array([(run.start, run.stop) for run in runs]).T
    # The last run that begins before a window ends is also the one that ends last.
    last = np.searchsorted(begins, starts + length) - 1
    found: Flags = (last >= 0) & (stops[last] > starts)
    return found


class _Counts:
    """Counts the windows of some segments, by the lower bits of their keys."""

    def __init__(self, num_places: int) -> None:
        self._counts = np.zeros(num_places, np.int32)
        self.keys = dict[StoredSegment, Hashes]()
        """Keys of the counted windows, by segment."""
        self.num_windows = 0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, segment: StoredSegment, keys: Hashes) -> None:
        self.keys[segment] = keys
        self.count(keys, 1)

    def of(self, keys: Hashes) -> npt.NDArray[np.int32]:
        """Return upper bounds on the numbers of windows with these keys."""
        return self._counts[self._places(keys)]

    def count(self, keys: Hashes, change: int) -> None:
        """Add `change`, 1 or -1, to the counts of windows."""
        np.add.at(self._counts, self._places(keys), change)
        self.num_windows += change * len(keys)

    def _places(self, keys: Hashes) -> Hashes:
        return keys & np.uint64(len(self._counts) - 1)


class ContentIndex:
    """Windows of the exact segments of a tree. Thread: the tree's."""

    def __init__(self) -> None:
        # A client cannot send text whose windows all have one key.
        self._hashes = PrefixHashes()
        self._segments: dict[int, StoredSegment] = {}
        # The oldest window of each key, and the others. Nearly all keys have one window.
        self._first: dict[int, int] = {}
        self._more: dict[int, dict[int, None]] = {}
        # Filters the windows of a prompt in one vectorized step, so that few keys are looked up in
        # vain. The last table counts new segments, and takes over those of the others step by step.
        self._tables = [_Counts(_MIN_PLACES)]

    def __len__(self) -> int:
        return len(self._first) + sum(map(len, self._more.values()))

    def add(self, segment: StoredSegment) -> None:
        if segment.info.quality != EXACT or segment.info.num_tokens < WINDOW_TOKENS:
            return
        self._segments[id(segment)] = segment
        info = segment.info
        keys = self._hashes.block_windows(info.namespace, info.tokens, WINDOW_TOKENS)
        self._count(segment, keys)
        for value, key in _values(segment, keys):
            if self._first.setdefault(key, value) != value:
                self._more.setdefault(key, {})[value] = None

    def discard(self, segment: StoredSegment) -> None:
        if self._segments.pop(id(segment), None) is None:
            return
        table = next(table for table in self._tables if segment in table.keys)
        table.count(keys := table.keys.pop(segment), -1)
        for value, key in _values(segment, keys):
            more = self._more.get(key, {})
            if self._first[key] != value:
                del more[value]
            elif more:
                self._first[key] = oldest = next(iter(more))
                del more[oldest]
            else:
                del self._first[key]
            if not more:
                self._more.pop(key, None)

    def find(
        self, namespace: str, tokens: Tokens, start: int = 0, *, only_ready: bool = True
    ) -> tuple[Run, ...]:
        """Return the runs of a prompt from `start` on, in order and without overlap.

        A run extends in both directions until the segment ends or the tokens differ; if several
        segments have a window, the longest run is taken. The time is linear in the number of
        scanned tokens, for any tokens. `only_ready`: leave out segments that cannot be read now.
        """
        keys = self._hashes.rolling_windows(namespace, tokens[start:], WINDOW_TOKENS)
        candidates = np.flatnonzero(sum(table.of(keys) for table in self._tables))
        runs, misses = list[Run](), 0
        first = position = start
        for at, key in zip((candidates + start).tolist(), keys[candidates].tolist(), strict=True):
            if at < position or key not in self._first:
                continue
            run = self._longest(namespace, tokens, first, at, key, only_ready)
            if run is None:
                # In periodic text, a segment that is not ready may match at every position.
                misses += 1
                position = at + min(misses, WINDOW_TOKENS)
            else:
                runs.append(run)
                first = position = run.stop
        return tuple(runs)

    def _longest(
        self, namespace: str, tokens: Tokens, first: int, position: int, key: int, only_ready: bool
    ) -> Run | None:
        best: Run | None = None
        now = time.time()
        values = itertools.chain([self._first[key]], self._more.get(key, ()))
        for value in itertools.islice(values, MAX_EQUAL_WINDOWS):
            segment = self._segments[value >> _WINDOW_BITS]
            # Keys differ between namespaces, unless hashes collide.
            if segment.info.namespace != namespace or (only_ready and not segment.may_be_read(now)):
                continue
            start = (value & _WINDOW_MASK) * WINDOW_TOKENS
            stored = segment.info.tokens
            num_after = _equal(tokens[position:], stored[start:])
            num_before = _equal(tokens[first:position][::-1], stored[:start][::-1])
            if num_after >= WINDOW_TOKENS and (best is None or num_before + num_after > len(best)):
                span = StoredSpan(segment, start - num_before, start + num_after)
                best = Run(position - num_before, span)
        return best

    def _count(self, segment: StoredSegment, keys: Hashes) -> None:
        """Count the windows of a new segment, in a new table if the last one has the wrong size."""
        total = len(keys) + sum(table.num_windows for table in self._tables)
        min_places = max(_PLACES_PER_WINDOW * total, _MIN_PLACES)
        if not min_places <= len(self._tables[-1]) <= _MAX_SIZE_RATIO * min_places:
            self._tables.append(_Counts(1 << (2 * min_places - 1).bit_length()))
        self._tables[-1].add(segment, keys)
        # Moving twice the new windows makes a table the only one before it is full.
        to_move = 2 * len(keys)
        while len(self._tables) > 1 and to_move > 0:
            if (oldest_table := self._tables[0]).keys:
                old_segment, windows = oldest_table.keys.popitem()
                oldest_table.count(windows, -1)
                self._tables[-1].add(old_segment, windows)
                to_move -= len(windows)
            else:
                del self._tables[0]


def _values(segment: StoredSegment, keys: Hashes) -> list[tuple[int, int]]:
    first = id(segment) << _WINDOW_BITS
    return [(first + at, key) for at, key in enumerate(keys.tolist())]


def _equal(left: Tokens, right: Tokens) -> int:
    """Return the number of equal leading tokens, in time linear in it."""
    length, size = 0, _FIRST_COMPARISON
    while True:
        equal = common_prefix_len(left[length : length + size], right[length : length + size])
        length += equal
        if equal < size:
            return length
        size *= 2
