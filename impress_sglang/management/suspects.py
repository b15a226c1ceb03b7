"""Segments that could not be read, until a second look has decided about them.

That a block cannot be read now does not mean that it is damaged, and a block that was read wrong
once may be right on the disk. So nothing is removed at first sight: the whole segment is read again
in the background, and again after a pause that doubles as long as it cannot be read at all. If it
cannot be read time and again while the rest of the disk answers, it is behind a bad sector.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future

from impress_sglang.management.keeper import Keeper, Verdict
from impress_sglang.management.stored import SegmentState, StoredSegment

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 600.0
# With the pauses between them at least 15 seconds, by which a link that was reset is back.
MOST_LOOKS = 5


@dataclasses.dataclass(slots=True)
class _Suspect:
    segment: StoredSegment
    look_at: float
    pause: float
    looks: int = 0
    """Looks that could not read it although the disk answered."""
    look: Future[Verdict] | None = None


class SuspectSegments:
    """The suspects of one store; its thread owns them, and the keeper looks at them."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._suspects: dict[str, _Suspect] = {}

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, segment_id: str) -> bool:
        return segment_id in self._suspects

    def add(self, segment: StoredSegment) -> None:
        """Add a segment that could not be read; it is not used until it is found good."""
        assert segment.ready
        segment.state = SegmentState.SUSPECT
        self._suspects[segment.segment_id] = _Suspect(segment, time.monotonic(), FIRST_PAUSE_S)

    def hurry(self) -> None:
        """Look at all suspects now, because the disk answers again."""
        for suspect in self._suspects.values():
            suspect.look_at, suspect.pause = time.monotonic(), FIRST_PAUSE_S
            # Earlier looks may have failed because of the disk, and so may one that is running.
            suspect.looks = 0 if suspect.look is None else -1

    def forget(self, segment_id: str) -> None:
        """Forget a segment that has left the tree."""
        self._suspects.pop(segment_id, None)

    def poll(self) -> list[tuple[StoredSegment, Verdict]]:
        """Start due looks; returns the verdicts of ended ones. Good segments are ready again."""
        decided: list[tuple[StoredSegment, Verdict]] = []
        for segment_id, suspect in list(self._suspects.items()):
            if suspect.look is None:
                if time.monotonic() >= suspect.look_at:
                    suspect.look = self._keeper.look(suspect.segment.info)
            elif suspect.look.done():
                verdict = self._take(suspect)
                if verdict.decides:
                    del self._suspects[segment_id]
                    decided.append((suspect.segment, verdict))
        return decided

    def _take(self, suspect: _Suspect) -> Verdict:
        look, suspect.look = suspect.look, None
        assert look is not None
        # A look that failed for another reason says nothing about the segment.
        verdict = Verdict.UNCLEAR if look.exception() is not None else look.result()
        suspect.looks += verdict is Verdict.UNREADABLE
        if verdict is Verdict.GOOD:
            suspect.segment.state = SegmentState.READY
        elif verdict is Verdict.UNREADABLE and suspect.looks >= MOST_LOOKS:
            suspect.look = self._keeper.condemn(suspect.segment.info)
        elif not verdict.decides:
            suspect.look_at = time.monotonic() + suspect.pause
            suspect.pause = min(2 * suspect.pause, LONGEST_PAUSE_S)
        return verdict
