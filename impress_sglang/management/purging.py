"""What an operator wants to be forgotten: which segments that is, and their removal."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from impress_sglang.management.losses import Cause, prompt_of
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import StoredSegment
from impress_sglang.storage.segment import Tokens, common_prefix_len

# At once: who purges more does so in several steps, between which requests are served.
MOST_SEGMENTS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Purged:
    """What one step has removed; `bytes` are on SSD, `left` says that another step is needed."""

    segment_ids: tuple[str, ...]
    tokens: int
    bytes: int
    writes: int
    left: bool
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
    # Of all steps in the first one: they read what is to be freed.
    writes = [own for own, _ in store.writes if among is None and _begins(own, namespace, tokens)]
    going, left = list[StoredSegment](), False
    within = store.tree.below(namespace, tokens)
    if among is not None and tokens is None:
        # However many others there are.
        within = _named(store, namespace, among)
    elif among is not None:
        within = (own for own in within if own.segment_id in among)
    for segment in within:
        if segment.on_disk:
            if left := len(going) == most:
                break
            going.append(segment)
    # What builds on others before them.
    going.sort(key=lambda own: -own.info.prefix_len)
    given_up = store.writes.discard([*writes, *going], Cause.PURGED)
    return Purged(
        segment_ids=tuple(own.segment_id for own in going),
        tokens=sum(own.info.num_tokens for own in going),
        bytes=sum(own.file_bytes for own in going),
        writes=given_up,
        left=left,
        unpinned=unpinned,
    )


def _begins(segment: StoredSegment, namespace: str | None, tokens: Tokens | None) -> bool:
    """Whether a segment has the end of a prefix or something behind it."""
    if namespace not in (None, segment.info.namespace):
        return False
    return tokens is None or common_prefix_len(prompt_of(segment), tokens) == len(tokens)


def _named(
    store: PrefixStore, namespace: str | None, segment_ids: Iterable[str]
) -> Iterator[StoredSegment]:
    """Those of these that are still there, of a namespace or of all."""
    for segment_id in segment_ids:
        segment = store.tree.get(segment_id)
        if segment is not None and namespace in (None, segment.info.namespace):
            yield segment
