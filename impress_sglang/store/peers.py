"""What other servers of the model have stored in the same directory, as their journals say.

Each server writes in a folder of its own (`storage.directory`) and follows the journals of the
others: a thread looks every `LOOK_SECONDS` whether one has grown, with nothing but `open` and
`stat`, so that it works on network file systems. What it finds enters the tree in
`PrefixStore.poll`. Segments of others are read like own ones, but never written, moved, removed or
counted in the tree: their `file_bytes` are 0 there. One whose file is gone or damaged is forgotten.

A journal also has what a server asks of the others: to forget a prefix (`purge`), and to make room
(`want`). An order to purge has the time at which it was given, so that who starts later obeys it.

A segment names its place by what it builds on and by the digest of all tokens before it. It has no
place as long as that is not in the tree, or if others that begin like it are there. It is kept,
then, and tried again. Of the same that two servers have stored at once, one is removed by its
server: that of the greater name, which is the same for both.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from impress_sglang.storage.directory import (
    JOURNAL,
    LOCK,
    StoreDirectory,
    identity_in,
    segment_files,
    try_lock,
)
from impress_sglang.storage.segment import Tokens, common_prefix_len
from impress_sglang.store.journal import ORDER_SECONDS, append, decode, read_lines, segment_of
from impress_sglang.store.losses import prompt_of
from impress_sglang.store.prefix_hashes import prefix_digest
from impress_sglang.store.stored import StoredSegment
from impress_sglang.store.tree import StoredTree
from impress_sglang.threads import BackgroundThread

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
# Seconds between two looks for folders of other servers.
FOLDERS_SECONDS = 1.0
# The first line of a journal has fewer bytes.
_FIRST_BYTES = 256
# The most that one poll takes, in seconds.
_MOST_SECONDS = 0.005
# Seconds between two attempts to place what has no place, how many are tried, in how many segments
# of the tree a place is looked for, and for how long each.
_AGAIN_SECONDS, _TRIED_AGAIN, _SEARCHED, _SEARCH_SECONDS = 1.0, 64, 512, 0.002
# What two servers have written within so many seconds, they have written at once. Less than for how
# long they do not use what they cannot read.
_AT_ONCE_SECONDS = 30.0

_Order: TypeAlias = tuple[str | None, bytes | None, float]
"""What is purged: namespace or all, the bytes of a prefix or all of it, written until when."""


@dataclasses.dataclass(frozen=True, slots=True)
class News:
    """Something that another server has told: a segment, or that one is gone, or an order."""

    added: StoredSegment | None = None
    gone: str = ""
    purge: Mapping[str, Any] | None = None
    want: int = 0
    far: bool = False
    """Whether a bucket has it, and not a folder."""


@dataclasses.dataclass(slots=True)
class _Followed:
    """The journal of one folder, and what was read of it."""

    folder: Path
    seen: tuple[int, ...] = ()
    """What told that it has changed: its number, size and time."""
    first: bytes = b""
    end: int = 0
    segments: dict[str, int] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0
    """Of the files of these segments."""
    unsure: set[str] = dataclasses.field(default_factory=set)
    """Segments of a journal that was replaced by one that is not read to its end yet."""


class Peers:
    """The other servers of a model on one directory: what they have, and what is new of it."""

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory, self._files = directory, directory.files
        self._followed: dict[Path, _Followed] = {}
        self._folders_at = 0.0
        self.news: collections.deque[News] = collections.deque()
        """What nobody has taken yet; a bucket adds what it has."""
        self.unreadable = False
        """Whether the last look has failed: then it is not known what others have."""
        self._stop = threading.Event()
        self._thread: BackgroundThread | None = None
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the files of other servers."""
        return sum(own.num_bytes for own in list(self._followed.values()))

    @property
    def folders(self) -> list[Path]:
        """The folders of the other servers, alive or not."""
        return list(self._followed)

    def look(self) -> None:
        """See what is new, on the caller's thread; a failure of the disk is logged."""
        with self._lock:
            failed: Exception | None = None
            try:
                if time.monotonic() >= self._folders_at:
                    self._look_for_folders()
            except Exception as error:
                failed = error
            for own in self._followed.values():
                try:
                    self.news.extend(self._read(own))
                except Exception as error:
                    # Of the disk, or a line of another version: nothing ends the thread.
                    failed = error
            if failed is not None and self._followed and not self.unreadable:
                logger.warning("what another server stores cannot be read: %s", failed)
            self.unreadable = failed is not None

    def begin(self, orders: Iterable[Mapping[str, Any]]) -> list[StoredSegment]:
        """Look for the first time; returns the segments of others. What they want is not new.

        `orders`: to purge, which an earlier process of this folder has given.
        """
        self.news.extend(News(purge=own) for own in orders)
        self.look()
        # Others may add to it meanwhile.
        news = [self.news.popleft() for _ in range(len(self.news))]
        gone = {own.gone for own in news}
        self.news.extend(own for own in news if own.purge is not None)
        found = [own.added for own in news if own.added is not None]
        for own in found:
            # Used before all that is used here.
            own.last_access = 1
        return [own for own in found if own.segment_id not in gone]

    def trim(self, folder: Path, num_bytes: float, only: Collection[str] | None = None) -> int:
        """Remove the oldest segments of a folder if no server has it, on the caller's thread;
        returns the bytes of the files. `only`: names of those that may go."""
        files, freed, gone = self._files, 0, list[str]()
        lock = files.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
        try:
            if not try_lock(lock):
                return 0
            found = [(files.stat(own), name, own) for name, own, _ in segment_files(files, folder)]
            for status, name, own in sorted(found, key=lambda own: own[0].st_mtime_ns):
                if freed < num_bytes and (only is None or name in only):
                    files.unlink(Path(own))
                    freed += status.st_size
                    gone.append(name)
            append(files, folder, {"gone": gone})
        finally:
            files.close(lock)
        self.look()
        return freed

    def start(self) -> None:
        """Look again and again on a thread of its own, until `close`."""

        def follow() -> None:
            while not self._stop.wait(LOOK_SECONDS):
                self.look()

        self._thread = BackgroundThread("impress-follow")
        self._thread.submit(follow)

    def close(self, seconds: float) -> None:
        """End the thread, or leave it behind if that takes more than `seconds`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.close(seconds)

    def _look_for_folders(self) -> None:
        self._folders_at = time.monotonic() + FOLDERS_SECONDS
        there = self._directory.siblings()
        for folder in there:
            self._followed.setdefault(folder, _Followed(folder))
        for folder in self._followed.keys() - set(there):
            left = self._followed.pop(folder)
            self.news.extend(News(gone=own) for own in left.unsure.union(left.segments))

    def _read(self, own: _Followed) -> Iterator[News]:
        path = own.folder / JOURNAL
        try:
            # Opening a file tells a network file system to ask how long it is.
            self._files.close(self._files.open(path, os.O_RDONLY))
            status = self._files.stat(path)
        except FileNotFoundError:
            yield from (News(gone=gone) for gone in own.unsure.union(own.segments))
            own.segments, own.num_bytes, own.end, own.seen, own.unsure = {}, 0, 0, (), set()
            return
        seen = status.st_ino, status.st_size, status.st_mtime_ns
        if seen == own.seen:
            return
        first = next(read_lines(self._files, path, block_bytes=_FIRST_BYTES), b"")
        if first != own.first or status.st_size < own.end:
            own.unsure.update(own.segments)
            own.segments, own.num_bytes, own.first, own.end = {}, 0, first, 0
        for line in read_lines(self._files, path, own.end):
            if not line.endswith(b"\n"):
                break
            own.end += len(line)
            if (record := decode(line)) is not None:
                yield from _news_of(record, own)
        yield from (News(gone=gone) for gone in own.unsure - own.segments.keys())
        own.seen, own.unsure = seen, set()

    def take(self) -> Iterator[News]:
        """What is new, as long as that and what the caller does with it does not take too long; the
        rest comes with the next call."""
        if not self.news:
            return
        until = time.monotonic() + _MOST_SECONDS
        while self.news and time.monotonic() < until:
            yield self.news.popleft()


def _news_of(record: dict[str, Any], own: _Followed) -> Iterator[News]:
    if "add" in record:
        segment = segment_of(record)
        segment_id = segment.segment_id
        known = segment_id in own.segments or segment_id in own.unsure
        own.num_bytes += segment.file_bytes - own.segments.get(segment_id, 0)
        own.segments[segment_id] = segment.file_bytes
        if not known and segment.info.identity == identity_in(own.folder.name):
            segment.home, segment.file_bytes = own.folder, 0
            segment.last_access = segment.hits = 0
            yield News(added=segment)
    for gone in record.get("gone", ()):
        if (file_bytes := own.segments.pop(gone, None)) is not None:
            own.num_bytes -= file_bytes
            own.unsure.discard(gone)
            yield News(gone=gone)
    if "purge" in record:
        yield News(purge=record["purge"])
    if "want" in record:
        yield News(want=record["want"])


class ForeignSegments:
    """Those that have no place in the tree, and those that are not wanted there; the store's thread
    owns it."""

    def __init__(self, tree: StoredTree) -> None:
        self._tree = tree
        self._unplaced: dict[str, StoredSegment] = {}
        # Until when some of these are not tried.
        self._resting: dict[str, float] = {}
        self._unwanted: set[str] = set()
        # Orders to purge, and when they were heard: what is told later may be of before them.
        self._purged: dict[_Order, float] = {}
        self.late: list[StoredSegment] = []
        """What was purged before it was told of, and has to be removed."""
        self._doubles: list[tuple[StoredSegment, StoredSegment]] = []
        self._again_at = 0.0
        # Those of the tree in which a place has not been looked for yet.
        self._search: Iterator[StoredSegment] = iter(())

    def add(self, segment: StoredSegment, *, known: bool = False) -> None:
        """Put a segment of another server into the tree, or keep it until there is a place; not
        if it is `known` by another name, or was purged."""
        if segment.segment_id in self._unwanted or (known and not self._purged):
            return
        before = self._tokens_before(segment)
        if before is not None and any(_concerns(own, segment, before) for own in self._purged):
            self.refuse(segment.segment_id)
            self.late.append(segment)
            return
        if known:
            return
        # Being told of counts as a use.
        segment.last_access = min(segment.last_access, 0)
        if before is not None and self._tree.insert(segment, before):
            self.note_stored(segment)
            return
        self._unplaced[segment.segment_id] = segment
        if before is not None and (own := self._double(segment, before)) is not None:
            self._doubles.append((own, segment))

    def _double(self, segment: StoredSegment, before: Tokens) -> StoredSegment | None:
        """What this server has written of the same tokens at the same time, and should remove; None
        if there is no such thing."""
        match = self._tree.match(
            segment.info.namespace,
            np.concatenate([before, segment.info.tokens]),
            least=segment.info.quality,
        )
        own = match.spans[-1].segment if match.spans else segment
        if own.home is not None or own.history is not None or _what(own) != _what(segment):
            return None
        # What was written later may be there because the other one cannot be read.
        at_once = abs(segment.written - own.written) < _AT_ONCE_SECONDS
        lives = (segment.info.expires or math.inf) >= (own.info.expires or math.inf)
        return own if at_once and lives and segment.segment_id < own.segment_id else None

    def note_stored(self, segment: StoredSegment) -> None:
        """Let what has no place build on a new segment of the tree, if it has the right tokens."""
        info, digests = segment.info, dict[int, str]()
        for own in self._unplaced.values():
            length = own.info.prefix_len - info.prefix_len
            if own.info.namespace == info.namespace and 0 < length <= info.num_tokens:
                if length not in digests:
                    text = prompt_of(segment)[: own.info.prefix_len]
                    digests[length] = prefix_digest(info.namespace, text)
                if digests[length] == own.info.prefix_digest:
                    own.above = segment.segment_id

    def set_aside(self, segment: StoredSegment, seconds: float = 0.0) -> None:
        """Keep a segment out of the tree until there is a place, and for so many seconds."""
        self._unplaced[segment.segment_id] = segment
        if seconds:
            self._resting[segment.segment_id] = time.monotonic() + seconds

    def forget(self, segment_id: str) -> None:
        """Forget a segment whose server has removed it."""
        self._unplaced.pop(segment_id, None)
        self._resting.pop(segment_id, None)
        self._unwanted.discard(segment_id)

    def refuse(self, segment_id: str) -> None:
        """Never use a segment again: it is damaged, or must not be served."""
        self._unplaced.pop(segment_id, None)
        self._unwanted.add(segment_id)

    def place_again(self) -> None:
        """Try again, now and then, to place what had no place."""
        if not self._unplaced or time.monotonic() < self._again_at:
            return
        self._search_places()
        now = time.monotonic()
        self._again_at = now + _AGAIN_SECONDS
        for segment_id in list(itertools.islice(self._unplaced, _TRIED_AGAIN)):
            # Behind the others, if it fails again.
            segment = self._unplaced.pop(segment_id)
            if now < self._resting.get(segment_id, now):
                self._unplaced[segment_id] = segment
            else:
                self._resting.pop(segment_id, None)
                self.add(segment)
            if time.monotonic() - now > _SEARCH_SECONDS:
                return

    def _search_places(self) -> None:
        """Look on for a place in the tree: what a segment builds on may be there by another name
        than its server's, which has lost it since."""
        until = time.monotonic() + _SEARCH_SECONDS
        for number, segment in enumerate(self._search):
            if segment.segment_id in self._tree:
                self.note_stored(segment)
            if number == _SEARCHED or time.monotonic() > until:
                return
        self._search = iter(list(self._tree.segments()))

    def take_unplaced(
        self, namespace: str | None, tokens: Tokens | None, before: float
    ) -> list[StoredSegment]:
        """Never use the segments without a place that belong to a prefix (see `Purge`), or may do,
        and were written by then, also those told of later; returns them."""
        now = time.monotonic()
        self._purged = {own: at for own, at in self._purged.items() if now - at < ORDER_SECONDS}
        order = namespace, None if tokens is None else tokens.tobytes(), before
        self._purged[order] = now
        found = [
            own
            for own in self._unplaced.values()
            if _concerns(order, own) and _concerns(order, own, self._tokens_before(own))
        ]
        for own in found:
            self.refuse(own.segment_id)
        return found

    def take_doubles(self) -> Iterator[tuple[StoredSegment, StoredSegment]]:
        """What this server should remove, each with what another has, which is to be used."""
        while self._doubles:
            own, other = self._doubles.pop()
            if own.ready and own.segment_id in self._tree and other.segment_id in self._unplaced:
                yield own, other

    def _tokens_before(self, segment: StoredSegment) -> Tokens | None:
        """The tokens before a segment, by what it builds on; None if that is not known."""
        info, chain = segment.info, [segment]
        while chain[-1].info.prefix_len and chain[-1].above not in self._tree:
            above = self._unplaced.get(chain[-1].above)
            if above is None or above in chain:
                return None
            chain.append(above)
        known = self._tree.get(chain[-1].above) if chain[-1].info.prefix_len else None
        tokens = info.tokens[:0] if known is None else prompt_of(known)
        for own in reversed(chain):
            tokens = tokens[: own.info.prefix_len]
            if own is not segment:
                tokens = np.concatenate([tokens, own.info.tokens])
        same = prefix_digest(info.namespace, tokens) == info.prefix_digest
        return tokens if same else None


def _what(segment: StoredSegment) -> tuple[object, ...]:
    """What segments have in common that may stand for each other."""
    own = segment.info
    tokens = own.tokens.tobytes()
    return own.prefix_digest, tokens, own.quality, own.priority, own.windows_from


def _concerns(order: _Order, segment: StoredSegment, before: Tokens | None = None) -> bool:
    """Whether an order to purge concerns a segment behind these tokens; None: unknown ones."""
    namespace, prefix, until = order
    if segment.written > until or namespace not in (None, segment.info.namespace):
        return False
    tokens, length = np.frombuffer(prefix or b"", np.int32), segment.info.prefix_len
    head, rest = tokens[:length], tokens[length:]
    if common_prefix_len(segment.info.tokens, rest) < len(rest):
        return False
    return before is None or common_prefix_len(before, head) == len(head)
