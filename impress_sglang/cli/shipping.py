"""Moves prefixes from one store to others: `impress export` and `impress import`.

Imported prefixes are offered to the store like those that a server has computed: the same writer
writes them, and what is stored already is not written again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from impress_sglang.cli.orders import namespace_in, place_of
from impress_sglang.cli.outcome import Refused, Unreachable
from impress_sglang.cli.prefix_file import Contents, Prefix, PrefixFile, write_file
from impress_sglang.config import ImpressConfig, bytes_of
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.storage.directory import segment_files
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import BLOCK_BYTES, KVShape, SegmentLayout
from impress_sglang.storage.open_segment import OpenSegment
from impress_sglang.storage.quality import ANYTHING
from impress_sglang.storage.writer import LayerReader
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.writing import Offer, StoreOutcome


def export_file(
    files: FileSystem, store: PrefixStore, folder: Path, which: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Write what `which` names into a new file; see `orders.place_of`.

    Without a prefix that is the whole namespace; with one, what is stored of the prefix and what
    that builds on.

    Raises:
        Refused: it is not stored, or cannot be read; or the file exists already.
        Unreachable: the file cannot be written.
    """
    chosen = _with_bases(_chosen(store, which))
    if not chosen:
        raise Refused("nothing of it is stored")
    numbers = {own: number for number, own in enumerate(chosen)}
    prefixes = [_prefix(own, numbers) for own in chosen]
    info = chosen[0].info
    if not info.shape.exact:
        raise Refused("exact KVs are exported, and a store of --impress-keep codes has none")
    contents = Contents.of(info.identity, info.shape, prefixes, namespace_in(which))
    paths = {name: Path(own) for name, own, _ in segment_files(files, folder)}
    sources = [
        functools.partial(OpenSegment, paths[own.segment_id], files, direct=False) for own in chosen
    ]
    try:
        num_bytes = write_file(files, path, contents, sources)
    except PrefixUnreadable as error:
        raise Refused(f"{error}, so nothing is exported: see impress verify") from error
    except OSError as error:
        raise Unreachable(f"{path} cannot be written: {error}") from error
    tokens = sum(own.info.num_tokens for own in chosen)
    return {"store": folder.name, "segments": len(chosen), "tokens": tokens, "bytes": num_bytes}


def import_file(
    store: PrefixStore, found: PrefixFile, which: Mapping[str, Any], free_bytes: int
) -> dict[str, Any]:
    """Store what is in a file but not in the store, without removing anything for it.

    `which` names the namespace; `free_bytes` are free on the file system.

    Raises:
        Refused: the file is of another namespace, or there is no room.
        Unreachable: the disk fails.
    """
    namespace, contents = namespace_in(which), found.contents
    if not contents.is_of(namespace):
        raise Refused("it belongs to another namespace: give its --extra-key and --cache-salt")
    now, name = time.time(), store.namespace(namespace)
    new = [
        (number, own)
        for number, own in enumerate(contents.prefixes)
        if not 0 < own.expires <= now
        and store.tree.match(name, found.prompt(number), least=own.quality).num_tokens
        < own.start + own.num_tokens
    ]
    needed = sum(_file_bytes(contents.shape, own) for _, own in new)
    left = free_bytes - bytes_of(ImpressConfig().min_free_gb)
    if new and needed > left:
        raise Refused(f"it takes {needed / 1e9:.3f} GB, and {max(left, 0) / 1e9:.3f} GB are free")
    for number, own in new:
        _store(store, found, number, own, namespace)
    written = store.stats
    if written.segments_failed:
        raise Unreachable(f"{written.segments_failed} segments could not be written")
    return {
        "store": contents.identity,
        "segments": written.segments_written,
        "known": len(contents.prefixes) - len(new),
        "bytes": written.bytes_written,
    }


def _store(store: PrefixStore, found: PrefixFile, number: int, own: Prefix, namespace: str) -> None:
    def read_from(start: int) -> LayerReader:
        return lambda layer: found.layer(number, layer, start - own.start)

    offer = Offer(
        found.prompt(number),
        read_from,
        on_done=_nothing,
        abandon=_nothing,
        min_tokens=1,
        quality=own.quality,
        available_from=own.start,
        coding=lambda start: found.coding(number, start - own.start),
        ttl=max(own.expires - time.time(), 1.0) if own.expires else 0.0,
        priority=own.priority,
    )
    outcome = store.writes.offer(namespace, offer)
    store.writes.drain()
    if outcome in (StoreOutcome.NO_SPACE, StoreOutcome.UNAVAILABLE):
        raise Unreachable(f"segment {number} of the file could not be stored: {outcome.value}")


def _nothing() -> None:
    """Do nothing: no slots are held for the offer."""


def _chosen(store: PrefixStore, which: Mapping[str, Any]) -> list[StoredSegment]:
    """The segments of a prefix, or of a namespace."""
    # If no namespace is named, that of requests without one is meant.
    place = place_of(store, {"extra_key": None, **which})
    if place is None:
        raise Refused(f"there is no segment {which['segment']}")
    name, tokens = place
    if name != store.namespace(namespace_in(which)):
        raise Refused("it belongs to another namespace: give its --extra-key and --cache-salt")
    if tokens is None:
        return list(store.tree.below(name))
    match = store.tree.match(name, tokens, least=ANYTHING)
    if match.num_tokens < len(tokens):
        raise Refused(f"{match.num_tokens} of its {len(tokens)} tokens are stored")
    return [span.segment for span in match.spans]


def _with_bases(segments: Iterable[StoredSegment]) -> list[StoredSegment]:
    """These segments and all that they build on, the latter first."""
    found: dict[StoredSegment, None] = {}
    for segment in segments:
        own: StoredSegment | None = segment
        while own is not None and own not in found:
            found[own] = None
            own = own.parent
    return sorted(found, key=lambda own: own.info.prefix_len)


def _prefix(segment: StoredSegment, numbers: Mapping[StoredSegment, int]) -> Prefix:
    info = segment.info
    above = -1 if segment.parent is None else numbers[segment.parent]
    size = info.num_tokens, info.prefix_len
    return Prefix(*size, above, info.quality, info.expires, info.priority)


def _file_bytes(shape: KVShape, own: Prefix) -> int:
    chunk_tokens = ImpressConfig().chunk_tokens
    return SegmentLayout(shape, chunk_tokens, own.num_tokens, BLOCK_BYTES).file_bytes
