"""Finds stored tokens anywhere in a prompt: the windows of all exact segments, by their content.

A segment's tokens are cut into windows of 64 from its start on. A prompt is scanned once; where one
of its windows is known, it is compared with the segment token by token, and the run of equal tokens
is extended both ways. So stored text of at least 127 tokens is found wherever it is in a prompt.
A hash alone decides nothing, and each namespace has its own hash seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time

import numpy as np

from impress_sglang.loops.types import Flags, Indices, Words
from impress_sglang.storage.quality import EXACT
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.stored import StoredSegment, StoredSpan

WINDOW_TOKENS = 64
# How many equal windows are kept, in different segments or in one; text that occurs everywhere need
# not be found everywhere.
SAME_WINDOWS = 4
# A value is the number of a segment and, in these lower bits, that of a window.
_WINDOW_BITS = 32
_WINDOW_MASK = (1 << _WINDOW_BITS) - 1
_LEAST_PLACES = 1 << 12
_SECRET_BYTES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Tokens of a prompt, from `start` on, that equal those of a span."""

    start: int
    span: StoredSpan

    def __len__(self) -> int:
        return len(self.span)

    @property
    def stop(self) -> int:
        """Where it ends in the prompt."""
        return self.start + len(self.span)

    @property
    def shift(self) -> int:
        """How many positions later its tokens are than where they were computed."""
        return self.start - self.span.segment.info.prefix_len - self.span.start

    def part(self, start: int, stop: int) -> Run:
        """The part of the run in [start, stop) of the prompt, at least one token."""
        start, stop = max(start, self.start), min(stop, self.stop)
        assert start < stop
        first = self.span.start - self.start
        return Run(start, StoredSpan(self.span.segment, start + first, stop + first))


@dataclasses.dataclass(frozen=True, slots=True)
class FoundRuns:
    """The runs of a prompt of `num_tokens` from `start` on, in order and without overlap.

    They hold while the index has this version; None: more may become readable at any moment.
    """

    num_tokens: int
    start: int
    version: int | None
    runs: tuple[Run, ...]

    def meet(self, starts: Indices, length: int) -> Flags:
        """Which of the windows of `length` tokens that begin at `starts` have a token of a run.

        `starts` int64 [w]; returns bool [w].
        """
        if not self.runs:
            return np.zeros(len(starts), np.bool_)
        begins, stops = np.array([(run.start, run.stop) for run in self.runs]).T
        # Of the runs that begin before a window ends, the last one ends last.
        last = np.searchsorted(begins, starts + length) - 1
        meets: Flags = (last >= 0) & (stops[last] > starts)
        return meets


class ContentIndex:
    """Windows of the exact segments of a tree; not thread-safe, the tree's thread owns it."""

    def __init__(self) -> None:
        # Imported here, so that these loops are compiled only where tokens are found by content.
        from impress_sglang.loops import windows

        self._loops = windows
        # Keeps anybody from sending text whose windows all fall into one place of the table.
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._segments: dict[int, StoredSegment] = {}
        self._numbers: dict[str, int] = {}
        # Counts changes, and gives numbers to segments.
        self._version = 0
        self._keys, self._table = windows.empty_table(_LEAST_PLACES)
        # How many places of the table are taken, also by windows that are gone.
        self._used = 0
        # The values of the window that was found last.
        self._found = np.zeros(SAME_WINDOWS, np.int64)

    def __len__(self) -> int:
        """How many windows can be found."""
        return int(np.count_nonzero(self._table >= 0))

    def add(self, segment: StoredSegment) -> None:
        """Index the windows of a segment, if it is exact."""
        if segment.info.quality != EXACT or segment.info.num_tokens < WINDOW_TOKENS:
            return
        self._version = number = self._version + 1
        self._segments[number] = segment
        self._numbers[segment.segment_id] = number
        self._put(*self._windows_of(segment, number))

    def discard(self, segment: StoredSegment) -> None:
        """Forget a segment, if it is there."""
        number = self._numbers.pop(segment.segment_id, None)
        if number is None:
            return
        keys, values = self._windows_of(segment, number)
        self._loops.remove_all(self._keys, self._table, keys, values)
        del self._segments[number]
        self._version += 1

    def rename(self, old_id: str, new_id: str) -> None:
        """Rename a segment, if it is there; its tokens stay the same."""
        if (number := self._numbers.pop(old_id, None)) is not None:
            self._numbers[new_id] = number

    def find(
        self,
        namespace: str,
        tokens: Tokens,
        start: int = 0,
        kept: FoundRuns | None = None,
        *,
        only_ready: bool = True,
    ) -> FoundRuns:
        """The runs of a prompt, from `start` on.

        A run extends until the segment ends or the tokens differ, in both directions; where several
        segments have a window, the longest run is taken. The time is linear in the tokens scanned,
        whatever they are.

        Args:
            namespace: namespace of the prompt, as segments have it.
            tokens: tokens of the prompt.
            start: where to begin.
            kept: what was found in this prompt before; it is returned if it still holds.
            only_ready: leave out segments that cannot be read now.
        """
        if kept is not None and self._holds(kept, len(tokens), start):
            return kept
        tokens, seed = np.ascontiguousarray(tokens), self._seed_of(namespace)
        runs: list[Run] = []
        first = position = start
        vain = 0
        while True:
            position, count = self._loops.find_window(
                tokens, position, WINDOW_TOKENS, seed, self._found, self._keys, self._table
            )
            if position < 0:
                version = None if vain else self._version
                return FoundRuns(len(tokens), start, version, tuple(runs))
            run = self._longest(namespace, tokens, first, position, count, only_ready)
            if run is None:
                # In periodic text, a segment that is not ready may match at every place.
                vain += 1
                position += min(vain, WINDOW_TOKENS)
            else:
                runs.append(run)
                first = position = run.stop

    def check_integrity(self) -> None:
        """Compare the table with the segments.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        assert sorted(self._numbers.values()) == sorted(self._segments)
        for segment_id, number in self._numbers.items():
            assert self._segments[number].segment_id == segment_id
        taken = self._table[self._table >= 0]
        assert len(np.unique(taken)) == len(taken) <= self._used <= len(self._table) // 2
        assert np.count_nonzero(self._table != self._loops.EMPTY) == self._used
        left = self._table.copy()
        for number, segment in self._segments.items():
            self._loops.remove_all(self._keys, left, *self._windows_of(segment, number))
        assert not (left >= 0).any(), "some are out of place, or of no segment"

    def _holds(self, kept: FoundRuns, num_tokens: int, start: int) -> bool:
        same = (kept.num_tokens, kept.start, kept.version) == (num_tokens, start, self._version)
        return same and all(run.span.segment.ready for run in kept.runs)

    def _longest(
        self,
        namespace: str,
        tokens: Tokens,
        first: int,
        position: int,
        count: int,
        only_ready: bool,
    ) -> Run | None:
        """The longest run around a window that was found `count` times; not before `first`."""
        best, longest, now = None, 0, time.time()
        for value in self._found[:count].tolist():
            segment = self._segments[value >> _WINDOW_BITS]
            # The seed keeps namespaces apart; this does so even where hashes are equal.
            if segment.info.namespace != namespace or (only_ready and not segment.may_be_read(now)):
                continue
            start = (value & _WINDOW_MASK) * WINDOW_TOKENS
            own = np.ascontiguousarray(segment.info.tokens)
            before, after = self._loops.equal_around(tokens, first, position, own, start)
            if after >= WINDOW_TOKENS and before + after > longest:
                best, longest = (segment, start, before, after), before + after
        if best is None:
            return None
        segment, start, before, after = best
        return Run(position - before, StoredSpan(segment, start - before, start + after))

    def _windows_of(self, segment: StoredSegment, number: int) -> tuple[Words, Indices]:
        """Keys and values of the windows of a segment with this number."""
        tokens = np.ascontiguousarray(segment.info.tokens, dtype=np.int32)
        seed = self._seed_of(segment.info.namespace)
        keys = self._loops.window_keys(tokens, WINDOW_TOKENS, seed)
        return keys, (number << _WINDOW_BITS) + np.arange(len(keys), dtype=np.int64)

    def _put(self, keys: Words, values: Indices) -> None:
        """Put windows into the table; at most half of its places are used."""
        if 2 * (self._used + len(keys)) > len(self._table):
            taken = self._table >= 0
            old_keys, old_values = self._keys[taken], self._table[taken]
            self._used, places = 0, _LEAST_PLACES
            while places < 4 * (len(old_keys) + len(keys)):
                places *= 2
            self._keys, self._table = self._loops.empty_table(places)
            self._put(old_keys, old_values)
        self._used += self._loops.put_all(self._keys, self._table, keys, values, SAME_WINDOWS)

    def _seed_of(self, namespace: str) -> np.uint64:
        digest = hashlib.blake2b(namespace.encode(), key=self._secret, digest_size=8).digest()
        return np.frombuffer(digest, np.uint64)[0]
