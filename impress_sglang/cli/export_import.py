"""Copies prefixes from one store to others: `impress export` and `impress import`.

The exported folder has segment files as they are in the store, and `CONTENTS`, written last, with
the parent of each. They are imported unchanged, except for the namespace, which each store names by
a key of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from impress_sglang.cli import CommandError, Unreachable
from impress_sglang.cli.directory import (
    FILES,
    Row,
    Selection,
    check_file,
    namespace_in,
    opened,
    stores_in,
    stores_of_this_format,
    target_of,
)
from impress_sglang.config import ImpressConfig, bytes_of
from impress_sglang.errors import PrefixUnreadable
from impress_sglang.storage.directory import identity_in
from impress_sglang.storage.files import AlignedMemory
from impress_sglang.storage.quality import ANYTHING
from impress_sglang.storage.segment import (
    SEGMENT_SUFFIX,
    OpenSegment,
    SegmentHeader,
    Tokens,
    encode_header,
)
from impress_sglang.storage.writer import publishing
from impress_sglang.store.prefix_hashes import prefix_digest
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree
from impress_sglang.store.unattached import UnattachedSegments

CONTENTS = "contents.json"
KIND = "impress-sglang prefixes"
# Latest plausible expiry, in seconds since the epoch.
_LATEST = 1 << 40
# Exceptions that malformed contents raise.
_DAMAGE = (
    *(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError),
    PrefixUnreadable,
)


def export(root: Path, selection: Selection, path: Path, name: str | None) -> Row:
    """Write the prefixes that `selection` names into a new folder; see `directory.target_of`.

    Without a prefix, exports the whole namespace; with one, its segments and all that they build
    on. `name`: the store, if there are several.
    """
    stores = {path.name: path for path in stores_of_this_format(root)}
    if name is None and len(stores) == 1:
        (name,) = stores
    if name not in stores:
        raise CommandError(f"which store? give --store, one of {', '.join(stores)}")
    if os.path.lexists(path):
        raise CommandError(f"{path} already exists")
    with opened(stores[name]) as store:
        segments = _selected(store, selection)
        if not segments:
            raise CommandError("nothing of it is stored")
        try:
            num_bytes = _write(path, namespace_in(selection), store, segments)
        except PrefixUnreadable as error:
            raise CommandError(f"{error}, so nothing is exported: see impress verify") from error
        except OSError as error:
            raise Unreachable(f"{path} cannot be written: {error}") from error
    tokens = sum(len(segment.info.prompt_tokens) for segment in segments)
    return {"store": name, "segments": len(segments), "tokens": tokens, "bytes": num_bytes}


def import_(root: Path, selection: Selection, path: Path) -> Row:
    """Store exported segments that are not stored here, without evicting any other.

    `selection` names the namespace. If there is no store at all, one is made. A segment whose
    tokens diverge inside a stored segment has no place in the tree: it and all that builds on it
    are left out.
    """
    namespace = namespace_in(selection)
    contents, exported = _read(path)
    first = next(exported.segments()).info
    if contents["namespace"] != _keyed(str(contents["key"]), namespace):
        raise CommandError("it belongs to another namespace: give its --extra-key and --cache-salt")
    with contextlib.suppress(Unreachable):
        names = [path.name for path in stores_in(root)]
        if first.identity not in names:
            raise CommandError(
                f"{path} is of the model identity {first.identity}, and here are stores of "
                f"{', '.join(names)} only: start its server here once"
            )
    with opened(root / first.identity) as store:
        now, name = time.time(), store.namespace(namespace)
        missing, copied, num_bytes = list[tuple[StoredSegment, Tokens]](), 0, 0
        for header in exported.segments():
            info, prompt = header.info, header.prompt()
            match = store.tree.match(name, prompt, min_quality=info.quality)
            if not 0 < info.expires <= now and match.num_tokens < len(prompt):
                parent_tokens = prompt[: info.prefix_len]
                digest = prefix_digest(name, parent_tokens)
                local_info = dataclasses.replace(info, namespace=name, prefix_digest=digest)
                missing.append((StoredSegment(local_info, header.file_bytes), parent_tokens))
        needed = sum(segment.file_bytes for segment, _ in missing)
        free_bytes = FILES.free_bytes(root) - bytes_of(ImpressConfig().min_free_gb)
        if missing and needed > free_bytes:
            raise CommandError(
                f"it takes {needed / 1e9:.3f} GB, and {max(free_bytes, 0) / 1e9:.3f} GB are free"
            )
        for segment, parent_tokens in missing:
            if store.tree.insert(segment, parent_tokens):
                try:
                    _copy(path / _file_of(segment.segment_id), store, segment)
                except (OSError, PrefixUnreadable) as error:
                    raise Unreachable(f"{segment.segment_id} cannot be stored: {error}") from error
                copied, num_bytes = copied + 1, num_bytes + segment.file_bytes
    counts = {"segments": copied, "known": len(exported) - len(missing)}
    counts["left_out"] = len(missing) - copied
    return {"store": first.identity, **counts, "bytes": num_bytes}


def _read(path: Path) -> tuple[dict[str, Any], StoredTree]:
    """Return the contents of a folder, and a tree of its segments, all of which are verified."""
    try:
        contents = json.loads((path / CONTENTS).read_text(encoding="utf-8"))
        key, _ = contents["key"], contents["namespace"]
        if contents["kind"] != KIND or len(str(key).encode()) > hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError("it was written by something else")
        segments = list[StoredSegment]()
        for name, _ in contents["segments"]:
            if identity_in(name) != name:
                raise ValueError(f"{name} is no segment")
            info = check_file(path / _file_of(name))
            first = segments[0].info if segments else info
            expected = (name, first.identity, first.namespace, first.shape)
            if (info.segment_id, info.identity, info.namespace, info.shape) != expected:
                raise ValueError(f"segment {name} is not one of these")
            if type(info.expires) is not int or not 0 <= info.expires < _LATEST:
                raise ValueError(f"segment {name} does not say when it expires")
            segments.append(StoredSegment(info, info.layout().file_bytes))
        # It becomes the name of a folder.
        if identity_in(segments[0].info.identity) != segments[0].info.identity:
            raise ValueError("it is of no model")
        tree = StoredTree()
        if any(UnattachedSegments(tree).restore(segments)):
            raise ValueError("what a segment builds on is not there")
    except _DAMAGE as error:
        raise CommandError(f"{path} is not a complete folder of prefixes: {error}") from error
    return contents, tree


def _write(path: Path, namespace: str, store: PrefixStore, segments: list[StoredSegment]) -> int:
    """Copy segment files into a new folder, which appears in one step; return its bytes."""
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=path.name))
    numbers = {segment: number for number, segment in enumerate(segments)}
    # With the key, a reader that knows the namespace can recognise it.
    key = secrets.token_hex(16)
    try:
        for segment in segments:
            # Another server may just have removed a segment of its own.
            source = store.segment_path(segment.segment_id, segment.foreign_dir)
            check_file(source)
            shutil.copyfile(source, folder / source.name)
        contents = {
            "kind": KIND,
            "key": key,
            "namespace": _keyed(key, namespace),
            "segments": [
                (segment.segment_id, None if segment.parent is None else numbers[segment.parent])
                for segment in segments
            ],
        }
        (folder / CONTENTS).write_text(json.dumps(contents), encoding="utf-8")
        folder.rename(path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return sum(path.stat().st_size for path in path.iterdir())


def _copy(path: Path, store: PrefixStore, segment: StoredSegment) -> None:
    """Write the file of a segment with the header that it has in this store."""
    target, layout = store.segment_path(segment.segment_id), segment.info.layout()
    FILES.make_directory(target.parent)
    with (
        contextlib.closing(OpenSegment(path, FILES, direct=False)) as file,
        publishing(FILES, target, direct=False) as descriptor,
    ):
        header = SegmentHeader(segment.info, file.checksums, file.sinks, file.mapping, file.fits)
        FILES.write(descriptor, 0, memoryview(encode_header(header)))
        for layer in range(segment.info.shape.num_layers):
            memory = AlignedMemory(layout.layer_bytes(layer))
            file.fill(memory, layout.layer_offset(layer))
            FILES.write(descriptor, layout.layer_offset(layer), memory.view)
    store.worker.submit(store.worker.record, segment)


def _selected(store: PrefixStore, selection: Selection) -> list[StoredSegment]:
    """Return the segments of a prefix or a namespace and all that they build on, parents first."""
    # Without a namespace, take that of requests without one.
    target = target_of(store, {"extra_key": None, **selection})
    if target is None:
        raise CommandError(f"there is no segment {selection['segment']}")
    name, tokens = target
    if name != store.namespace(namespace_in(selection)):
        raise CommandError("it belongs to another namespace: give its --extra-key and --cache-salt")
    segments = list(store.tree.subtree(name))
    if tokens is not None:
        match = store.tree.match(name, tokens, min_quality=ANYTHING)
        if match.num_tokens < len(tokens):
            raise CommandError(f"{match.num_tokens} of its {len(tokens)} tokens are stored")
        segments = [span.segment for span in match.spans]
    return sorted(segments, key=lambda segment: segment.info.prefix_len)


def _file_of(segment_id: str) -> str:
    return f"{segment_id}{SEGMENT_SUFFIX}"


def _keyed(key: str, namespace: str) -> str:
    return hashlib.blake2b(namespace.encode(), key=key.encode(), digest_size=16).hexdigest()
