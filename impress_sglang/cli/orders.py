"""Orders about prefixes in a directory that no server uses.

A store is opened as a server opens it, and the same code changes it. Limits that are set by a
server's flags do not apply here: the next server removes what exceeds its quota.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from impress_sglang.cli.outcome import Refused, Unreachable
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ConfigError, SegmentUnreadable, StoreInUseError, StoreUnavailable
from impress_sglang.storage.directory import segment_files
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import Tokens, read_header
from impress_sglang.store.health import Health
from impress_sglang.store.losses import prompt_of
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS, namespace_text
from impress_sglang.store.purging import Purge
from impress_sglang.store.store import PrefixStore

# So long, because no request waits for the disk.
PATIENCE_S = 3600.0
_UNBOUNDED_GB = 1e9
# The shape for a store without segments, in which nothing is read or written.
_NO_SHAPE = KVShape(1, 1, 1, 4, 4, torch.float16, ())


@contextlib.contextmanager
def opened(files: FileSystem, path: Path, shape: KVShape | None = None) -> Iterator[PrefixStore]:
    """Open the store in a folder, and close it in the end; `shape`: None for its segments' shape.

    Raises:
        Unreachable: a server uses it, it cannot be opened, or its disk failed an operation.
    """
    config = ImpressConfig(
        ssd_dir=str(path.parent),
        ssd_gb=_UNBOUNDED_GB,
        policy="as",
        device_gb=0.0,
        host_gb=0.0,
        io_timeout=PATIENCE_S,
    )
    try:
        store = PrefixStore(config, path.name, shape or _shape_in(files, path), files=files)
    except StoreInUseError as error:
        raise in_use(path) from error
    except (ConfigError, OSError) as error:
        raise Unreachable(f"{path} cannot be opened: {error}") from error
    try:
        yield store
    finally:
        store.close()
    check_done(store.health)


def check_done(health: Health) -> None:
    """Check that the disk has done all that was ordered.

    Raises:
        Unreachable: it failed something.
    """
    found = health.summary()
    if found["state"] != "ok":
        raise Unreachable(f"not everything was done, {found['last_failure']}")


def in_use(path: Path) -> Unreachable:
    """The error for a store that is locked."""
    return Unreachable(f"{path} serves a running server: ask that, with --url")


def carry_out(
    verb: str, which: Mapping[str, Any], stores: Mapping[str, PrefixStore]
) -> list[dict[str, Any]]:
    """`pin`, `unpin` or `purge` prefixes in all stores that have them.

    `which`: the body of an order to a server, or `segment`, the last segment of a prefix.

    Raises:
        Refused: it names no prefix, or none that can be pinned.
    """
    places = {name: place_of(store, which) for name, store in stores.items()}
    found = {name: place for name, place in places.items() if place is not None}
    if not found:
        raise Refused(f"there is no segment {which['segment']}")
    if verb == "pin":
        return _pin(found, stores)
    if verb == "unpin":
        return [{"store": n, "unpinned": stores[n].pins.unpin(*found[n])} for n in found]
    return [{"store": n, **_purge(stores[n], *found[n], which.get("older_than"))} for n in found]


def place_of(
    store: PrefixStore, which: Mapping[str, Any]
) -> tuple[str | None, Tokens | None] | None:
    """The namespace's name and the tokens that are meant, each None for all; None: not stored here.

    Raises:
        Refused: `which` does not say what is meant.
    """
    if "segment" in which:
        segment = store.tree.get(which["segment"])
        return None if segment is None else (segment.info.namespace, prompt_of(segment))
    if "text" in which:
        raise Refused("a directory has no tokenizer: give --ids or --segment")
    if "all" in which:
        return None, None
    name = store.namespace(namespace_in(which))
    if "input_ids" in which:
        ids = which["input_ids"]
        whole = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
        if not whole or not all(0 <= own < 2**31 for own in ids):
            raise Refused(f"a prefix has at least {BLOCK_TOKENS} tokens, ids from 0 to 2^31")
        return name, np.array(ids[:whole], np.int32)
    if not {"extra_key", "cache_salt"} & which.keys():
        raise Refused("which prefix? give --ids, --segment, --extra-key or --older-than")
    return name, None


def namespace_in(which: Mapping[str, Any]) -> str:
    """The namespace that `which` names, as plain text."""
    return namespace_text(*(which.get(name) or None for name in ("extra_key", "cache_salt")))


def _pin(found: Mapping[str, Any], stores: Mapping[str, PrefixStore]) -> list[dict[str, Any]]:
    refusals = {name: stores[name].pins.pin(*place) for name, place in found.items()}
    pinned = [name for name, refusal in refusals.items() if refusal is None]
    if not pinned:
        raise Refused("; ".join(str(refusal) for refusal in refusals.values()))
    return [{"store": name, **stores[name].pins.summary()} for name in pinned]


def _purge(
    store: PrefixStore, namespace: str | None, tokens: Tokens | None, age: float | None
) -> dict[str, Any]:
    purge, counts = Purge(namespace, tokens, age), Counter[str]()
    while purge.left:
        done = purge.step(store, len(store.tree))
        counts["segments"] += len(done.segment_ids)
        counts["tokens"] += done.tokens
        counts["bytes"] += done.bytes
        counts["unpinned"] += done.unpinned
    return dict(counts)


def _shape_in(files: FileSystem, path: Path) -> KVShape:
    for _, own, finished in segment_files(files, path):
        with contextlib.suppress(SegmentUnreadable, StoreUnavailable):
            if finished:
                return read_header(Path(own), files).info.shape
    return _NO_SHAPE
