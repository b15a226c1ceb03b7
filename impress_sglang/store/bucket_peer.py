"""A bucket as another server of the model: what it has enters the tree, what is stored goes there.

    <prefix>/<identity>/key                               of the namespaces, see `directory.py`
                       /segments/<namespace>/<digest>.kv  a segment file
                       /orders/<digest>.json              an order to purge

Objects never change. The digest is of what a segment is, but for its name: who stores the same
later finds it there. What is above the quota, oldest first, is the same for all servers: none uses
it from then on, and any deletes it after `GRACE_SECONDS`. So no server has a lease.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import heapq
import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from impress_sglang.config import ImpressConfig, bytes_of
from impress_sglang.errors import ConfigError, PrefixUnreadable, StoreUnavailable
from impress_sglang.storage.directory import StoreDirectory, segment_files
from impress_sglang.storage.segment import OpenSegment, SegmentInfo
from impress_sglang.store.bucket import (
    Bucket,
    BucketFiles,
    FetchedObject,
    ObjectMeta,
    read_begun,
)
from impress_sglang.store.eviction_order import LEAST
from impress_sglang.store.journal import ORDER_SECONDS
from impress_sglang.store.peers import PeerEvent
from impress_sglang.store.stored import StoredSegment
from impress_sglang.threads import BackgroundThread

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
# Of the time, no more than this share is spent on lists.
_LOOK_SHARE = 0.05
GRACE_SECONDS = 60.0
_KEY, _SEGMENTS, _ORDERS = "key", "segments", "orders"
_HEADER_THREADS = 8
# Of an object that is refused while others are read.
_MOST_ATTEMPTS = 5
# How many are read before others hear of them, and orders are heard.
_LEARNT_TOGETHER = 512
# For how long one poll sends what is left.
_MOST_SECONDS = 0.005
# Of an object that is put at once.
_MOST_BYTES = 5 << 30


class BucketPeer:
    """What a bucket has of a model. The store's thread owns it; other threads do the work."""

    def __init__(
        self,
        config: ImpressConfig,
        directory: StoreDirectory,
        bucket: Bucket,
        news: collections.deque[PeerEvent],
    ) -> None:
        """Ask for nothing yet but the key of the namespaces; `news` gets what is new.

        Raises:
            ConfigError: the bucket has another key than a directory that has segments, or it does
                not answer, and the directory is new.
        """
        self._bucket, self._directory, self._news = bucket, directory, news
        self._root = directory.identity
        self._share_key()
        self.home = Path(bucket.url)
        """Stands for the bucket where other servers' folders are named."""
        self.files = BucketFiles(bucket, directory, bytes_of(config.ssd_gb))
        self._most_bytes = bytes_of(config.store_gb)
        self._lock = threading.RLock()
        self._listed: dict[str, ObjectMeta] = {}
        self._listed_bytes = 0
        # Objects whose segments are known, which name the objects they build on; None: one that
        # cannot be understood.
        self._known: dict[str, StoredSegment | None] = {}
        self._heard: set[str] = set()
        self._doomed: dict[str, float] = {}
        # Those to be deleted, since when, and which object of that name.
        self._deleting: dict[str, tuple[float, ObjectMeta | None]] = {}
        # To purge, which are still to be told.
        self._orders: collections.deque[Mapping[str, Any]] = collections.deque()
        # Segments of an earlier process.
        self._left: collections.deque[StoredSegment] = collections.deque()
        self.whole: collections.deque[FetchedObject] = collections.deque()
        """Objects that have become whole local files, which must be ended."""
        # Segments of ours that are what an object is, or would be, what they build on, and age.
        self._own: dict[str, tuple[SegmentInfo, str, float]] = {}
        self.sent = 0
        self._stop, self._looked = threading.Event(), False
        names = "impress-s3", "impress-s3-send", "impress-s3-keep"
        self._looker, self._sender, self._keeper = map(BackgroundThread, names)
        self._readers = [BackgroundThread("impress-head") for _ in range(_HEADER_THREADS)]

    def _share_key(self) -> None:
        name = f"{self._root}/{_KEY}"
        is_new = not any(segment_files(self._directory.files, self._directory.path))
        try:
            try:
                found, _ = self._bucket.begin(name, 1 << 10)
            except FileNotFoundError:
                self._bucket.put(name, self._directory.key.hex().encode())
                found, _ = self._bucket.begin(name, 1 << 10)
            key = bytes.fromhex(found.decode())
        except (OSError, ValueError) as error:
            if is_new:
                raise ConfigError(
                    f"--impress-store {self._bucket.url} cannot be used: {error}"
                ) from error
            # It was agreed upon before.
            return
        if key != self._directory.key:
            if not is_new:
                raise ConfigError(
                    f"{self._directory.path} has segments under another key than --impress-store: "
                    "remove it, or choose another --impress-ssd-dir"
                )
            self._directory.take_key(key)

    def name_of(self, info: SegmentInfo) -> str:
        """The name of a segment's object, by what it is."""
        fields = json.loads(info.description())
        for field in ("segment_id", "expires", "priority"):
            fields.pop(field, None)
        digest = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16)
        digest.update(info.tokens.astype("<i4", copy=False).tobytes())
        return f"{self._root}/{_SEGMENTS}/{info.namespace}/{digest.hexdigest()}.kv"

    def path_of(self, info: SegmentInfo) -> Path:
        """Where `files` opens a segment."""
        return self.files.path_of(self.name_of(info), info)

    def begin(self, segments: Iterable[StoredSegment], orders: Iterable[Mapping[str, Any]]) -> None:
        """Begin to follow; `segments` and `orders` are what an earlier process has left."""
        self._left.extend(segment for segment in segments if segment.home is None)
        self._orders.extend(orders)
        self._looker.submit(self._follow)
        self._keeper.submit(self._keep)

    # What the store's thread tells.

    def catch_up(self) -> None:
        """Send what an earlier process has not sent, once orders that came since are obeyed."""
        if self._looked and not self._news:
            until = time.monotonic() + _MOST_SECONDS
            while self._left and time.monotonic() < until:
                segment = self._left.popleft()
                if segment.ready and not segment.info.reordered:
                    # What the quota has deleted does not come back for a restart.
                    fits = not self._most_bytes or self._listed_bytes < self._most_bytes
                    self.stored(segment, send=fits)

    def stored(self, segment: StoredSegment, *, send: bool = True) -> None:
        """Put a segment of ours, whose file is durable, in the background."""
        name, above = self.name_of(segment.info), segment.parent
        above_name = self.name_of(above.info) if above is not None and above.on_disk else ""
        with self._lock:
            self._own[name] = segment.info, above_name, segment.written
        if send:
            self._sender.submit(self._send, name)

    def lost(self, segment: StoredSegment) -> None:
        """Let the object stand for a segment that left the tree; if it was purged or has expired,
        the object is told of like any other, and goes for the same reason."""
        name = self.name_of(segment.info)
        with self._lock:
            uploaded = self._own.get(name)
            if uploaded is not None and uploaded[0].segment_id == segment.segment_id:
                del self._own[name]
            if segment.home != self.home and name not in self._doomed:
                # That it is elsewhere now is no use of it, nor of what it builds on.
                self._announce(name, LEAST)

    def delete(self, segment: StoredSegment) -> None:
        """Delete the object of a segment with the next look; one that has expired may be read for
        a while."""
        since = time.monotonic() if segment.due <= time.time() else -math.inf
        name = self.name_of(segment.info)
        with self._lock:
            known = self._known.get(name)
            # What was stored anew has the same name.
            if known is not None and known.segment_id == segment.segment_id:
                self._deleting[name] = since, self._listed.get(name)

    def tell(self, order: Mapping[str, Any]) -> None:
        """Tell all servers an order to purge."""
        self._orders.append(order)

    def has_own(self, segment: StoredSegment) -> bool:
        """Whether a segment of ours has the same tokens as one of the bucket."""
        return self.name_of(segment.info) in self._own

    def _announce(self, name: str, last_access: int = 0) -> None:
        known = self._known.get(name)
        if known is not None and name in self._listed:
            uploaded, other = self._own.get(known.above), self._known.get(known.above)
            above = uploaded[0].segment_id if uploaded else other.segment_id if other else ""
            fresh = known.apart(last_access=last_access, above=above)
            self._news.append(PeerEvent(added=fresh, far=True))

    # What other threads do.

    def _send(self, name: str) -> None:
        uploaded = self._own.get(name)
        # Evicted before it was sent, or there; if that is going to be deleted, `look` sends anew.
        if uploaded is None or name in self._listed or self._stop.is_set():
            return
        info, above, written = uploaded
        if info.layout().file_bytes > _MOST_BYTES:
            logger.warning("segment %s is not sent: it has more than 5 GiB", info.segment_id)
            return
        path, files = self._directory.segment_path(info.segment_id), self._directory.files
        try:
            with contextlib.closing(OpenSegment(path, files, direct=False)) as segment:
                segment.check_all()
                content = bytearray(files.stat(path).st_size)
                files.read(segment.descriptor, 0, memoryview(content))
        except (OSError, EOFError, PrefixUnreadable) as error:
            logger.warning("segment %s is not sent: %s", info.segment_id, error)
            return
        attributes = {"written": repr(written), "above": above}
        for attempt in itertools.count(1):
            # Purged, or evicted, while the store did not answer.
            if self._own.get(name) is not uploaded or self._stop.is_set():
                return
            try:
                if self._bucket.put(name, content, attributes):
                    self.sent += 1
                return
            except OSError as error:
                if self._bucket.answers and attempt >= _MOST_ATTEMPTS:
                    logger.warning("segment %s is not sent: %s", info.segment_id, error)
                    return
                self._stop.wait(LOOK_SECONDS)

    def _follow(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.look()
            except OSError as error:
                # Of reads the bucket has told.
                logger.debug("a look has failed: %s", error)
            except Exception:
                logger.exception("what is in %s cannot be followed", self._bucket.url)
            took = time.monotonic() - began
            self._stop.wait(min(max(LOOK_SECONDS, took / _LOOK_SHARE), 4 * LOOK_SECONDS))

    def _hear(self, names: Iterable[str]) -> None:
        """Hear the new ones of these orders."""
        for name in names:
            if name.startswith(f"{self._root}/{_ORDERS}/") and name not in self._heard:
                # Some are gone again, or are none.
                with contextlib.suppress(ValueError, FileNotFoundError):
                    order, _ = self._bucket.begin(name, 1 << 24)
                    self._heard.add(name)
                    self._news.append(PeerEvent(purge=json.loads(order), far=True))

    def look(self) -> None:
        """See what is new, and do what is to be done, on the caller's thread.

        A list may have 100,000 objects: nothing is done to all of them at once while the lock is
        held, or in a call that keeps other threads waiting.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        if not self._bucket.answers:
            # Reads go on once it does; a list of all takes longer.
            self._hear(self._bucket.list(f"{self._root}/{_ORDERS}"))
        # Only this thread changes these.
        known, before, doomed_before = self._known, self._listed, self._doomed
        listed, segments = self._bucket.list(self._root, before), f"{self._root}/{_SEGMENTS}/"
        others = [name for name in listed if not name.startswith(segments)]
        orders = {name: listed.pop(name) for name in others}
        self._hear(orders)
        listed_bytes = sum(entry.size for entry in listed.values())
        # A list may lag behind: it takes two to believe that an object is gone.
        gone = [name for name in known if name not in listed and name not in before]
        # Deleted, and stored anew by another server.
        gone += [name for name in known if listed.get(name, (was := before.get(name))) is not was]
        doomed = self._doom(listed, listed_bytes)
        with self._lock:
            self._listed, self._listed_bytes, self._doomed = listed, listed_bytes, doomed
        self._forget([*gone, *doomed])
        new = [name for name in listed if name not in known and name not in doomed]
        self._learn(sorted(new, key=lambda name: listed[name].modified))
        self._looked = True
        # Last, because who may only read goes no further.
        while self._orders:
            content = json.dumps(self._orders[0], sort_keys=True).encode()
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            name = f"{self._root}/{_ORDERS}/{digest}.json"
            self._heard.add(name)
            self._bucket.put(name, content)
            self._orders.popleft()
        before_grace = time.monotonic() - GRACE_SECONDS
        late = [name for name, since in doomed.items() if since < before_grace]
        deleting = list(self._deleting.items())
        due = {name: entry for name, (since, entry) in deleting if since < before_grace}
        going = late + [name for name, entry in due.items() if listed.get(name, entry) == entry]
        told = time.time() - ORDER_SECONDS
        old = [name for name, order in orders.items() if order.modified.timestamp() < told]
        self._bucket.delete([*going, *(name for name in old if name in self._heard)])
        with self._lock:
            for name in going:
                listed.pop(name, None)
                doomed.pop(name, None)
            for name in due:
                del self._deleting[name]
        self._forget(going)
        left = [name for name in doomed_before if name not in listed]
        for name in {*due, *late, *left}:
            uploaded, was = self._own.get(name), before.get(name)
            # What was stored since is sent anew. Of what is due, all that is ours is that.
            if uploaded and (name in due or was is None or uploaded[2] > was.modified.timestamp()):
                self._sender.submit(self._send, name)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            with self._lock:
                if known := self._known.pop(name, None):
                    self._news.append(PeerEvent(gone=known.segment_id, far=True))

    def _doom(self, listed: Mapping[str, ObjectMeta], listed_bytes: int) -> dict[str, float]:
        """The oldest objects above the quota, and since when they are not used."""
        excess, doomed = listed_bytes - self._most_bytes, dict[str, float]()
        if not self._most_bytes or excess <= 0:
            return doomed
        oldest, count = list[ObjectMeta](), 64 + len(listed) * excess // listed_bytes
        while sum(entry.size for entry in oldest) < excess:
            oldest = heapq.nsmallest(
                count,
                listed.values(),
                lambda entry: (entry.modified, entry.name),
            )
            count *= 2
        for entry in oldest:
            if excess > 0:
                doomed[entry.name] = self._doomed.get(entry.name, time.monotonic())
                excess -= entry.size
        return doomed

    def _learn(self, names: Sequence[str]) -> None:
        """Read the headers of new objects, several at a time; what builds on others is newer."""
        for first in range(0, len(names), _LEARNT_TOGETHER):
            if first:
                self._hear(self._bucket.list(f"{self._root}/{_ORDERS}"))
            if self._stop.is_set():
                return
            turns = zip(names[first : first + _LEARNT_TOGETHER], itertools.cycle(self._readers))
            reading = {name: thread.submit(self._read, name) for name, thread in turns}
            found, unusable = list[tuple[int, str, StoredSegment]](), 0
            for name, future in reading.items():
                try:
                    segment = future.result()
                    found.append((segment.info.prefix_len, name, segment))
                except FileNotFoundError:
                    continue
                except (OSError, StoreUnavailable) as error:
                    logger.debug("%s cannot be read now: %s", name, error)
                except (PrefixUnreadable, ValueError) as error:
                    logger.debug("%s cannot be used: %s", name, error)
                    self._known[name], unusable = None, unusable + 1
            if unusable:
                logger.warning("%d objects of %s cannot be used", unusable, self._bucket.url)
            for _, name, segment in sorted(found):
                with self._lock:
                    self._known[name] = segment
                    self._announce(name)

    def _read(self, name: str) -> StoredSegment:
        info, attributes = read_begun(self._bucket, name, self._listed[name].size)
        if info.identity != self._directory.identity or self.name_of(info) != name:
            raise ValueError("it is not what its name says")
        written, above = float(attributes.get("written", 0.0)), attributes.get("above", "")
        return StoredSegment(info, 0, written=written, home=self.home, above=above)

    def _keep(self) -> None:
        while not self._stop.wait(LOOK_SECONDS / 8):
            self.whole.extend(self.files.complete())

    def summary(self) -> dict[str, Any]:
        """Sizes and counters for the statistics page."""
        return {
            "state": "ok" if self._bucket.answers else "degraded",
            "objects": len(self._listed),
            "bytes": self._listed_bytes,
            "quota_bytes": self._most_bytes,
            "sent": self.sent,
            "fetched_bytes": self.files.fetched_bytes,
            "fetching_bytes": self.files.open_bytes,
            "failures": self._bucket.failures,
        }

    def close(self, seconds: float) -> None:
        """End the threads, or leave them behind if that takes more than `seconds`."""
        self._stop.set()
        until = time.monotonic() + seconds
        for thread in (self._looker, self._keeper, self._sender, *self._readers):
            thread.close(max(until - time.monotonic(), 0.0))
        self.files.forget()
