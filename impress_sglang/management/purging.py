"""What an operator wants to be forgotten: which segments that is, and their removal."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from impress_sglang.management.losses import Cause
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import SegmentState, StoredSegment
from impress_sglang.storage.segment import Tokens

# At once: who purges more does so in several steps, between which requests are served.
MOST_SEGMENTS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Purged:
    """What one step has removed; `bytes` are on SSD, `left` is how many segments others take."""

    segment_ids: tuple[str, ...]
    tokens: int
    bytes: int
    writes: int
    left: int
    unpinned: int


def purge(
    store: PrefixStore,
    namespace: str | None = None,
    tokens: Tokens | None = None,
    *,
    among: Collection[str] | None = None,
    most: int = MOST_SEGMENTS,
) -> Purged:
    """Remove what is stored of a prefix and of all that begins with it.

    Files are unlinked behind the caller, in order with writes. What is being written is given up,
    and removed where it is too late for that. Pins of what is removed are gone as well, and so is
    what stands in quarantine, of whatever it is.

    Args:
        store: to remove it from.
        namespace: as the store names it; None: all.
        tokens: the prefix, int32 [n], in a namespace; None: all of that.
        among: only these segments, and pins stay; None: all.
        most: segments of this step.
    """
    unpinned = store.pins.unpin(namespace, tokens) if among is None else 0
    found = _below(store, namespace, tokens)
    if among is not None:
        found = [own for own in found if own.segment_id in among]
    writes = [own for own in found if own.state is SegmentState.PENDING]
    stored = [own for own in found if own.on_disk]
    # What builds on others goes before them, so that no holes are left.
    stored.sort(key=lambda own: -own.info.prefix_len)
    going = stored[:most]
    purged = Purged(
        segment_ids=tuple(own.segment_id for own in going),
        tokens=sum(own.info.num_tokens for own in going),
        bytes=sum(own.file_bytes for own in going),
        writes=len(writes),
        left=len(stored) - len(going),
        unpinned=unpinned,
    )
    store.writes.discard([*writes, *going], Cause.PURGED)
    return purged


def _below(store: PrefixStore, namespace: str | None, tokens: Tokens | None) -> list[StoredSegment]:
    if namespace is None:
        return list(store.tree.segments())
    return store.tree.below(namespace, tokens)
