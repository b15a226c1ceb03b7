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
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from impress_sglang.config import ImpressConfig, bytes_of
from impress_sglang.storage.directory import remove_store
from impress_sglang.store.disk import StoreDisk
from impress_sglang.store.stored import SegmentState, StoredMatch, StoredSegment

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

    def __init__(self, config: ImpressConfig, disk: StoreDisk, budget: WriteBudget) -> None:
        """Count the bytes that are stored now.

        `disk` has the segments, the stores of other models, and the free space; `budget` limits the
        bytes written to the drive.
        """
        self.budget = budget
        self._config = config
        self._tree = disk.tree
        self._worker = disk.worker
        self._health = disk.health
        self._others = disk.others
        self._peers, self._bucket = disk.peers, disk.bucket
        self._removing: dict[Path, Future[bool]] = {}
        self._trimming: dict[Path, Future[int]] = {}
        # When it was found that a process serves a store.
        self._served: dict[Path, float] = {}
        self.reserved_bytes = 0
        """Bytes of a file that is being written to replace another one."""
        self.adopting_bytes = 0
        """Bytes of a file of another store that is becoming ours."""
        self.used_bytes = 0
        """Bytes of the segments in the tree, including those that are being written."""
        # The part of it that each namespace has; no value is 0.
        self._held: dict[str, int] = {}
        # Namespaces above their limit, for example because the limit was lowered.
        self._over: dict[str, None] = {}
        held = Counter[str]()
        for segment in disk.tree.segments():
            held[segment.info.namespace] += segment.file_bytes
        for name, num_bytes in held.items():
            self._count(name, num_bytes)
        self.pending_bytes = 0
        """The part of `used_bytes` that is not on the disk yet."""

    @property
    def other_models_bytes(self) -> int:
        """Bytes of the stores of other models, as measured at the start of this process."""
        return sum(self._others.values())

    def summary(self) -> dict[str, int]:
        """Bytes used on the SSD and their limits, for the statistics page."""
        return {
            "used_bytes": self.used_bytes + self.reserved_bytes,
            "quarantined_bytes": self._worker.quarantined_bytes,
            "other_models_bytes": self.other_models_bytes,
            "other_servers_bytes": self._peers.num_bytes,
            "quota_bytes": bytes_of(self._config.ssd_gb),
            **self.budget.summary(),
        }

    def remove(self, segment: StoredSegment) -> None:
        """Account for a file that is being removed."""
        self._count(segment.info.namespace, -segment.file_bytes)
        # An estimate until the next measurement.
        self._health.free_bytes += segment.file_bytes

    def begin(self, segment: StoredSegment) -> None:
        """Account for a file that is going to be written."""
        self.budget.spend(segment.file_bytes)
        self._count(segment.info.namespace, segment.file_bytes)
        self.pending_bytes += segment.file_bytes

    def end(self, segment: StoredSegment, *, written: bool) -> None:
        """Account for the end of a write, which may have failed."""
        self.pending_bytes -= segment.file_bytes
        if written:
            self._health.free_bytes -= segment.file_bytes
        else:
            self.budget.spend(-segment.file_bytes)
            self._count(segment.info.namespace, -segment.file_bytes)

    def replace(self, segment: StoredSegment, old_bytes: int) -> None:
        """Account for a segment's new file, whose old one of `old_bytes` is being removed."""
        self.budget.spend(segment.file_bytes)
        more = segment.file_bytes - old_bytes
        self._count(segment.info.namespace, more)
        self._health.free_bytes -= more

    def take_over(self, segment: StoredSegment) -> None:
        """Account for a file of another store that is ours now."""
        self.budget.spend(segment.file_bytes)
        self._count(segment.info.namespace, segment.file_bytes)

    def _count(self, name: str, more: int) -> None:
        """Add `more` bytes, perhaps fewer than 0, to the count of a namespace."""
        self.used_bytes += more
        held = self._held.get(name, 0) + more
        if held:
            self._held[name] = held
        else:
            self._held.pop(name, None)
        if self._exceeds(held):
            self._over[name] = None
        else:
            self._over.pop(name, None)

    def _exceeds(self, held: int) -> int:
        """By how many bytes `held` exceeds the limit of a namespace; 0 if it does not."""
        most = bytes_of(self._config.namespace_gb)
        return max(held - most, 0) if most else 0

    def missing(self, num_bytes: int) -> int:
        """Bytes that must become free for a file of `num_bytes` to fit; 0 or less if it fits."""
        worker, config = self._worker, self._config
        unserved = worker.quarantined_bytes + worker.unused_bytes
        unserved += sum(list(worker.undeleted.values()))
        used = self.used_bytes + self.reserved_bytes + self.adopting_bytes + unserved
        used += self.other_models_bytes + self._peers.num_bytes
        used += 0 if self._bucket is None else self._bucket.files.open_bytes
        pending = self.pending_bytes + self.reserved_bytes
        available = self._health.free_bytes - pending - bytes_of(config.min_free_gb)
        return max(used + num_bytes - bytes_of(config.ssd_gb), num_bytes - available)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a file may be written without evicting anything."""
        return self.missing(num_bytes) <= 0 and not self.budget.is_spent

    def make_room(
        self, segment: StoredSegment, keep: StoredMatch, is_needed: Callable[[str], bool]
    ) -> list[StoredSegment] | None:
        """Find out what has to go for a file, and begin to remove what is not ours.

        Args:
            segment: the segment to be written.
            keep: the match that it builds on, which stays.
            is_needed: whether a segment must stay: it is read, awaited or pinned.

        Returns:
            Segments to evict, dependents first; None if that fails, and while the store of another
            model is being removed: whether a process serves that store, and so whether there will
            be room, is not known before.
        """
        num_bytes, namespace = segment.file_bytes, segment.info.namespace
        needed = self.missing(num_bytes)
        quarantined = self._worker.quarantined_bytes
        if needed > 0 and quarantined and self._worker.keeps_quarantine:
            # The worker does this before it writes anything else.
            self._worker.submit(self._worker.tidy, False)
            needed -= quarantined
        if needed > 0 and (self._remove_others(needed) or self._trim_others(needed)):
            return None
        # Of what is needed, the namespace must give at least its own excess.
        excess = self._exceeds(self._held.get(namespace, 0) + num_bytes)
        if needed > self.used_bytes - self.pending_bytes or excess > self._held.get(namespace, 0):
            return None
        uses, choice = self._tree.order, _Choice(is_needed, keep)
        choice.take_from(uses.of(namespace), excess)
        fits = choice.num_bytes >= excess
        if fits:
            for name in list(self._over) if choice.num_bytes < needed else ():
                more = 0 if name == namespace else self._exceeds(self._held[name])
                choice.take_from(uses.of(name), min(choice.num_bytes + more, needed))
            choice.take_from(uses, needed)
            fits = choice.num_bytes >= needed
        # Being needed counts as a use, so that the next search need not pass these again.
        for used in choice.in_use:
            uses.note(used)
        return choice.victims if fits else None

    def take_removals(self) -> None:
        """Count the stores of other models that were removed; others are served by a process."""
        for path, removing in [own for own in self._removing.items() if own[1].done()]:
            del self._removing[path]
            if removing.exception() is None and removing.result():
                self._health.free_bytes += self._others.pop(path)
            else:
                self._served[path] = time.monotonic()

    @property
    def lacks(self) -> int:
        """How many bytes are missing to a share of the directory; negative: more are used."""
        return bytes_of(self._config.ssd_gb) // (1 + len(self._peers.folders)) - self.used_bytes

    def share_out(self, num_bytes: int, is_needed: Callable[[str], bool]) -> list[StoredSegment]:
        """What to evict for another server that lacks room: no more than what is above a share."""
        choice = _Choice(is_needed, StoredMatch())
        choice.take_from(self._tree.order, min(num_bytes, -self.lacks))
        for used in choice.in_use:
            self._tree.order.note(used)
        return choice.victims

    def _trim_others(self, needed: int) -> bool:
        """Start removing segments of this model that no process serves; returns whether that is
        under way."""
        for path, own in list(self._trimming.items()):
            if own.done():
                del self._trimming[path]
                if own.exception() is not None or not own.result():
                    self._served[path] = time.monotonic()
        for path in self._peers.folders:
            if self._may_be_free(path) and not self._trimming:
                self._trimming[path] = self._worker.submit(self._peers.trim, path, needed)
        return bool(self._trimming)

    def _may_be_free(self, path: Path) -> bool:
        return time.monotonic() - self._served.get(path, -math.inf) > _LOCKED_SECONDS

    def _remove_others(self, needed: int) -> bool:
        """Start removing stores of other models; returns whether a removal is under way."""
        going = sum(self._others[path] for path in self._removing)
        for path in reversed(self._others):
            if going >= needed:
                break
            if self._may_be_free(path) and path not in self._removing:
                going += self._others[path]
                self._removing[path] = self._worker.submit(remove_store, self._worker.files, path)
        return bool(self._removing)


class _Choice:
    """Segments chosen for eviction, dependents first, and the bytes of their files."""

    def __init__(self, is_needed: Callable[[str], bool], keep: StoredMatch) -> None:
        self.victims: list[StoredSegment] = []
        self.num_bytes = 0
        self.in_use: dict[StoredSegment, None] = {}
        """Segments that were passed over because they are needed, or not ours."""
        self._is_needed = is_needed
        self._spared = {span.segment for span in keep.spans}
        # For segments that lose some of their dependents: how many of these stay.
        self._staying: dict[str, int] = {}

    def _take(self, segment: StoredSegment) -> None:
        """Choose a segment, if it may go."""
        built_on = self._staying.get(segment.segment_id, segment.num_dependents)
        if built_on or segment in self._spared or not segment.on_disk:
            return
        if segment.home is not None:
            # It is for its server to remove, and does not keep what it builds on.
            self._spared.add(segment)
            self.in_use[segment] = None
            _count_out(segment, self._staying)
            return
        if self._is_needed(segment.segment_id):
            self.in_use[segment] = None
            return
        self.victims.append(segment)
        self.num_bytes += segment.file_bytes
        self._spared.add(segment)
        _count_out(segment, self._staying)

    def take_from(self, segments: Iterable[StoredSegment], most: int) -> None:
        """Choose segments in this order until there are `most` bytes with earlier choices."""
        # Dependents of a segment come before it, so one look at each is enough.
        for segment in segments:
            if self.num_bytes >= most:
                break
            self._take(segment)


def _count_out(segment: StoredSegment, staying: dict[str, int]) -> None:
    """Count, for the segments above one that goes, how many of their dependents stay."""
    above = segment.parent
    while above is not None:
        staying[above.segment_id] = staying.get(above.segment_id, above.num_dependents) - 1
        if staying[above.segment_id] or above.state is not SegmentState.LOST:
            return
        # A lost segment goes with the last one that builds on it.
        above = above.parent
