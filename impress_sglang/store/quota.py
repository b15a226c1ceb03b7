"""Decides whether a file fits under the quota and above the free-space floor, and what to remove.

Removed are, in this order: quarantine; stores of other models that no process serves, oldest first;
the oldest segments of this model in folders that no process serves; segments without dependents
that no request reads or waits for, lowest priority first, then least recently used. Namespaces that
exceed their limit come before others.

Files of other servers of this model count, too, but each server removes its own: a server that
lacks room asks the others, and those that have more than their share evict some of it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from impress_sglang.config import ImpressConfig, bytes_of
from impress_sglang.storage.directory import QUARANTINE, remove_store
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.eviction_order import EvictionOrder
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.segment_readers import SegmentReaders
from impress_sglang.store.stored import StoredMatch, StoredSegment

logger = logging.getLogger(__name__)

_DAY_S, _HOURS = 86_400.0, 24
# Seconds between two checks whether a process serves a store.
_CHECK_SECONDS = 60.0


class WriteBudget:
    """Limits the bytes written per day to the drive, whose lifetime depends on them.

    A token bucket of one server, for all stores that it opens. It holds a day's bytes, is full at
    the start, and fills at a steady rate. A file may take it below zero, so that no file is too
    large; the average never exceeds the limit. Once it is empty, nothing is stored until it has an
    hour's bytes again.
    """

    def __init__(
        self, gb_per_day: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`gb_per_day`: 0 for no limit."""
        self._bytes_per_day = bytes_of(gb_per_day)
        self._clock = clock
        self._available = float(self._bytes_per_day)
        self._filled_at = clock()
        self._spent = False

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be stored now; changes are logged."""
        if self._bytes_per_day:
            enough = self._bytes_per_day / _HOURS if self._spent else 1
            if self._spent == (self._fill() >= enough):
                self._spent = not self._spent
                state = "spent: no new prompts" if self._spent else "there again: prompts"
                logger.warning("--impress-write-gb-per-day is %s are stored", state)
        return self._spent

    def spend(self, num_bytes: int) -> None:
        """Take bytes that will be written; negative: return bytes that were not."""
        if self._bytes_per_day:
            self._available = self._fill() - num_bytes

    def summary(self) -> dict[str, int]:
        return {
            "write_budget_bytes": self._bytes_per_day,
            "write_budget_left_bytes": max(int(self._fill()), 0),
        }

    def _fill(self) -> float:
        """Return the bytes that may be written now, below 0 after a large file."""
        now = self._clock()
        self._available += (now - self._filled_at) / _DAY_S * self._bytes_per_day
        self._available = min(self._available, self._bytes_per_day)
        self._filled_at = now
        return self._available


class Quota:
    """Counts the bytes of one store directory. Thread: the store's."""

    def __init__(
        self,
        config: ImpressConfig,
        disk: StoreDisk,
        readers: SegmentReaders,
        lookahead: LookAhead,
        budget: WriteBudget,
    ) -> None:
        self.budget = budget
        self._config, self._readers, self._lookahead = config, readers, lookahead
        self._pins = disk.pins
        self._tree, self._worker, self._health = disk.tree, disk.worker, disk.health
        self._other_stores, self._peers, self._bucket = disk.other_stores, disk.peers, disk.bucket
        # Removals in folders that no process serves.
        self._removing: dict[Path, Future[Any]] = {}
        # Time at which a folder was found to be served by a process.
        self._served: dict[Path, float] = {}
        self.reserved_bytes = 0
        """Bytes of a file that is being written to replace another one."""
        self.adopting_bytes = 0
        """Bytes of an object of the bucket that is becoming a file of this store."""
        self.pending_bytes = 0
        """Bytes of the tree's segments that are not written yet."""
        self._namespace_limit = bytes_of(config.namespace_gb) or math.inf
        # Namespaces above the limit at the start, after it was lowered: later only new segments of
        # a namespace can exceed it, and these evict the excess.
        sizes = self._tree.bytes_by_namespace
        self._over_limit = dict.fromkeys(
            name for name in sizes if sizes[name] > self._namespace_limit
        )

    def summary(self) -> dict[str, int]:
        return {
            "used_bytes": self._tree.file_bytes + self.reserved_bytes,
            "quarantined_bytes": self._worker.quarantined_bytes,
            "other_models_bytes": sum(self._other_stores.values()),
            "other_servers_bytes": self._peers.num_bytes,
            "quota_bytes": bytes_of(self._config.ssd_gb),
            **self.budget.summary(),
        }

    def missing(self, num_bytes: int) -> int:
        """Return the bytes that must be freed for a file of `num_bytes`; 0 or less if it fits."""
        worker, config = self._worker, self._config
        used = self._tree.file_bytes + self.reserved_bytes + self.adopting_bytes
        used += worker.quarantined_bytes + worker.unused_bytes + worker.blocked_bytes
        used += sum(self._other_stores.values()) + self._peers.num_bytes
        used += 0 if self._bucket is None else self._bucket.files.open_bytes
        pending = self.pending_bytes + self.reserved_bytes
        available = self._health.free_bytes - pending - bytes_of(config.min_free_gb)
        return max(used + num_bytes - bytes_of(config.ssd_gb), num_bytes - available)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a file may be written without evicting anything."""
        return self.missing(num_bytes) <= 0 and not self.budget.is_spent

    @property
    def free_share_bytes(self) -> int:
        """Bytes missing to this server's share of the directory; negative if it uses more."""
        share = bytes_of(self._config.ssd_gb) // (1 + len(self._peers.folders))
        return share - self._tree.file_bytes

    def is_needed(self, segment: StoredSegment) -> bool:
        name = segment.segment_id
        return self._readers.is_open(name) or name in self._lookahead or name in self._pins

    def make_room(self, segment: StoredSegment, keep: StoredMatch) -> list[StoredSegment] | None:
        """Choose segments to evict for a file, and start removing files that are not this server's.

        Args:
            segment: the segment to be written.
            keep: the match that it builds on, which stays.

        Returns:
            Segments to evict, dependents first. None if there is no room, and while another store
            is being removed: until then it is not known whether a process serves that store, and so
            whether there will be room.
        """
        num_bytes, namespace = segment.file_bytes, segment.info.namespace
        needed_bytes, sizes = self.missing(num_bytes), self._tree.bytes_by_namespace
        quarantined = self._worker.quarantined_bytes
        if needed_bytes > 0 and quarantined and QUARANTINE not in self._worker.blocked_removals():
            # Done by the worker before any other write.
            self._worker.submit(self._worker.empty_quarantine)
            needed_bytes -= quarantined
        if needed_bytes > 0 and self._remove_unserved(needed_bytes):
            return None
        # The namespace must evict at least its own excess.
        excess = max(sizes[namespace] + num_bytes - self._namespace_limit, 0)
        if needed_bytes > self._tree.file_bytes - self.pending_bytes or excess > sizes[namespace]:
            return None
        order, choice = self._tree.order, _Choice(self.is_needed, keep)
        choice.take_from(order.of(namespace), excess)
        if fits := choice.num_bytes >= excess:
            for name in list(self._over_limit):
                if choice.num_bytes >= needed_bytes:
                    break
                namespace_excess = sizes[name] - self._namespace_limit
                if namespace_excess <= 0:
                    del self._over_limit[name]
                elif name != namespace:
                    choice.take_from(
                        order.of(name), min(choice.num_bytes + namespace_excess, needed_bytes)
                    )
            choice.take_from(order, needed_bytes)
            fits = choice.num_bytes >= needed_bytes
        choice.count_uses(order)
        return choice.victims if fits else None

    def choose_for_peer(self, num_bytes: int) -> list[StoredSegment]:
        """Choose segments to evict for another server, from what exceeds this server's share."""
        choice = _Choice(self.is_needed, StoredMatch())
        choice.take_from(self._tree.order, min(num_bytes, -self.free_share_bytes))
        choice.count_uses(self._tree.order)
        return choice.victims

    def collect_removals(self) -> None:
        """Count the bytes removed in folders that no process serves."""
        for path, removing in [removal for removal in self._removing.items() if removal[1].done()]:
            del self._removing[path]
            if removing.exception() is not None or not removing.result():
                self._served[path] = time.monotonic()
            else:
                # An estimate until the next measurement; without it more would be removed.
                trimmed_bytes = removing.result()
                self._health.free_bytes += self._other_stores.pop(path, trimmed_bytes)

    def _remove_unserved(self, needed_bytes: int) -> bool:
        """Start removing stores of other models, or the oldest segments of a folder of this model,
        that no process serves; returns whether a removal is in progress."""
        now = time.monotonic()
        removing_bytes = sum(self._other_stores.get(path, 0) for path in self._removing)
        for path in [*reversed(self._other_stores), *self._peers.folders]:
            served_at = self._served.get(path, -math.inf)
            if path in self._removing or now - served_at <= _CHECK_SECONDS:
                continue
            if path in self._other_stores and removing_bytes < needed_bytes:
                removing_bytes += self._other_stores[path]
                self._removing[path] = self._worker.submit(remove_store, self._worker.files, path)
            elif path not in self._other_stores and not self._removing:
                self._removing[path] = self._worker.submit(self._peers.trim, path, needed_bytes)
        return bool(self._removing)


class _Choice:
    """Segments chosen for eviction, dependents first, and the bytes of their files."""

    def __init__(self, is_needed: Callable[[StoredSegment], bool], keep: StoredMatch) -> None:
        self.victims: list[StoredSegment] = []
        self.num_bytes = 0
        # Skipped because they are needed, or other servers'.
        self._in_use: dict[StoredSegment, None] = {}
        self._is_needed = is_needed
        self._spared = {span.segment for span in keep.spans}
        # Number of remaining dependents, for segments that lose some.
        self._remaining: dict[StoredSegment, int] = {}

    def take_from(self, segments: Iterable[StoredSegment], max_bytes: float) -> None:
        """Choose segments in this order until all choices have `max_bytes`."""
        # Dependents of a segment come before it, so one pass is enough.
        for segment in segments:
            candidate: StoredSegment | None = segment
            while candidate is not None and self.num_bytes < max_bytes:
                candidate = self._consider(candidate)
            if self.num_bytes >= max_bytes:
                break

    def _consider(self, segment: StoredSegment) -> StoredSegment | None:
        """Choose a segment, if possible; returns a segment to consider next because of it."""
        num_remaining = self._remaining.get(segment, segment.num_dependents)
        if num_remaining or segment in self._spared or not segment.on_disk:
            return None
        is_own = segment.foreign_dir is None
        if is_own and self._is_needed(segment):
            self._in_use[segment] = None
            return None
        self._spared.add(segment)
        if is_own:
            self.victims.append(segment)
            self.num_bytes += segment.file_bytes
        else:
            # Its server removes it, and it does not keep its ancestors.
            self._in_use[segment] = None
        parent = segment.parent
        while parent is not None:
            num_left = self._remaining.get(parent, parent.num_dependents) - 1
            self._remaining[parent] = num_left
            if num_left or not parent.lost:
                break
            # A tombstone is removed with its last dependent.
            parent = parent.parent
        # Its level may have exceeded its priority only because of the chosen segment.
        return parent if parent is not None and parent.info.priority < parent.level else None

    def count_uses(self, order: EvictionOrder) -> None:
        """Count being needed as a use, so that the next search need not skip these again."""
        for segment in self._in_use:
            order.count_use(segment)
