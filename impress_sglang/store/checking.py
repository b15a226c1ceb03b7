"""Checks that the parts of a store agree: at once for tests, in steps on a server.

Between two steps requests are served, and everything may change. So a step checks what must hold
for a segment by itself and with its neighbours in the tree, and sums that are kept anyway. Only the
whole check adds everything up: how many segments build on each, in which order they were used, and
to which chunks pages belong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.memory import StoreMemory
from impress_sglang.store.quota import Quota
from impress_sglang.store.stored import SegmentState, StoredSegment
from impress_sglang.store.versions import SegmentVersions
from impress_sglang.store.writing import SegmentWrites
from impress_sglang.tiers.placement import CACHES

# The most that one step checks.
SEGMENTS = 8
CHUNKS = 1024


class StoreChecks:
    """The checks of one store; its thread owns them."""

    def __init__(
        self,
        disk: StoreDisk,
        writes: SegmentWrites,
        quota: Quota,
        versions: SegmentVersions,
        memory: StoreMemory,
    ) -> None:
        """Begin with nothing checked."""
        self._tree = disk.tree
        self._writes = writes
        self._quota = quota
        self._health = disk.health
        self._versions = versions
        self._caches = memory.cache, memory.codes

    def check_integrity(self) -> None:
        """Compare everything at once.

        Raises:
            AssertionError: parts differ, which is a bug.
        """
        self._tree.check_integrity()
        segments = list(self._tree.segments())
        self._check(segments)
        suspects = sum(own.state is SegmentState.SUSPECT for own in segments)
        assert suspects == len(self._health.suspects)
        self._versions.check_integrity(own.segment_id for own in segments if own.on_disk)

    def steps(self) -> Iterator[None]:
        """Compare a little for each item taken; anything may happen between two of them.

        At the end, all segments that were there the whole time have been checked.

        Raises:
            AssertionError: as for `check_integrity`.
        """
        segments = list(self._tree.segments())
        for first in range(0, len(segments), SEGMENTS):
            own = segments[first : first + SEGMENTS]
            self._check(one for one in own if self._tree.get(one.segment_id) is one)
            yield
        for cache in self._caches:
            for tier in CACHES:
                first = 0
                while cache.check_some(tier, first, CHUNKS):
                    first += CHUNKS
                    yield

    def _check(self, segments: Iterable[StoredSegment]) -> None:
        """Compare some segments of the tree, and sums, with other parts of the store."""
        pending = dict(self._writes)
        assert self._quota.pending_bytes == sum(pending.values())
        assert self._quota.used_bytes == self._tree.file_bytes
        for segment in segments:
            self._tree.check(segment)
            self._versions.check(segment.segment_id)
            state = segment.state
            assert (state is SegmentState.PENDING) == (segment in pending)
            assert (state is SegmentState.SUSPECT) == (segment.segment_id in self._health.suspects)
