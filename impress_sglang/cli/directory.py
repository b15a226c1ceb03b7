"""Commands on a directory of stores that no server uses; each store is locked meanwhile.

Commands that change a store open it as a server does, and use the same code. Limits that a server's
flags set do not apply here: the next server removes segments beyond its quota.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from impress_sglang.cli import CommandError, Unreachable
from impress_sglang.config import ImpressConfig
from impress_sglang.errors import ConfigError, PrefixUnreadable, StoreInUseError
from impress_sglang.storage.directory import (
    StoreDirectory,
    format_of,
    is_store,
    quarantined_files,
    remove_store,
    segment_files,
)
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import FORMAT_VERSION, OpenSegment, SegmentInfo, Tokens
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.journal import Journal
from impress_sglang.store.orders import Purge
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS, namespace_text
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredSegment

FILES = FileSystem()
# Long, because no request waits for the disk.
PATIENCE_S = 3600.0
_UNBOUNDED_GB = 1e9
# Any shape will do, because no KVs are read or written.
_SHAPE = KVShape(1, 1, 1, 4, 4, torch.float16, ())

Row: TypeAlias = dict[str, Any]
Selection: TypeAlias = Mapping[str, Any]
"""The body of an order to a server, or `segment`, the last segment of a prefix."""


def stat(root: Path) -> list[Row]:
    rows = []
    for path in stores_in(root):
        with _locked(path):
            sizes, entries = _sizes(path), _entries(path)
            row: Row = {"store": path.name, "segments": len(sizes), "bytes": sum(sizes)}
            row["quarantined"] = len(quarantined_files(FILES, path))
            row["tokens"] = sum(len(segment.info.prompt_tokens) for segment in entries)
            rows.append(row)
    return rows


def ls(root: Path) -> list[Row]:
    rows = []
    for path in stores_in(root):
        with _locked(path):
            entries = _entries(path)
        entries.sort(key=lambda segment: (-segment.last_access, segment.segment_id))
        for segment in entries:
            row = {
                "store": path.name,
                "segment": segment.segment_id,
                "namespace": segment.info.namespace,
                "from_token": segment.info.prefix_len,
                "tokens": len(segment.info.prompt_tokens),
                "bytes": segment.file_bytes,
                "hits": segment.hits,
                "priority": segment.info.priority.name.lower(),
                "exact": not segment.info.quality.depth,
            }
            rows.append(row)
    return rows


def verify(root: Path) -> list[Row]:
    """Return damaged files. Reads every file of this format completely, and changes none."""
    damaged = []
    for path in stores_of_this_format(root):
        with _locked(path):
            for name, file, finished in segment_files(FILES, path):
                try:
                    if finished:
                        check_file(Path(file))
                except PrefixUnreadable as error:
                    damaged.append({"store": path.name, "segment": name, "error": str(error)})
    return damaged


def clear(root: Path) -> list[Row]:
    removed = stat(root)
    for path in stores_in(root):
        _remove(path)
    return removed


def gc(root: Path) -> list[Row]:
    """Remove files that cannot be used.

    These are the files that each start of a server removes, and two kinds that it keeps: files in
    quarantine, and whole stores of older formats.
    """
    paths, rows = stores_in(root), []
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(_locked(path))
    for path in paths:
        before, after = _sizes(path, all_files=True), list[int]()
        if format_of(FILES, path) < FORMAT_VERSION:
            _remove(path)
        else:
            if format_of(FILES, path) == FORMAT_VERSION:
                with opened(path, keeps_orphans=False) as store:
                    store.expire(time.time(), len(store.tree))
                for file in quarantined_files(FILES, path):
                    FILES.unlink(file)
            after = _sizes(path, all_files=True)
        removed = {"files": len(before) - len(after), "bytes": sum(before) - sum(after)}
        rows.append({"store": path.name, **removed})
    return rows


def order(root: Path, verb: str, selection: Selection) -> list[Row]:
    """Run `pin`, `unpin` or `purge` in all stores of this format that have the prefix."""
    age = selection.get("older_than")
    if age is not None and not 0 <= age < math.inf:
        raise CommandError(f"--older-than must be a number of seconds, got {age}")
    with contextlib.ExitStack() as stack:
        stores = dict[str, tuple[PrefixStore, Any]]()
        for path in stores_of_this_format(root):
            store = stack.enter_context(opened(path))
            if (target := target_of(store, selection)) is not None:
                stores[path.name] = store, target
        if not stores:
            raise CommandError(f"there is no segment {selection['segment']}")
        if verb == "unpin":
            counts = {name: store.pins.unpin(*target) for name, (store, target) in stores.items()}
            return [{"store": name, "unpinned": count} for name, count in counts.items()]
        if verb == "purge":
            return [{"store": name, **_purge(*stores[name], age)} for name in stores]
        refusals = {name: store.pins.pin(*target) for name, (store, target) in stores.items()}
        if None not in refusals.values():
            raise CommandError("; ".join(map(str, refusals.values())))
        pinned = [name for name, refusal in refusals.items() if refusal is None]
        return [{"store": name, **stores[name][0].pins.summary()} for name in pinned]


def stores_in(root: Path) -> list[Path]:
    """Return the folders of all stores, one per model, in an `--impress-ssd-dir`."""
    try:
        stores = [root / name for name in FILES.list(root) if is_store(FILES, root / name)]
    except OSError as error:
        raise Unreachable(f"{root} cannot be read: {error}") from error
    if not stores:
        raise Unreachable(f"there is no store in {root}")
    return stores


def stores_of_this_format(root: Path) -> list[Path]:
    """Like `stores_in`, for commands to which what another version has stored seems damaged; some
    would set it aside."""
    stores = [path for path in stores_in(root) if format_of(FILES, path) == FORMAT_VERSION]
    if not stores:
        raise Unreachable(f"there is no store of this version in {root}")
    return stores


@contextlib.contextmanager
def opened(path: Path, *, keeps_orphans: bool = True) -> Iterator[PrefixStore]:
    config = ImpressConfig(
        ssd_dir=str(path.parent),
        ssd_gb=_UNBOUNDED_GB,
        policy="as",
        device_gb=0.0,
        host_gb=0.0,
        io_timeout=PATIENCE_S,
    )
    with _locked(path) as directory:
        disk = StoreDisk(config, directory.identity, FILES, directory, keeps_orphans=keeps_orphans)
        store = PrefixStore(config, directory.identity, _SHAPE, files=FILES, disk=disk)
        with contextlib.closing(store):
            yield store
    if (health := store.health.summary())["state"] != "ok":
        raise Unreachable(f"not everything was done, {health['last_failure']}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[StoreDirectory]:
    """Lock a store, so that no server opens it."""
    try:
        with contextlib.closing(StoreDirectory(FILES, path.parent, path.name)) as directory:
            yield directory
    except StoreInUseError as error:
        raise _in_use(path) from error
    except (ConfigError, OSError) as error:
        raise Unreachable(f"{path} cannot be opened: {error}") from error


def _in_use(path: Path) -> Unreachable:
    return Unreachable(f"{path} serves a running server: ask that, with --url")


def check_file(path: Path) -> SegmentInfo:
    """Read and verify a whole segment file.

    Raises:
        PrefixUnreadable: it is damaged.
    """
    with contextlib.closing(OpenSegment(path, FILES, direct=False)) as segment:
        segment.check_all()
        return segment.info


def target_of(store: PrefixStore, selection: Selection) -> tuple[str | None, Tokens | None] | None:
    """Return the namespace's name and the tokens, each None for all; None if `selection` names a
    segment that is not stored here."""
    if "segment" in selection:
        segment = store.tree.get(selection["segment"])
        return None if segment is None else (segment.info.namespace, segment.prompt())
    if "text" in selection:
        raise CommandError("a directory has no tokenizer: give --ids or --segment")
    if "all" in selection:
        return None, None
    name = store.namespace(namespace_in(selection))
    if "input_ids" in selection:
        ids = selection["input_ids"]
        whole = len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
        if not whole or not all(0 <= token < 2**31 for token in ids):
            raise CommandError(f"a prefix has at least {BLOCK_TOKENS} tokens, ids from 0 to 2^31")
        return name, np.array(ids[:whole], np.int32)
    if not {"extra_key", "cache_salt"} & selection.keys():
        raise CommandError("which prefix? give --ids, --segment, --extra-key or --older-than")
    return name, None


def namespace_in(selection: Selection) -> str:
    """Return the namespace that `selection` names, as plain text."""
    return namespace_text(*(selection.get(name) or None for name in ("extra_key", "cache_salt")))


def _purge(store: PrefixStore, target: Any, age: float | None) -> Row:
    namespace, tokens = target
    purge, counts = Purge(namespace, tokens, age), Counter[str]()
    while purge.unfinished:
        counts += purge.step(store, len(store.tree))
    # Removes what has no place in the tree.
    store.poll()
    return {name: counts[name] for name in ("segments", "tokens", "bytes", "unpinned")}


def _remove(path: Path) -> None:
    try:
        removed = remove_store(FILES, path)
    except OSError as error:
        raise Unreachable(f"{path} cannot be removed: {error}") from error
    if not removed:
        raise _in_use(path)


def _sizes(path: Path, *, all_files: bool = False) -> list[int]:
    """Return the bytes of each segment file; `all_files` includes files in quarantine."""
    files = (file for _, file, _ in segment_files(FILES, path))
    quarantined = quarantined_files(FILES, path) if all_files else ()
    return [FILES.stat(file).st_size for file in (*files, *quarantined)]


def _entries(path: Path) -> list[StoredSegment]:
    return list(Journal(FILES, path).segments().values())
