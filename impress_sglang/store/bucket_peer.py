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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from impress_sglang.config import ImpressConfig, bytes_of
from impress_sglang.errors import ConfigError, PrefixUnreadable, SegmentUnreadable, StoreUnavailable
from impress_sglang.storage.directory import StoreDirectory, segment_files
from impress_sglang.storage.segment import OpenSegment, SegmentInfo
from impress_sglang.store.bucket import (
    Bucket,
    BucketFiles,
    FetchedObject,
    ObjectMeta,
    read_object_header,
)
from impress_sglang.store.eviction_order import NEVER_USED
from impress_sglang.store.journal import ORDER_SECONDS
from impress_sglang.store.peers import PeerEvent
from impress_sglang.store.stored import StoredSegment
from impress_sglang.threads import BackgroundThread

logger = logging.getLogger(__name__)

# Seconds between two list requests.
POLL_SECONDS = 2.0
# Fraction of the time that may be spent listing objects.
_MAX_LIST_SHARE = 0.05
GRACE_SECONDS = 60.0
_KEY, _SEGMENTS, _ORDERS = "key", "segments", "orders"
_HEADER_THREADS = 8
# Attempts to upload an object that is refused while reads succeed.
_MAX_ATTEMPTS = 5
# Number of headers read before these segments are announced and orders are read.
_HEADERS_PER_BATCH = 512
# Seconds per poll that may be spent on segments of an earlier process.
_MAX_POLL_SECONDS = 0.005
# Largest object that a single PUT accepts.
_MAX_OBJECT_BYTES = 5 << 30


class BucketPeer:
    """A model's objects in a bucket. Thread: the store's; requests run on other threads."""

    def __init__(
        self,
        config: ImpressConfig,
        directory: StoreDirectory,
        bucket: Bucket,
        events: collections.deque[PeerEvent],
    ) -> None:
        """Agree with the bucket on the key of the namespaces; `events` gets events from `begin` on.

        Raises:
            ConfigError: the bucket has another key than a directory that has segments, or it does
                not answer, and the directory is new.
        """
        self._bucket, self._directory, self._events = bucket, directory, events
        self._root = directory.identity
        # Whether the bucket has the key of the directory; before, nothing is read or sent.
        self._has_agreed = False
        self._share_key()
        self.home = Path(bucket.url)
        """`home` of the bucket's segments; other servers' segments have a folder there."""
        self.files = BucketFiles(bucket, directory, bytes_of(config.ssd_gb))
        self._max_bytes = bytes_of(config.store_gb)
        self._lock = threading.RLock()
        self._listed: dict[str, ObjectMeta] = {}
        self._listed_bytes = 0
        # Segments by object name, with that of the object below; None for what cannot be used.
        self._segments: dict[str, StoredSegment | None] = {}
        # Names of the orders that were read or written.
        self._seen_orders: set[str] = set()
        # Objects above the quota, and since when.
        self._over_quota: dict[str, float] = {}
        # Objects to be deleted: since when, and which object of that name.
        self._to_delete: dict[str, tuple[float, ObjectMeta | None]] = {}
        # Orders to purge that are not uploaded yet.
        self._orders: collections.deque[Mapping[str, Any]] = collections.deque()
        # Segments of an earlier process that may not be uploaded yet.
        self._unsent: collections.deque[StoredSegment] = collections.deque()
        self.completed: collections.deque[FetchedObject] = collections.deque()
        """Objects that are whole local files; `BucketFiles.end` must be called for each."""
        # Segments of this server by the name of their object, which need not exist; the name of
        # the object they build on; and the time of writing.
        self._local: dict[str, tuple[SegmentInfo, str, float]] = {}
        # `_sending`: name of the object that is being sent; empty once its segment is purged.
        self.sent, self._sending = 0, ""
        self._stop, self._has_polled = threading.Event(), False
        names = "impress-s3", "impress-s3-send", "impress-s3-keep"
        self._poller, self._uploader, self._completer = map(BackgroundThread, names)
        self._header_readers = [BackgroundThread("impress-head") for _ in range(_HEADER_THREADS)]

    def _share_key(self) -> None:
        is_new = not any(segment_files(self._directory.files, self._directory.path))
        try:
            key = bytes.fromhex(self._read_key().decode())
        except (OSError, ValueError) as error:
            if is_new:
                raise ConfigError(
                    f"--impress-store {self._bucket.url} cannot be used: {error}"
                ) from error
            # An earlier process may have agreed on it; `poll` asks.
            return
        self._has_agreed = True
        if key != self._directory.key:
            if not is_new:
                raise ConfigError(
                    f"{self._directory.path} has segments under another key than --impress-store: "
                    "remove it, or choose another --impress-ssd-dir"
                )
            self._directory.take_key(key)

    def _read_key(self) -> bytes:
        """Return the key in the bucket, in hex, which is put there if it has none."""
        name = f"{self._root}/{_KEY}"
        try:
            content, _ = self._bucket.begin(name, 1 << 10)
        except FileNotFoundError:
            self._bucket.put(name, self._directory.key.hex().encode())
            content, _ = self._bucket.begin(name, 1 << 10)
        return content

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
        self._unsent.extend(segment for segment in segments if segment.foreign_dir is None)
        self._orders.extend(orders)
        self._poller.submit(self._follow)
        self._completer.submit(self._complete)

    # Called on the store's thread.

    def upload_backlog(self, place: Callable[[StoredSegment], bool]) -> None:
        """Upload the segments of an earlier process that have a place in the tree, once all orders
        to purge are done."""
        if self._has_polled and not self._events:
            until = time.monotonic() + _MAX_POLL_SECONDS
            while self._unsent and time.monotonic() < until:
                segment = self._unsent.popleft()
                if segment.ready and place(segment) and not segment.info.reordered:
                    # A restart must not bring back what the quota has deleted.
                    fits = not self._max_bytes or self._listed_bytes < self._max_bytes
                    self.on_stored(segment, upload=fits)

    def on_stored(self, segment: StoredSegment, *, upload: bool = True) -> None:
        """Upload a segment of this server, whose file is durable, in the background."""
        name, parent = self.name_of(segment.info), segment.parent
        parent_name = self.name_of(parent.info) if parent is not None and parent.on_disk else ""
        with self._lock:
            self._local[name] = segment.info, parent_name, segment.written
        if upload:
            self._uploader.submit(self._upload, name)

    def on_removed(self, segment: StoredSegment, *, is_purged: bool = False) -> None:
        """Announce the object of a segment that left the tree, which replaces it there.

        The object of a purged or expired segment is announced, too, and removed for that reason.
        """
        name = self.name_of(segment.info)
        with self._lock:
            uploaded = self._local.get(name)
            if uploaded is not None and uploaded[0].segment_id == segment.segment_id:
                del self._local[name]
            if is_purged and self._sending == name:
                self._sending = ""
            if segment.foreign_dir != self.home and name not in self._over_quota:
                # This is not a use of the segment, nor of its ancestors.
                self._announce(name, NEVER_USED)

    def delete(self, segment: StoredSegment) -> None:
        """Delete the object of a segment at the next `poll`; that of an expired segment after
        `GRACE_SECONDS`, because other servers may read it."""
        since = time.monotonic() if segment.expires_at <= time.time() else -math.inf
        name = self.name_of(segment.info)
        with self._lock:
            listed_segment = self._segments.get(name)
            # An object that was stored again has the same name.
            if listed_segment is not None and listed_segment.segment_id == segment.segment_id:
                self._to_delete[name] = since, self._listed.get(name)

    def send_order(self, order: Mapping[str, Any]) -> None:
        self._orders.append(order)

    def has_local(self, segment: StoredSegment) -> bool:
        """Whether a segment of this server has the same tokens as a segment of the bucket."""
        return self.name_of(segment.info) in self._local

    def _announce(self, name: str, last_access: int = 0) -> None:
        segment = self._segments.get(name)
        if segment is not None and name in self._listed:
            uploaded = self._local.get(segment.parent_hint)
            parent = self._segments.get(segment.parent_hint)
            parent_id = uploaded[0].segment_id if uploaded else parent.segment_id if parent else ""
            added = segment.detached_copy(last_access=last_access, parent_hint=parent_id)
            self._events.append(PeerEvent(added=added, from_bucket=True))

    # Called on other threads.

    def _upload(self, name: str) -> None:
        while not (self._has_agreed or self._stop.wait(POLL_SECONDS)):
            pass
        uploaded = self._local.get(name)
        # Evicted before its upload, or uploaded already; `poll` uploads again what it deletes.
        if uploaded is None or name in self._listed or self._stop.is_set():
            return
        info, parent_name, written = uploaded
        if info.layout().file_bytes > _MAX_OBJECT_BYTES:
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
        attributes = {"written": repr(written), "above": parent_name}
        for attempt in itertools.count(1):
            self._sending = name
            # Purged or evicted while the object store did not answer.
            if self._local.get(name) is not uploaded or self._stop.is_set():
                return
            try:
                if self._bucket.put(name, content, attributes):
                    self.sent += 1
                    # Purged meanwhile; what was evicted is read from there.
                    self._bucket.delete([] if self._sending else [name])
                return
            except OSError as error:
                if self._bucket.answers and attempt >= _MAX_ATTEMPTS:
                    logger.warning("segment %s is not sent: %s", info.segment_id, error)
                    return
                self._stop.wait(POLL_SECONDS)

    def _follow(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.poll()
            except OSError as error:
                # `Bucket` has logged a failure of reads.
                logger.debug("a look has failed: %s", error)
            except Exception:
                logger.exception("what is in %s cannot be followed", self._bucket.url)
            took = time.monotonic() - began
            self._stop.wait(min(max(POLL_SECONDS, took / _MAX_LIST_SHARE), 4 * POLL_SECONDS))

    def _take_orders(self, names: Iterable[str]) -> None:
        """Read the new orders among these objects."""
        for name in names:
            if name.startswith(f"{self._root}/{_ORDERS}/") and name not in self._seen_orders:
                # An order may be deleted meanwhile, or refused, or not be JSON.
                with contextlib.suppress(ValueError, FileNotFoundError, PermissionError):
                    order, _ = self._bucket.begin(name, 1 << 24)
                    self._seen_orders.add(name)
                    self._events.append(PeerEvent(purge=json.loads(order), from_bucket=True))

    def poll(self) -> None:
        """List the bucket, announce changes, upload orders and delete objects that are due.

        A list may have 100,000 objects, so no loop over all of them holds the lock, nor does a
        single call that holds the GIL process all of them.

        Raises:
            OSError: the store does not answer, or refuses.
        """
        if not self._has_agreed:
            # A list lets reads resume.
            self._bucket.list(f"{self._root}/{_KEY}")
            if self._read_key() != self._directory.key.hex().encode():
                logger.error("%s is not used: the directory has another key", self._bucket.url)
                return self._stop.set()
            self._has_agreed = True
        if not self._bucket.answers:
            # Reads resume as soon as it answers; a list of all objects takes longer.
            self._take_orders(self._bucket.list(f"{self._root}/{_ORDERS}"))
        # Changed only by this thread.
        known, previous, previous_over_quota = self._segments, self._listed, self._over_quota
        listed, segments = self._bucket.list(self._root, previous), f"{self._root}/{_SEGMENTS}/"
        other_names = [name for name in listed if not name.startswith(segments)]
        orders = {name: listed.pop(name) for name in other_names}
        self._take_orders(orders)
        listed_bytes = sum(entry.size for entry in listed.values())
        # A list may be stale: an object is gone once it is missing in two.
        removed = [name for name in known if name not in listed and name not in previous]
        # Deleted, and stored again by another server.
        removed += [
            name for name in known if listed.get(name, (old := previous.get(name))) is not old
        ]
        over_quota = self._find_over_quota(listed, listed_bytes)
        with self._lock:
            self._listed, self._listed_bytes, self._over_quota = listed, listed_bytes, over_quota
        self._forget([*removed, *over_quota])
        new = [name for name in listed if name not in known and name not in over_quota]
        self._read_headers(sorted(new, key=lambda name: listed[name].modified))
        # Until all are read, it is not known what builds on them.
        self._has_polled |= all(name in known for name in new)
        # Last, because it fails without the right to write.
        while self._orders:
            content = json.dumps(self._orders[0], sort_keys=True).encode()
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            name = f"{self._root}/{_ORDERS}/{digest}.json"
            self._seen_orders.add(name)
            self._bucket.put(name, content)
            self._orders.popleft()
        grace_start = time.monotonic() - GRACE_SECONDS
        expired = [name for name, since in over_quota.items() if since < grace_start]
        deleting = list(self._to_delete.items())
        due = {name: entry for name, (since, entry) in deleting if since < grace_start}
        deleted = expired + [
            name for name, entry in due.items() if listed.get(name, entry) == entry
        ]
        cutoff = time.time() - ORDER_SECONDS
        old_orders = [name for name, order in orders.items() if order.modified.timestamp() < cutoff]
        self._bucket.delete([*deleted, *(name for name in old_orders if name in self._seen_orders)])
        with self._lock:
            for name in deleted:
                listed.pop(name, None)
                over_quota.pop(name, None)
            for name in due:
                del self._to_delete[name]
        self._forget(deleted)
        deleted_by_peers = [name for name in previous_over_quota if name not in listed]
        for name in {*due, *expired, *deleted_by_peers}:
            uploaded, old = self._local.get(name), previous.get(name)
            # Segments stored since the object are uploaded again; for objects that were due, these
            # are all segments of this server.
            if uploaded and (name in due or old is None or uploaded[2] > old.modified.timestamp()):
                self._uploader.submit(self._upload, name)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            with self._lock:
                if segment := self._segments.pop(name, None):
                    self._events.append(PeerEvent(gone=segment.segment_id, from_bucket=True))

    def _find_over_quota(
        self, listed: Mapping[str, ObjectMeta], listed_bytes: int
    ) -> dict[str, float]:
        """Return the oldest objects, which exceed the quota, and since when they are not used."""
        excess, over_quota = listed_bytes - self._max_bytes, dict[str, float]()
        if not self._max_bytes or excess <= 0:
            return over_quota
        oldest, count = list[ObjectMeta](), 64 + len(listed) * excess // listed_bytes
        while sum(entry.size for entry in oldest) < excess:
            oldest = heapq.nsmallest(
                count, listed.values(), lambda entry: (entry.modified, entry.name)
            )
            count *= 2
        for entry in oldest:
            if excess > 0:
                over_quota[entry.name] = self._over_quota.get(entry.name, time.monotonic())
                excess -= entry.size
        return over_quota

    def _read_headers(self, names: Sequence[str]) -> None:
        """Read the headers of new objects, oldest first, so that parents precede children."""
        for first in range(0, len(names), _HEADERS_PER_BATCH):
            if first:
                self._take_orders(self._bucket.list(f"{self._root}/{_ORDERS}"))
            if self._stop.is_set():
                return
            batch = names[first : first + _HEADERS_PER_BATCH]
            turns = zip(batch, itertools.cycle(self._header_readers))
            reading = {name: thread.submit(self._read, name) for name, thread in turns}
            segments, unusable = list[tuple[int, str, StoredSegment]](), list[Exception]()
            for name, future in reading.items():
                try:
                    segment = future.result()
                    segments.append((segment.info.prefix_len, name, segment))
                except FileNotFoundError:
                    continue
                except (PermissionError, SegmentUnreadable, ValueError) as error:
                    self._segments[name] = None
                    unusable.append(error)
                except (OSError, StoreUnavailable) as error:
                    logger.debug("%s cannot be read now: %s", name, error)
            if unusable:
                where, why = self._bucket.url, unusable[0]
                logger.warning("%d objects of %s cannot be used: %s", len(unusable), where, why)
            for _, name, segment in sorted(segments):
                with self._lock:
                    self._segments[name] = segment
                    self._announce(name)

    def _read(self, name: str) -> StoredSegment:
        info, attributes = read_object_header(self._bucket, name, self._listed[name].size)
        if info.identity != self._directory.identity or self.name_of(info) != name:
            raise ValueError("it is not what its name says")
        written, above = float(attributes.get("written", 0.0)), attributes.get("above", "")
        return StoredSegment(info, 0, written=written, foreign_dir=self.home, parent_hint=above)

    def _complete(self) -> None:
        while not self._stop.wait(POLL_SECONDS / 8):
            self.completed.extend(self.files.complete())

    def summary(self) -> dict[str, Any]:
        return {
            "state": "ok" if self._bucket.answers and not self._stop.is_set() else "degraded",
            "objects": len(self._listed),
            "bytes": self._listed_bytes,
            "quota_bytes": self._max_bytes,
            "sent": self.sent,
            "fetched_bytes": self.files.fetched_bytes,
            "fetching_bytes": self.files.open_bytes,
            "failures": self._bucket.failures,
        }

    def close(self, seconds: float) -> None:
        self._stop.set()
        until = time.monotonic() + seconds
        for thread in (self._poller, self._completer, self._uploader, *self._header_readers):
            thread.close(max(until - time.monotonic(), 0.0))
        self.files.forget()
