"""Tracks the exact prefixes that requests bring into SGLang's tree, where others find them.

Stage: admit. A request that would read what another one is about to bring waits for the other's
pass, so that the prefix is read once, and its slots are held once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from impress_sglang.serving.paper.admission import AdmissionPlan
from impress_sglang.serving.paper.request import StoredRequest
from impress_sglang.storage.quality import EXACT

Brought: TypeAlias = Mapping[str, int]
"""By segment id, the end of the segment's tokens that are brought."""
_NOTHING: Brought = {}


def brought_by(plan: AdmissionPlan) -> Brought:
    """What a plan brings into the tree: all that it loads if its prefix is whole and exact."""
    if plan.quality != EXACT:
        return _NOTHING
    return {span.segment.segment_id: span.stop for span in plan.spans}


def is_brought(plan: AdmissionPlan, brought: Brought) -> bool:
    """Whether at least half of what a plan loads is `brought` by another request.

    A request that shares less, such as a system prompt before another document, reads it again
    rather than wait for the other document. The tree shares whole pages only.
    """
    # Most requests bring nothing, and the quality is found by a look at all spans.
    if not brought or plan.quality != EXACT:
        return False
    shared = 0
    for span in plan.spans:
        stop = min(brought.get(span.segment.segment_id, 0), span.stop)
        shared += max(stop - span.start, 0)
        if stop < span.stop:
            break
    return 2 * (shared - shared % plan.page_size) >= plan.work.stored


def reads_for(plan: AdmissionPlan, other: AdmissionPlan) -> bool:
    """Whether the first plan's reads also serve the second one, in codes or exactly."""
    if other.covers:
        return plan.covers == other.covers
    return is_brought(other, brought_by(plan))


class Bringing:
    """What the live requests bring into the tree; owned by the scheduler's thread."""

    def __init__(self, live: Mapping[str, StoredRequest]) -> None:
        """`live`: the requests with a stored prefix, by id; read whenever it is asked."""
        self._live = live

    def serves(self, plan: AdmissionPlan) -> bool:
        """Whether the tree is about to have at least half of what a plan loads."""
        return any(
            is_brought(plan, request.brings)
            for request in self._live.values()
            if not (request.adopted or request.failed)
        )
