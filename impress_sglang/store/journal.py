"""The journal of a store: an index of its segments, read at the start and by other servers.

Each line is the XXH3-64 of a JSON object in hex, a space, and the object. The first line identifies
this version of the file, the others are changes in order:

    {"add": description, "tokens": base64, "bytes": n, "at": time written,
     "use": [last access, hits, builds on]}
    {"use": [segment, last access, hits, builds on]}      {"gone": [segment, …]}
    {"purge": {…}}      {"want": bytes}                   for other servers, see `peers.py`

Only the holder of the folder's lock writes it: it appends, or replaces the whole file once most of
it is obsolete. The segment files are authoritative: missing lines are restored at the start.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from impress_sglang.storage.directory import JOURNAL
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import Tokens, info_from
from impress_sglang.storage.writer import TEMPORARY_SUFFIX, publishing
from impress_sglang.store.stored import StoredSegment

logger = logging.getLogger(__name__)

_TOKEN_DTYPE = np.dtype("<i4")
_READ_BYTES = 1 << 22
# Maximum number of changes that wait for a disk that refuses them.
_MAX_PENDING_CHANGES = 100_000
# A journal is rewritten when it exceeds twice its size after the last time by this many bytes.
_SLACK_BYTES = 1 << 24
# Seconds for which an order to purge is kept for other servers.
ORDER_SECONDS = 86_400.0
_OPENING = "journal"

Record: TypeAlias = Mapping[str, Any]


def encode(record: bytes) -> bytes:
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(record).encode(), record)


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if the line is damaged."""
    digest, _, text = line.rstrip(b"\n").partition(b" ")
    if xxhash.xxh3_64_hexdigest(text).encode() != digest:
        return None
    record: dict[str, Any] = json.loads(text)
    return record


def tokens_to_text(tokens: Tokens) -> str:
    return base64.b64encode(tokens.astype(_TOKEN_DTYPE, copy=False).tobytes()).decode()


def text_to_tokens(text: str) -> Tokens:
    """Decode tokens; raises `ValueError` for other text than that of `tokens_to_text`."""
    return np.frombuffer(base64.b64decode(text, validate=True), _TOKEN_DTYPE).astype(np.int32)


def segment_of(record: Record) -> StoredSegment:
    """Return the segment of an `add` record.

    Raises:
        ValueError, KeyError, TypeError: the record is wrong, or of another version.
    """
    tokens = text_to_tokens(record["tokens"])
    if not 0 < len(tokens) == record["add"]["num_tokens"]:
        raise ValueError("it has other tokens than it says")
    last_access, hits, parent_hint = record["use"]
    return StoredSegment(
        info_from(record["add"], tokens),
        record["bytes"],
        last_access=last_access,
        hits=hits,
        parent_hint=parent_hint,
        written=float(record["at"]),
    )


def read_lines(
    files: FileSystem, path: Path, offset: int = 0, block_bytes: int = _READ_BYTES
) -> Iterator[bytes]:
    """Yield the lines of a file from `offset` on; the last one may lack its end."""
    size, line_start = files.stat(path).st_size, b""
    with files.opened(path, os.O_RDONLY) as descriptor:
        while offset < size:
            block = bytearray(min(size - offset, block_bytes))
            try:
                files.read(descriptor, offset, memoryview(block))
            except EOFError as error:
                raise OSError(f"{path} became shorter while it was read") from error
            offset += len(block)
            *lines, line_start = (line_start + block).split(b"\n")
            yield from (line + b"\n" for line in lines)
    if line_start:
        yield line_start


def append(files: FileSystem, folder: Path, record: Record) -> None:
    """Append to the journal of another server's folder, whose lock the caller holds briefly."""
    path = folder / JOURNAL
    if path.name in files.list(folder):
        # The line break turns an incomplete last line into a separate, damaged one.
        with files.opened(path, os.O_WRONLY) as descriptor:
            _write(files, descriptor, files.stat(path).st_size, [b"\n" + _line(record)])


class Journal:
    """The journal of a folder whose lock this process holds; used by one thread at a time."""

    def __init__(self, files: FileSystem, directory: Path) -> None:
        self._files = files
        self._path = directory / JOURNAL
        # Lines not written yet, and their offset; 0: in a new file.
        self._pending: list[bytes] = []
        self._end = self._rewritten_size = 0
        self._orders: list[Any] = []

    def record(self, *changes: StoredSegment | Record) -> None:
        """Record published segments and other changes, after the changes that wait.

        Changes of segments that are not in the journal are allowed.

        Raises:
            OSError: the disk refuses the changes, which wait for the next call.
        """
        for change in changes:
            if isinstance(change, StoredSegment):
                self._pending.append(_add_line(change))
                continue
            self._pending.append(_line(change))
            if "purge" in change:
                self._orders.append(change["purge"])
        if not self._pending:
            return
        try:
            if self._end and self._end <= 2 * self._rewritten_size + _SLACK_BYTES:
                with self._files.opened(self._path, os.O_WRONLY) as descriptor:
                    self._end = _write(self._files, descriptor, self._end, self._pending)
            else:
                self._rewrite()
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                # The folder was removed.
                self._end = 0
            if len(self._pending) > _MAX_PENDING_CHANGES:
                logger.warning(
                    "%s refuses more than %d changes: the next start makes up for them, from the "
                    "segments",
                    self._path,
                    _MAX_PENDING_CHANGES,
                )
                self._pending.clear()
                # The file may have a part of them, of unknown length.
                self._end = 0
            raise
        self._pending.clear()

    def _rewrite(self) -> None:
        segments = self.segments().values()
        first = _line({_OPENING: secrets.token_hex(16)})
        self._orders = self.orders
        orders = dict.fromkeys(_line({"purge": order}) for order in self._orders)
        waiting = (line for line in self._pending if line not in orders)
        lines = itertools.chain([first], map(_add_line, segments), orders, waiting)
        # A killed process may have left one.
        self._files.unlink(self._path.with_name(self._path.name + TEMPORARY_SUFFIX))
        with publishing(self._files, self._path, direct=False) as descriptor:
            size = _write(self._files, descriptor, 0, lines)
        self._end = self._rewritten_size = size

    @property
    def orders(self) -> list[Any]:
        """Orders to purge that are kept for other servers, written or not."""
        now = time.time()
        return [order for order in self._orders if now - order["at"] < ORDER_SECONDS]

    def segments(self) -> dict[str, StoredSegment]:
        """Read all segments, by id.

        Segments in damaged lines are missing, and the file is then rewritten with the next change.

        Raises:
            OSError: the journal cannot be read now.
        """
        segments, end, num_damaged, orders = dict[str, StoredSegment](), 0, 0, list[Any]()
        sizes = dict[str, int]()
        exists = self._path.name in self._files.list(self._path.parent)
        for line in read_lines(self._files, self._path) if exists else ():
            try:
                record = decode(line) if line.endswith(b"\n") else None
                if record is None or (not end and _OPENING not in record):
                    num_damaged += line != b"\n"
                elif "add" in record:
                    segment = segment_of(record)
                    segments[segment.segment_id] = segment
                    sizes[segment.segment_id] = len(line)
                elif "use" in record:
                    segment_id, last_access, hits, parent_hint = record["use"]
                    if (used := segments.get(segment_id)) is not None:
                        used.last_access, used.hits, used.parent_hint = (
                            last_access,
                            hits,
                            parent_hint,
                        )
                elif "gone" in record:
                    for segment_id in record["gone"]:
                        segments.pop(segment_id, None)
                elif "purge" in record:
                    float(record["purge"]["at"])
                    orders.append(record["purge"])
            except (ValueError, KeyError, TypeError) as error:
                logger.warning("%s has a line of another version: %s", self._path, error)
                num_damaged += 1
            end += len(line)
        if num_damaged:
            logger.warning("%s is damaged in %d lines; it is made anew", self._path, num_damaged)
        self._end = 0 if num_damaged else end
        # The file may have lost orders that this process has.
        self._orders = self._orders or orders
        self._rewritten_size = sum(sizes[name] for name in segments)
        return segments


def _write(files: FileSystem, descriptor: int, offset: int, lines: Iterable[bytes]) -> int:
    """Write lines to a file from `offset` on; returns their end."""
    lines = iter(lines)
    while block := b"".join(itertools.islice(lines, 1024)):
        files.write(descriptor, offset, memoryview(block))
        offset += len(block)
    return offset


def _line(record: Record) -> bytes:
    return encode(json.dumps(record).encode())


def _add_line(segment: StoredSegment) -> bytes:
    info, use = segment.info, segment.journal_usage[1:]
    times = json.dumps(segment.written).encode(), json.dumps(use).encode()
    return encode(
        b'{"add": %s, "tokens": "%s", "bytes": %d, "at": %s, "use": %s}'
        % (info.description(), tokens_to_text(info.tokens).encode(), segment.file_bytes, *times)
    )
