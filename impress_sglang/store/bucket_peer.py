"""A bucket as a peer: its segments enter the tree, and new segments of this server are uploaded.

    <prefix>/<identity>/key                               of the namespaces, see `directory.py`
                       /segments/<namespace>/<digest>.kv  a segment file
                       /orders/<digest>.json              an order to purge

Objects never change. The digest is of a segment's description without its id, so a server that
stores the same tokens later finds the object. All servers agree which objects exceed the quota: the
oldest. No server uses these any more, and any server deletes them after `GRACE_SECONDS`. So no
server needs a lease.
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

# Seconds between two list requests.
LOOK_SECONDS = 2.0
# Fraction of the time that may be spent listing objects.
_LOOK_SHARE = 0.05
GRACE_SECONDS = 60.0
_KEY, _SEGMENTS, _ORDERS = "key", "segments", "orders"
_HEADER_THREADS = 8
# Attempts to upload an object that is refused while reads succeed.
_MOST_ATTEMPTS = 5
# Number of headers read before these segments are announced and orders are read.
_LEARNT_TOGETHER = 512
# Seconds per poll that may be spent on segments of an earlier process.
_MOST_SECONDS = 0.005
# Largest object that a single PUT accepts.
_MOST_BYTES = 5 << 30


class BucketPeer:
    """A model's objects in a bucket. Thread: the store's; requests run on other threads."""

    def __init__(
        self,
        config: ImpressConfig,
        directory: StoreDirectory,
        bucket: Bucket,
        news: collections.deque[PeerEvent],
    ) -> None:
        """Agree with the bucket on the key of the namespaces; `news` gets events from `begin` on.

        Raises:
            ConfigError: the bucket has another key than a directory that has segments, or it does
                not answer, and the directory is new.
        """
        self._bucket, self._directory, self._news = bucket, directory, news
        self._root = directory.identity
        self._share_key()
        self.home = Path(bucket.url)
        """`home` of the bucket's segments; other servers' segments have a folder there."""
        self.files = BucketFiles(bucket, directory, bytes_of(config.ssd_gb))
        self._most_bytes = bytes_of(config.store_gb)
        self._lock = threading.RLock()
        self._listed: dict[str, ObjectMeta] = {}
        self._listed_bytes = 0
        # Segments by object name, each with the name of the object it builds on; None for an
        # object that cannot be used.
        self._known: dict[str, StoredSegment | None] = {}
        # Names of the orders that were read or written.
        self._heard: set[str] = set()
        # Objects above the quota, and since when.
        self._doomed: dict[str, float] = {}
        # Objects to be deleted: since when, and which object of that name.
        self._deleting: dict[str, tuple[float, ObjectMeta | None]] = {}
        # Orders to purge that are not uploaded yet.
        self._orders: collections.deque[Mapping[str, Any]] = collections.deque()
        # Segments of an earlier process that may not be uploaded yet.
        self._left: collections.deque[StoredSegment] = collections.deque()
        self.whole: collections.deque[FetchedObject] = collections.deque()
        """Objects that are whole local files; `BucketFiles.end` must be called for each."""
        # Segments of this server by the name of their object, which need not exist; the name of
        # the object they build on; and the time of writing.
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
            # An earlier process has agreed on it.
            return
        if key != self._directory.key:
            if not is_new:
                raise ConfigError(
                    f"{self._directory.path} has segments under another key than --impress-store: "
                    "remove it, or choose another --impress-ssd-dir"
                )
            self._directory.take_key(key)

    def name_of(self, info: SegmentInfo) -> str:
        fields = json.loads(info.description())
        for field in ("segment_id", "expires", "priority"):
            fields.pop(field, None)
        digest = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16)
        digest.update(info.tokens.astype("<i4", copy=False).tobytes())
        return f"{self._root}/{_SEGMENTS}/{info.namespace}/{digest.hexdigest()}.kv"

    def path_of(self, info: SegmentInfo) -> Path:
        return self.files.path_of(self.name_of(info), info)

    def begin(self, segments: Iterable[StoredSegment], orders: Iterable[Mapping[str, Any]]) -> None:
        """Start the threads; `segments` and `orders` are those of an earlier process."""
        self._left.extend(segment for segment in segments if segment.home is None)
        self._orders.extend(orders)
        self._looker.submit(self._follow)
        self._keeper.submit(self._keep)

    # Called on the store's thread.

    def catch_up(self) -> None:
        """Upload the segments of an earlier process, once all orders to purge are done."""
        if self._looked and not self._news:
            until = time.monotonic() + _MOST_SECONDS
            while self._left and time.monotonic() < until:
                segment = self._left.popleft()
                if segment.ready and not segment.info.reordered:
                    # A restart must not bring back what the quota has deleted.
                    fits = not self._most_bytes or self._listed_bytes < self._most_bytes
                    self.stored(segment, send=fits)

    def stored(self, segment: StoredSegment, *, send: bool = True) -> None:
        """Upload a segment of this server, whose file is durable, in the background."""
        name, above = self.name_of(segment.info), segment.parent
        above_name = self.name_of(above.info) if above is not None and above.on_disk else ""
        with self._lock:
            self._own[name] = segment.info, above_name, segment.written
        if send:
            self._sender.submit(self._send, name)

    def lost(self, segment: StoredSegment) -> None:
        """Announce the object of a segment that left the tree, which replaces it there.

        The object of a purged or expired segment is announced, too, and removed for that reason.
        """
        name = self.name_of(segment.info)
        with self._lock:
            uploaded = self._own.get(name)
            if uploaded is not None and uploaded[0].segment_id == segment.segment_id:
                del self._own[name]
            if segment.home != self.home and name not in self._doomed:
                # This is not a use of the segment, nor of its ancestors.
                self._announce(name, LEAST)

    def delete(self, segment: StoredSegment) -> None:
        """Delete the object of a segment at the next `look`; that of an expired segment after
        `GRACE_SECONDS`, because other servers may read it."""
        since = time.monotonic() if segment.due <= time.time() else -math.inf
        name = self.name_of(segment.info)
        with self._lock:
            known = self._known.get(name)
            # An object that was stored again has the same name.
            if known is not None and known.segment_id == segment.segment_id:
                self._deleting[name] = since, self._listed.get(name)

    def tell(self, order: Mapping[str, Any]) -> None:
        self._orders.append(order)

    def has_own(self, segment: StoredSegment) -> bool:
        """Whether a segment of this server has the same tokens as a segment of the bucket."""
        return self.name_of(segment.info) in self._own

    def _announce(self, name: str, last_access: int = 0) -> None:
        known = self._known.get(name)
        if known is not None and name in self._listed:
            uploaded, other = self._own.get(known.above), self._known.get(known.above)
            above = uploaded[0].segment_id if uploaded else other.segment_id if other else ""
            fresh = known.apart(last_access=last_access, above=above)
            self._news.append(PeerEvent(added=fresh, far=True))

    # Called on other threads.

    def _send(self, name: str) -> None:
        uploaded = self._own.get(name)
        # Evicted before its upload, or uploaded already; `look` uploads again what it deletes.
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
            # Purged or evicted while the object store did not answer.
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
                # `Bucket` has logged a failure of reads.
                logger.debug("a look has failed: %s", error)
            except Exception:
                logger.exception("what is in %s cannot be followed", self._bucket.url)
            took = time.monotonic() - began
            self._stop.wait(min(max(LOOK_SECONDS, took / _LOOK_SHARE), 4 * LOOK_SECONDS))

    def _hear(self, names: Iterable[str]) -> None:
        """Read the new orders among these objects."""
        for name in names:
            if name.startswith(f"{self._root}/{_ORDERS}/") and name not in self._heard:
                # An order may be deleted meanwhile, or not be JSON.
                with contextlib.suppress(ValueError, FileNotFoundError):
                    order, _ = self._bucket.begin(name, 1 << 24)
                    self._heard.add(name)
                    self._news.append(PeerEvent(purge=json.loads(order), far=True))

    def look(self) -> None:
        """List the bucket, announce changes, upload orders and delete objects that are due.

        A list may have 100,000 objects, so no loop over all of them holds the lock, nor does a
        single call that holds the GIL process all of them.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        if not self._bucket.answers:
            # Reads resume as soon as it answers; a list of all objects takes longer.
            self._hear(self._bucket.list(f"{self._root}/{_ORDERS}"))
        # Changed only by this thread.
        known, before, doomed_before = self._known, self._listed, self._doomed
        listed, segments = self._bucket.list(self._root, before), f"{self._root}/{_SEGMENTS}/"
        others = [name for name in listed if not name.startswith(segments)]
        orders = {name: listed.pop(name) for name in others}
        self._hear(orders)
        listed_bytes = sum(entry.size for entry in listed.values())
        # A list may be stale: an object is gone once it is missing in two.
        gone = [name for name in known if name not in listed and name not in before]
        # Deleted, and stored again by another server.
        gone += [name for name in known if listed.get(name, (was := before.get(name))) is not was]
        doomed = self._doom(listed, listed_bytes)
        with self._lock:
            self._listed, self._listed_bytes, self._doomed = listed, listed_bytes, doomed
        self._forget([*gone, *doomed])
        new = [name for name in listed if name not in known and name not in doomed]
        self._learn(sorted(new, key=lambda name: listed[name].modified))
        self._looked = True
        # Last, because it fails without the right to write.
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
            # Segments stored since the object are uploaded again; for objects that were due, these
            # are all segments of this server.
            if uploaded and (name in due or was is None or uploaded[2] > was.modified.timestamp()):
                self._sender.submit(self._send, name)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            with self._lock:
                if known := self._known.pop(name, None):
                    self._news.append(PeerEvent(gone=known.segment_id, far=True))

    def _doom(self, listed: Mapping[str, ObjectMeta], listed_bytes: int) -> dict[str, float]:
        """Return the oldest objects, which exceed the quota, and since when they are not used."""
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
        """Read the headers of new objects, oldest first, so that parents precede children."""
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
        """End the threads, or leave them running if that takes more than `seconds`."""
        self._stop.set()
        until = time.monotonic() + seconds
        for thread in (self._looker, self._keeper, self._sender, *self._readers):
            thread.close(max(until - time.monotonic(), 0.0))
        self.files.forget()
