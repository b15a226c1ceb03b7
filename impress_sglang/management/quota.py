"""Whether a file fits under the quota and above the free-space floor, and what goes if not.

Quarantine goes first, then stores of other models that nobody serves, the oldest before others;
then the least recently used segment of the lowest priority that nothing builds on, nobody reads and
nobody waits for: first of a namespace that has more than it may.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

from impress_sglang.config import ImpressConfig, bytes_of
from impress_sglang.management.keeper import Keeper
from impress_sglang.management.monitor import Monitor
from impress_sglang.management.quarantine import unremoved
from impress_sglang.management.stored import SegmentState, StoredMatch, StoredSegment
from impress_sglang.management.tree import StoredTree
from impress_sglang.management.wear import WriteBudget
from impress_sglang.storage.segment import Priority


class Quota:
    """Counts the bytes of one store directory; owned by the store's thread."""

    def __init__(
        self,
        config: ImpressConfig,
        tree: StoredTree,
        keeper: Keeper,
        monitor: Monitor,
        others: dict[Path, int],
        is_needed: Callable[[str], bool],
        reserved: Callable[[], int],
        budget: WriteBudget,
    ) -> None:
        """Count what is there.

        Args:
            config: of the server.
            tree: of the segments.
            keeper: removes stores, and knows what else stands in ours.
            monitor: knows the free space.
            others: stores of other models, latest first, and their bytes.
            is_needed: whether requests read a segment, or wait for it.
            reserved: bytes of a file that is being written in the place of another.
            budget: of what is written.
        """
        self.budget = budget
        self._reserved = reserved
        self._config = config
        self._tree = tree
        self._keeper = keeper
        self._monitor = monitor
        self._others = others
        self._removing: dict[Path, Future[bool]] = {}
        self._served: set[Path] = set()
        self._is_needed = is_needed
        self.used_bytes = 0
        """Of segments in the tree, and of those that are being written."""
        # Of that what each namespace has; none of these is 0.
        self._held: dict[str, int] = {}
        # Namespaces that have more than they may, as when they may have less than before.
        self._over: dict[str, None] = {}
        held = Counter[str]()
        for segment in tree.segments():
            held[segment.info.namespace] += segment.file_bytes
        for name, num_bytes in held.items():
            self._count(name, num_bytes)
        self.pending_bytes = 0
        """What of that is not on the disk yet."""

    @property
    def other_models_bytes(self) -> int:
        """Of the stores of other models, as of the start of this process."""
        return sum(self._others.values())

    def summary(self) -> dict[str, int]:
        """Bytes on the SSD, and how many they may be, for the statistics page."""
        return {
            "used_bytes": self.used_bytes + self._reserved(),
            "quarantined_bytes": self._keeper.quarantine.num_bytes,
            "other_models_bytes": self.other_models_bytes,
            "quota_bytes": bytes_of(self._config.ssd_gb),
            **self.budget.summary(),
        }

    def remove(self, segment: StoredSegment) -> None:
        """A file is on its way out."""
        self._count(segment.info.namespace, -segment.file_bytes)
        # Until the next measurement.
        self._monitor.free_bytes += segment.file_bytes

    def begin(self, segment: StoredSegment) -> None:
        """A file is going to be written."""
        self.budget.spend(segment.file_bytes)
        self._count(segment.info.namespace, segment.file_bytes)
        self.pending_bytes += segment.file_bytes

    def end(self, segment: StoredSegment, *, written: bool) -> None:
        """A file is written, or will not be."""
        self.pending_bytes -= segment.file_bytes
        if written:
            self._monitor.free_bytes -= segment.file_bytes
        else:
            self.budget.spend(-segment.file_bytes)
            self._count(segment.info.namespace, -segment.file_bytes)

    def replace(self, segment: StoredSegment, old_bytes: int) -> None:
        """The file of a segment has taken the place of another, which is on its way out."""
        self.budget.spend(segment.file_bytes)
        more = segment.file_bytes - old_bytes
        self._count(segment.info.namespace, more)
        self._monitor.free_bytes -= more

    def _count(self, name: str, more: int) -> None:
        """A namespace has so many bytes more than were counted."""
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
        """How much more that is than a namespace may have; 0 or less if it is not."""
        most = bytes_of(self._config.namespace_gb)
        return max(held - most, 0) if most else 0

    def unremoved(self) -> frozenset[str]:
        """What should have gone and could not, by name: it counts as still there."""
        return unremoved(self._keeper.undeleted, self._keeper.quarantine)

    def missing(self, num_bytes: int) -> int:
        """How much more must be free for a file to fit; 0 or less if it does."""
        keeper, config = self._keeper, self._config
        unserved = keeper.quarantine.num_bytes + keeper.unused_bytes
        unserved += sum(list(keeper.undeleted.values()))
        reserved = self._reserved()
        used = self.used_bytes + reserved + unserved + self.other_models_bytes
        pending = self.pending_bytes + reserved
        available = self._monitor.free_bytes - pending - bytes_of(config.min_free_gb)
        return max(used + num_bytes - bytes_of(config.ssd_gb), num_bytes - available)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a file may be written without evicting anything."""
        return self.missing(num_bytes) <= 0 and not self.budget.is_spent

    def make_room(
        self,
        segment: StoredSegment,
        keep: StoredMatch,
        remove: Callable[[Sequence[StoredSegment]], None],
        first: StoredSegment | None = None,
    ) -> bool:
        """Remove until a file fits; False, and nothing of ours is removed, if it cannot.

        While the store of another model is being removed it is False as well: whether a process
        serves it, and so whether there will be room, is not known before.

        Args:
            segment: in the file.
            keep: what it builds on, which stays.
            remove: takes segments out, and their files.
            first: a segment that has to go in any case.
        """
        num_bytes, namespace = segment.file_bytes, segment.info.namespace
        needed = self.missing(num_bytes)
        quarantine = self._keeper.quarantine
        if needed > 0 and (quarantined := quarantine.num_bytes) and not quarantine.is_stuck:
            # That is done before anything else is written.
            self._keeper.empty_quarantine()
            needed -= quarantined
        if needed > 0 and self._remove_others(needed):
            return False
        own = self._exceeds(self._held.get(namespace, 0) + num_bytes)
        victims = self._victims(needed, own, namespace, keep, first)
        if victims:
            remove(victims)
        return victims is not None

    def poll(self) -> None:
        """Take in what became of the stores of other models."""
        for path, removing in [own for own in self._removing.items() if own[1].done()]:
            del self._removing[path]
            if removing.exception() is None and removing.result():
                self._monitor.free_bytes += self._others.pop(path)
            else:
                self._served.add(path)

    def _remove_others(self, needed: int) -> bool:
        """Begin to remove stores of other models; whether that is under way."""
        going = sum(self._others[path] for path in self._removing)
        for path in reversed(self._others):
            if going >= needed:
                break
            if path not in self._served and path not in self._removing:
                going += self._others[path]
                self._removing[path] = self._keeper.remove_store(path)
        return bool(self._removing)

    def _victims(
        self,
        needed: int,
        own: int,
        namespace: str,
        keep: StoredMatch,
        first: StoredSegment | None,
    ) -> list[StoredSegment] | None:
        """Who goes, what builds on others before them; None if that would not be enough.

        So many bytes are `needed`, and so many of them, or more, are its `own` of a namespace.
        """
        if needed > self.used_bytes - self.pending_bytes or own > self._held.get(namespace, 0):
            return None
        uses, choice = self._tree.uses, _Choice(self._is_needed, keep)
        fits = first is None or choice.take(first)
        if fits:
            choice.take_from(uses.of(namespace), own)
            fits = choice.num_bytes >= own
        if fits:
            for name in list(self._over) if choice.num_bytes < needed else ():
                excess = 0 if name == namespace else self._exceeds(self._held[name])
                choice.take_from(uses.of(name), min(choice.num_bytes + excess, needed))
            choice.take_from(uses, needed)
        fits = fits and choice.num_bytes >= needed
        # That is a use, and the next one who looks need not come by them again.
        for segment, passed in choice.in_use.items():
            uses.note(segment, passed if fits else segment.passed)
        return choice.victims if fits else None


class _Choice:
    """Segments that may go, what builds on others before them, and the bytes of their files."""

    def __init__(self, is_needed: Callable[[str], bool], keep: StoredMatch) -> None:
        self.victims: list[StoredSegment] = []
        self.num_bytes = 0
        self.in_use: dict[StoredSegment, Priority] = {}
        """Those that could not be taken because somebody needs them, and up to which level others
        were looked at in their place."""
        self._is_needed = is_needed
        self._spared = {span.segment for span in keep.spans}
        # Of segments of which some dependents go, how many stay.
        self._staying: dict[str, int] = {}

    def take(self, segment: StoredSegment) -> bool:
        """Take a segment, if it may go."""
        built_on = self._staying.get(segment.segment_id, segment.num_dependents)
        if built_on or segment in self._spared or not segment.on_disk:
            return False
        if self._is_needed(segment.segment_id):
            self.in_use.setdefault(segment, Priority.LOW)
            return False
        self.victims.append(segment)
        self.num_bytes += segment.file_bytes
        self._spared.add(segment)
        _count_out(segment, self._staying)
        return True

    def take_from(self, segments: Iterable[StoredSegment], most: int) -> None:
        """Take the first ones until there are so many bytes, with what was taken before."""
        passed, level = list[StoredSegment](), Priority.LOW
        # What builds on a segment comes before it, so one look at each is enough.
        for segment in segments:
            if self.num_bytes >= most:
                break
            level = segment.level
            if not self.take(segment) and segment in self.in_use:
                passed.append(segment)
        for segment in passed:
            self.in_use[segment] = max(self.in_use[segment], level)


def _count_out(segment: StoredSegment, staying: dict[str, int]) -> None:
    """Of what is above a segment that goes, how many segments that build on it still stay."""
    above = segment.parent
    while above is not None:
        staying[above.segment_id] = staying.get(above.segment_id, above.num_dependents) - 1
        if staying[above.segment_id] or above.state is not SegmentState.LOST:
            return
        # It goes with the last that builds on it.
        above = above.parent
