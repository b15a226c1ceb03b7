"""Whether a file fits under the quota and above the free-space floor, and what goes if not.

Stores of other models that nobody serves go first, the oldest first; then the least recently used
segment that nothing builds on, nobody reads and nobody waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from impress_sglang.config import ImpressConfig, bytes_of
from impress_sglang.management.keeper import Keeper
from impress_sglang.management.monitor import Monitor
from impress_sglang.management.stored import SegmentState, StoredMatch, StoredSegment
from impress_sglang.management.tree import StoredTree


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
        """
        self._reserved = reserved
        self._config = config
        self._tree = tree
        self._keeper = keeper
        self._monitor = monitor
        self._others = others
        self._removing: dict[Path, Future[bool]] = {}
        self._served: set[Path] = set()
        self._is_needed = is_needed
        self.used_bytes = sum(segment.file_bytes for segment in tree.segments())
        """Of segments in the tree, and of those that are being written."""
        self.pending_bytes = 0
        """What of that is not on the disk yet."""

    @property
    def other_models_bytes(self) -> int:
        """Of the stores of other models, as of the start of this process."""
        return sum(self._others.values())

    def remove(self, num_bytes: int) -> None:
        """A file is on its way out."""
        self.used_bytes -= num_bytes
        # Until the next measurement.
        self._monitor.free_bytes += num_bytes

    def begin(self, num_bytes: int) -> None:
        """A file is going to be written."""
        self.used_bytes += num_bytes
        self.pending_bytes += num_bytes

    def end(self, num_bytes: int, *, written: bool) -> None:
        """A file is written, or will not be."""
        self.pending_bytes -= num_bytes
        if written:
            self._monitor.free_bytes -= num_bytes
        else:
            self.used_bytes -= num_bytes

    def replace(self, old_bytes: int, new_bytes: int) -> None:
        """A file has taken the place of another, which is on its way out."""
        self.remove(old_bytes)
        self.used_bytes += new_bytes
        self._monitor.free_bytes -= new_bytes

    def missing(self, num_bytes: int) -> int:
        """How much more must be free for a file to fit; 0 or less if it does."""
        keeper, config = self._keeper, self._config
        on_copy_stream = keeper.quarantined_bytes + keeper.unused_bytes
        on_copy_stream += sum(list(keeper.undeleted.values()))
        reserved = self._reserved()
        used = self.used_bytes + reserved + on_copy_stream + self.other_models_bytes
        pending = self.pending_bytes + reserved
        available = self._monitor.free_bytes - pending - bytes_of(config.min_free_gb)
        return max(used + num_bytes - bytes_of(config.ssd_gb), num_bytes - available)

    def make_room(
        self,
        num_bytes: int,
        keep: StoredMatch,
        remove: Callable[[Sequence[StoredSegment]], None],
        first: StoredSegment | None = None,
    ) -> bool:
        """Remove until a file fits; False, and nothing of ours is removed, if it cannot.

        While the store of another model is being removed it is False as well: whether a process
        serves it, and so whether there will be room, is not known before.

        Args:
            num_bytes: of the file.
            keep: what it builds on, which stays.
            remove: takes segments out, and their files.
            first: a segment that has to go in any case.
        """
        needed = self.missing(num_bytes)
        if needed > 0 and self._remove_others(needed):
            return False
        victims = self._victims(needed, keep, first)
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
        self, needed: int, keep: StoredMatch, first: StoredSegment | None
    ) -> list[StoredSegment] | None:
        """Who goes, what builds on others before them; None if that would not be enough."""
        if needed > self.used_bytes - self.pending_bytes:
            return None
        victims: list[StoredSegment] = []
        in_use: list[StoredSegment] = []
        spared = {span.segment for span in keep.spans}
        # Of segments of which some dependents go, how many stay.
        staying: dict[str, int] = {}

        def take(segment: StoredSegment) -> bool:
            built_on = staying.get(segment.segment_id, segment.dependents)
            if built_on or segment in spared or not segment.on_disk:
                return False
            if self._is_needed(segment.segment_id):
                in_use.append(segment)
                return False
            victims.append(segment)
            spared.add(segment)
            _count_out(segment, staying)
            return True

        if first is not None:
            if not take(first):
                return None
            needed -= first.file_bytes
        # What builds on a segment comes before it, so one look at each is enough.
        for segment in self._tree.uses:
            if needed <= 0:
                break
            if take(segment):
                needed -= segment.file_bytes
        # That is a use, and the next one who looks need not come by them again.
        for segment in in_use:
            self._tree.uses.note(segment)
        return victims if needed <= 0 else None


def _count_out(segment: StoredSegment, staying: dict[str, int]) -> None:
    """Of what is above a segment that goes, how many segments that build on it still stay."""
    above = segment.parent
    while above is not None:
        staying[above.segment_id] = staying.get(above.segment_id, above.dependents) - 1
        if staying[above.segment_id] or above.state is not SegmentState.LOST:
            return
        # It goes with the last that builds on it.
        above = above.parent
