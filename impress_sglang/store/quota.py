"""Whether a file fits under the quota and above the free-space floor, and what goes if not.

Quarantine goes first, then stores of other models that no process serves, oldest first, then the
oldest segments of this model in folders that no process serves. Then go segments that nothing
builds on and no request reads or waits for: lowest priority first, then least recently used.
Namespaces that exceed their limit come before others.

What other servers of this model have counts as well, but each removes its own: who lacks room asks
the others, and those that have more than their share give some of it.
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
# Seconds after which it is asked again whether a process serves a store.
_LOCKED_SECONDS = 60.0


class WriteBudget:
    """How much may be written per day to the drive, whose lifetime depends on that.

    Of one server, for any store it opens; full at its start. A bucket holds a day's bytes and fills
    at a steady rate. A file may take it below zero, so that none is too large for it; on average no
    more than the limit is written. Once the bucket is empty, nothing is stored until it has an
    hour's bytes again.
    """

    def __init__(
        self, gb_per_day: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`gb_per_day`: 0 for no limit."""
        self._most = bytes_of(gb_per_day)
        self._clock = clock
        self._left = float(self._most)
        self._filled_at = clock()
        self._spent = False

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be stored now; a change is logged."""
        if self._most:
            enough = self._most / _HOURS if self._spent else 1
            if self._spent == (self._fill() >= enough):
                self._spent = not self._spent
                state = "spent: no new prompts" if self._spent else "there again: prompts"
                logger.warning("--impress-write-gb-per-day is %s are stored", state)
        return self._spent

    def spend(self, num_bytes: int) -> None:
        """Take bytes that are going to be written; negative: give back those that were not."""
        if self._most:
            self._left = self._fill() - num_bytes

    def summary(self) -> dict[str, int]:
        """Bytes that may be written per day, and now."""
        return {
            "write_budget_bytes": self._most,
            "write_budget_left_bytes": max(int(self._fill()), 0),
        }

    def _fill(self) -> float:
        """Bytes that may be written now; a value below 0 has to be made up for first."""
        now = self._clock()
        self._left += (now - self._filled_at) / _DAY_S * self._most
        self._left = min(self._left, self._most)
        self._filled_at = now
        return self._left


class Quota:
    """Counts the bytes of one store directory; owned by the store's thread."""

    def __init__(
        self,
        config: ImpressConfig,
        disk: StoreDisk,
        segments: SegmentReaders,
        lookahead: LookAhead,
        budget: WriteBudget,
    ) -> None:
        """Count what `disk` has; `budget` limits the bytes written to the drive."""
        self.budget = budget
        self._config, self._segments, self._lookahead = config, segments, lookahead
        self._pins = disk.pins
        self._tree, self._worker, self._health = disk.tree, disk.worker, disk.health
        self._others, self._peers, self._bucket = disk.others, disk.peers, disk.bucket
        # Removals of what no process serves, by the folder of a store.
        self._removing: dict[Path, Future[Any]] = {}
        # When it was found that a process serves a store.
        self._served: dict[Path, float] = {}
        self.reserved_bytes = 0
        """Bytes of a file that is being written to replace another one."""
        self.adopting_bytes = 0
        """Bytes of a file of another store that is becoming ours."""
        self.pending_bytes = 0
        """The part of the tree's bytes that is not on the disk yet."""
        self._most = bytes_of(config.namespace_gb) or math.inf
        # Who was above it at this start, as it was lowered: later, each gives what it has above it.
        held = self._tree.held
        self._over = dict.fromkeys(name for name in held if held[name] > self._most)

    def summary(self) -> dict[str, int]:
        """Bytes used on the SSD and their limits, for the statistics page."""
        return {
            "used_bytes": self._tree.file_bytes + self.reserved_bytes,
            "quarantined_bytes": self._worker.quarantined_bytes,
            "other_models_bytes": sum(self._others.values()),
            "other_servers_bytes": self._peers.num_bytes,
            "quota_bytes": bytes_of(self._config.ssd_gb),
            **self.budget.summary(),
        }

    def missing(self, num_bytes: int) -> int:
        """Bytes that must become free for a file of `num_bytes` to fit; 0 or less if it fits."""
        worker, config = self._worker, self._config
        used = self._tree.file_bytes + self.reserved_bytes + self.adopting_bytes
        used += worker.quarantined_bytes + worker.unused_bytes + worker.unremoved_bytes
        used += sum(self._others.values()) + self._peers.num_bytes
        used += 0 if self._bucket is None else self._bucket.files.open_bytes
        pending = self.pending_bytes + self.reserved_bytes
        available = self._health.free_bytes - pending - bytes_of(config.min_free_gb)
        return max(used + num_bytes - bytes_of(config.ssd_gb), num_bytes - available)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a file may be written without evicting anything."""
        return self.missing(num_bytes) <= 0 and not self.budget.is_spent

    @property
    def lacks(self) -> int:
        """How many bytes are missing to a share of the directory; negative: more are used."""
        share = bytes_of(self._config.ssd_gb) // (1 + len(self._peers.folders))
        return share - self._tree.file_bytes

    def is_needed(self, segment: StoredSegment) -> bool:
        """Whether a segment must stay: it is read, awaited or pinned."""
        name = segment.segment_id
        return self._segments.is_open(name) or name in self._lookahead or name in self._pins

    def make_room(self, segment: StoredSegment, keep: StoredMatch) -> list[StoredSegment] | None:
        """Find out what has to go for a file, and begin to remove what is not ours.

        Args:
            segment: the segment to be written.
            keep: the match that it builds on, which stays.

        Returns:
            Segments to evict, dependents first; None if that fails, and while the store of another
            model is being removed: whether a process serves that store, and so whether there will
            be room, is not known before.
        """
        num_bytes, namespace = segment.file_bytes, segment.info.namespace
        needed, held = self.missing(num_bytes), self._tree.held
        quarantined = self._worker.quarantined_bytes
        if needed > 0 and quarantined and QUARANTINE not in self._worker.unremoved():
            # The worker does this before it writes anything else.
            self._worker.submit(self._worker.empty_quarantine)
            needed -= quarantined
        if needed > 0 and self._remove_unserved(needed):
            return None
        # Of what is needed, the namespace must give at least its own excess.
        excess = max(held[namespace] + num_bytes - self._most, 0)
        if needed > self._tree.file_bytes - self.pending_bytes or excess > held[namespace]:
            return None
        order, choice = self._tree.order, _Choice(self.is_needed, keep)
        choice.take_from(order.of(namespace), excess)
        if fits := choice.num_bytes >= excess:
            for name in list(self._over):
                if choice.num_bytes >= needed:
                    break
                more = held[name] - self._most
                if more <= 0:
                    del self._over[name]
                elif name != namespace:
                    choice.take_from(order.of(name), min(choice.num_bytes + more, needed))
            choice.take_from(order, needed)
            fits = choice.num_bytes >= needed
        choice.note_uses(order)
        return choice.victims if fits else None

    def share_out(self, num_bytes: int) -> list[StoredSegment]:
        """What to evict for another server that lacks room: no more than what is above a share."""
        choice = _Choice(self.is_needed, StoredMatch())
        choice.take_from(self._tree.order, min(num_bytes, -self.lacks))
        choice.note_uses(self._tree.order)
        return choice.victims

    def take_removals(self) -> None:
        """Count what was removed of stores that no process serves."""
        for path, removing in [removal for removal in self._removing.items() if removal[1].done()]:
            del self._removing[path]
            if removing.exception() is not None or not removing.result():
                self._served[path] = time.monotonic()
            elif path in self._others:
                self._health.free_bytes += self._others.pop(path)

    def _remove_unserved(self, needed: int) -> bool:
        """Start removing stores of other models, or the oldest segments of a folder of this one,
        that no process serves; returns whether that is under way."""
        now = time.monotonic()
        going = sum(self._others.get(path, 0) for path in self._removing)
        for path in [*reversed(self._others), *self._peers.folders]:
            asked_at = self._served.get(path, -math.inf)
            if path in self._removing or now - asked_at <= _LOCKED_SECONDS:
                continue
            if path in self._others and going < needed:
                going += self._others[path]
                self._removing[path] = self._worker.submit(remove_store, self._worker.files, path)
            elif path not in self._others and not self._removing:
                self._removing[path] = self._worker.submit(self._peers.trim, path, needed)
        return bool(self._removing)


class _Choice:
    """Segments chosen for eviction, dependents first, and the bytes of their files."""

    def __init__(self, is_needed: Callable[[StoredSegment], bool], keep: StoredMatch) -> None:
        self.victims: list[StoredSegment] = []
        self.num_bytes = 0
        # Passed over because they are needed, or not ours.
        self._in_use: dict[StoredSegment, None] = {}
        self._is_needed = is_needed
        self._spared = {span.segment for span in keep.spans}
        # For segments that lose some of their dependents: how many of these stay.
        self._staying: dict[StoredSegment, int] = {}

    def take_from(self, segments: Iterable[StoredSegment], most: float) -> None:
        """Choose segments in this order until there are `most` bytes with earlier choices."""
        # Dependents of a segment come before it, so one look at each is enough.
        for segment in segments:
            candidate: StoredSegment | None = segment
            while candidate is not None and self.num_bytes < most:
                candidate = self._consider(candidate)
            if self.num_bytes >= most:
                break

    def _consider(self, segment: StoredSegment) -> StoredSegment | None:
        """Choose a segment, if it may go; returns what goes next because of it."""
        built_on = self._staying.get(segment, segment.num_dependents)
        if built_on or segment in self._spared or not segment.on_disk:
            return None
        ours = segment.home is None
        if ours and self._is_needed(segment):
            self._in_use[segment] = None
            return None
        self._spared.add(segment)
        if ours:
            self.victims.append(segment)
            self.num_bytes += segment.file_bytes
        else:
            # It is for its server to remove, and does not keep what it builds on.
            self._in_use[segment] = None
        above = segment.parent
        while above is not None:
            left = self._staying.get(above, above.num_dependents) - 1
            self._staying[above] = left
            if left or not above.lost:
                break
            # A hole goes with the last one that builds on it.
            above = above.parent
        # It may have had a higher level than its priority only because of what goes now.
        return above if above is not None and above.info.priority < above.level else None

    def note_uses(self, order: EvictionOrder) -> None:
        """Let being needed count as a use, so that the next search need not pass these again."""
        for used in self._in_use:
            order.note(used)
