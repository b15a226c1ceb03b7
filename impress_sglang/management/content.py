"""Finds stored tokens anywhere in a prompt: the windows of all exact segments, by their content.

A segment's tokens are cut into windows of 64 from its start on. A prompt is scanned once; a window
of it that is known is compared with the segment token by token, and the run of equal tokens is
extended both ways. So whatever is at least 127 tokens long and stored is found, wherever it stands.
A hash decides nothing, and namespaces have keys of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import numpy.typing as npt

from impress_sglang.loops.types import Indices, Words
from impress_sglang.loops.windows import (
    EMPTY,
    find_window,
    next_slot,
    put_all,
    remove_all,
    window_keys,
)
from impress_sglang.management.stored import StoredSegment, StoredSpan
from impress_sglang.storage.quality import EXACT
from impress_sglang.storage.segment import Tokens

WINDOW_TOKENS = 64
# Equal windows that are kept, in different segments or in one; what is everywhere need not be
# found everywhere.
SAME_WINDOWS = 4
# A value is the number of a segment, and in these lower bits that of a window.
_WINDOW_BITS = 32
_LEAST_SLOTS = 1 << 12


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Tokens of a prompt from `start` on that are those of a span."""

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
        """How far from their old place its tokens stand."""
        return self.start - self.span.segment.info.prefix_len - self.span.start

    def part(self, start: int, stop: int) -> Run:
        """Those of its tokens that stand in [start, stop) of the prompt, at least one."""
        start, stop = max(start, self.start), min(stop, self.stop)
        assert start < stop
        first = self.span.start - self.start
        return Run(start, StoredSpan(self.span.segment, start + first, stop + first))


class ContentIndex:
    """Windows of the exact segments of a tree; not thread-safe, the tree's thread owns it."""

    def __init__(self) -> None:
        self._segments: list[StoredSegment | None] = []
        self._free: list[int] = []
        self._numbers: dict[str, int] = {}
        # Slots that are not empty.
        self._taken = 0
        self._keys: Words
        self._values: Indices
        self._clear(_LEAST_SLOTS)

    def __len__(self) -> int:
        """Windows that can be found."""
        return int((self._values >= 0).sum())

    @property
    def num_bytes(self) -> int:
        """Of the table."""
        return self._keys.nbytes + self._values.nbytes

    def add(self, segment: StoredSegment) -> None:
        """Index the windows of a segment, if it is exact."""
        if segment.info.quality != EXACT or segment.info.num_tokens < WINDOW_TOKENS:
            return
        number = self._free.pop() if self._free else len(self._segments)
        if number == len(self._segments):
            self._segments.append(None)
        self._segments[number] = segment
        self._numbers[segment.segment_id] = number
        keys, values = _windows_of(segment, number)
        self._make_room(len(keys))
        self._taken += put_all(self._keys, self._values, keys, values, SAME_WINDOWS)

    def discard(self, segment: StoredSegment) -> None:
        """Forget a segment, if it is there."""
        number = self._numbers.pop(segment.segment_id, None)
        if number is None:
            return
        keys, values = _windows_of(segment, number)
        remove_all(self._keys, self._values, keys, values)
        self._segments[number] = None
        self._free.append(number)

    def rename(self, old_id: str, new_id: str) -> None:
        """A segment has another name, and the same tokens."""
        if (number := self._numbers.pop(old_id, None)) is not None:
            self._numbers[new_id] = number

    def find(self, namespace: str, tokens: Tokens, start: int = 0) -> list[Run]:
        """The runs of a prompt that can be read, from `start` on: apart, in their order.

        A run begins and ends where its segment does, or other tokens follow; where several segments
        have a window, the longest one is taken.

        Args:
            namespace: of the prompt, as segments have it.
            tokens: of it.
            start: where to begin.
        """
        tokens, seed = np.ascontiguousarray(tokens), _seed_of(namespace)
        runs: list[Run] = []
        first = position = start
        while True:
            position, slot = find_window(
                tokens, position, WINDOW_TOKENS, seed, self._keys, self._values
            )
            if position < 0:
                return runs
            run = self._longest(namespace, tokens, first, position, slot)
            if run is None:
                position += 1
            else:
                runs.append(run)
                first = position = run.stop

    def check_integrity(self) -> None:
        """Compare the table with the segments.

        Raises:
            AssertionError: they differ, which is a bug.
        """
        found = self._values[self._values >= 0]
        assert self._taken == int((self._values != EMPTY).sum()) < len(self._values)
        assert len(np.unique(found)) == len(found)
        for segment_id, number in self._numbers.items():
            segment = self._segments[number]
            assert segment is not None and segment.segment_id == segment_id
        assert len(self._numbers) + len(self._free) == len(self._segments)
        numbers = np.unique(found >> _WINDOW_BITS)
        assert all(self._segments[int(number)] is not None for number in numbers)

    def _longest(
        self, namespace: str, tokens: Tokens, first: int, position: int, slot: int
    ) -> Run | None:
        """The longest run around a window whose key has this slot; it begins after `first`."""
        best: Run | None = None
        key = self._keys[slot]
        while slot >= 0:
            run = self._run_at(namespace, tokens, first, position, int(self._values[slot]))
            if run is not None and (best is None or len(run) > len(best)):
                best = run
            slot = next_slot(self._keys, self._values, key, slot)
        return best

    def _run_at(
        self, namespace: str, tokens: Tokens, first: int, position: int, value: int
    ) -> Run | None:
        segment = self._segments[value >> _WINDOW_BITS]
        assert segment is not None
        if not segment.ready or segment.info.namespace != namespace:
            return None
        own = segment.info.tokens
        start = (value & ((1 << _WINDOW_BITS) - 1)) * WINDOW_TOKENS
        after = _equal(own[start:], tokens[position:])
        if after < WINDOW_TOKENS:
            return None
        before = _equal(own[:start][::-1], tokens[first:position][::-1])
        return Run(position - before, StoredSpan(segment, start - before, start + after))

    def _make_room(self, windows: int) -> None:
        """See that a table with so many more is at most half full."""
        if 2 * (self._taken + windows) <= len(self._values):
            return
        kept = self._values >= 0
        keys, values = self._keys[kept], self._values[kept]
        slots = _LEAST_SLOTS
        while slots < 3 * (len(keys) + windows):
            slots *= 2
        self._clear(slots)
        # All of them have a place, in whatever order they come.
        self._taken = put_all(self._keys, self._values, keys, values, SAME_WINDOWS)

    def _clear(self, slots: int) -> None:
        self._keys = np.zeros(slots, np.uint64)
        self._values = np.full(slots, EMPTY, np.int64)


def _windows_of(segment: StoredSegment, number: int) -> tuple[Words, Indices]:
    """Keys and values of the windows of a segment with this number."""
    tokens = np.ascontiguousarray(segment.info.tokens, dtype=np.int32)
    keys = window_keys(tokens, WINDOW_TOKENS, _seed_of(segment.info.namespace))
    return keys, (number << _WINDOW_BITS) + np.arange(len(keys), dtype=np.int64)


def _seed_of(namespace: str) -> np.uint64:
    digest = hashlib.blake2b(namespace.encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint64)[0]


def _equal(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    return int(different.argmax()) if different.any() else length
